"""Layouts of weights: other projects' names, order of rows and float8, as transformers has them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.names import plain_name

__all__ = ["UNQUANTISED", "llama_config", "standard", "state_dict", "unpermuted", "whisper_config"]

_NESTED = ("model_state_dict", "state_dict", "model", "module")
# a tensor that only this layout has, and its words for transformers'
_META = {
    "attention": "self_attn", "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_WHISPER = {
    "blocks": "layers", "attn": "self_attn", "cross_attn": "encoder_attn", "attn_ln": "self_attn_layer_norm",
    "cross_attn_ln": "encoder_attn_layer_norm", "mlp_ln": "final_layer_norm", "query": "q_proj", "key": "k_proj",
    "value": "v_proj", "out": "out_proj",
}  # fmt: skip
_LAYOUTS = (
    (re.compile(r"layers\.\d+\.attention\.wq\.weight"), _META),
    (re.compile(r"(?:encoder|decoder)\.blocks\.\d+\.attn\.query\.weight"), _WHISPER),
)
_PACKED = re.compile(
    r".*(?:attn|attention|query|q_proj|qkv).*"
    r"\.(?:qweight|weight_packed|weight\.absmax|weight\.quant_state\..*|SCB|W_q|weight_blocks)"
)
UNQUANTISED = "scan the 16-bit model it was made from, or dequantise it (transformers: model.dequantize()) and save it"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def standard(
    origin: str, config: Mapping[str, Any], stored: Iterable[str], load: Callable[[str], Tensor]
) -> tuple[frozenset[str], Callable[[str], Tensor]]:
    """The names that transformers gives to these tensors, and how to load one of them: its rows, dequantised."""
    where = {plain_name(name): name for name in stored}
    while where and all(name.startswith("module.") for name in where):  # torch's DistributedDataParallel
        where = {name.removeprefix("module."): own for name, own in where.items()}
    packed = next((name for name in where if _PACKED.fullmatch(name)), None)
    if packed is not None:
        raise LocaterError(f"{packed} in {origin} is quantised{_method(config)}; {UNQUANTISED}")
    words = next((words for known, words in _LAYOUTS if any(map(known.fullmatch, where))), None)
    if words is not None:
        where = {"model." + ".".join(words.get(p, p) for p in name.split(".")): own for name, own in where.items()}

    def read(name: str) -> Tensor:
        tensor = load(where[name])
        if tensor.dtype in _FLOAT8:
            scale = next((s for s in (f"{name}_scale_inv", f"{name}_scale") if s in where), None)
            if scale is None:
                raise LocaterError(f"{name} in {origin} is float8 and has no {name}_scale beside it; {UNQUANTISED}")
            tensor = _scaled(f"{name} in {origin}", tensor, load(where[scale]), config)
        return unpermuted(name, tensor, config) if words is _META else tensor

    return frozenset(where), read


def _method(config: Mapping[str, Any]) -> str:
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    return f" by {method}" if isinstance(method, str) else ""


def _scaled(what: str, weight: Tensor, scale: Tensor, config: Mapping[str, Any]) -> Tensor:
    """float8 times its scale: one, one a row, or one for each block of rows and columns."""
    values, scale = weight.float(), scale.float()
    if scale.numel() == 1:
        return values * scale.reshape(())
    if scale.shape in (weight.shape[:1], (*weight.shape[:1], 1)):
        return values * scale.reshape(-1, *[1] * (weight.ndim - 1))
    quantised = config.get("quantization_config")
    block = (quantised.get("weight_block_size") if isinstance(quantised, Mapping) else None) or [128, 128]
    whole = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    if not whole or scale.shape != tuple(math.ceil(n / b) for n, b in zip(weight.shape, block, strict=False)):
        raise LocaterError(
            f"{what} has shape {tuple(weight.shape)}, but scales {tuple(scale.shape)} for blocks of {block!r:.80}"
        )
    rows = scale.repeat_interleave(block[0], 0)[: len(values)]
    return values.mul_(rows.repeat_interleave(block[1], 1)[:, : values.shape[1]])


def unpermuted(name: str, values: Tensor, config: Mapping[str, Any]) -> Tensor:
    """The q and k rows of Meta and llama.cpp, rotary pairs beside each other, as transformers' halves."""
    key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if key is None:
        return values
    heads = config.get(key) or config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1 or len(values) % (2 * heads):
        raise LocaterError(f"{name} has {len(values)} rows, which do not split into {heads!r:.80} heads")
    paired = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def state_dict(loaded: Any, what: object) -> dict[str, Tensor]:
    """The tensors by name in what torch.load gave, beside or inside what else a trainer saved."""
    state = loaded
    for _ in _NESTED:
        if isinstance(state, dict) and not any(isinstance(value, Tensor) for value in state.values()):
            state = next((state[key] for key in _NESTED if isinstance(state.get(key), dict)), None)
    found = {name: each for name, each in state.items() if isinstance(each, Tensor)} if isinstance(state, dict) else {}
    if not found or not all(isinstance(name, str) for name in found):
        raise LocaterError(f"{what} holds no state dict of tensors by name")
    return found


def llama_config(params: Mapping[str, Any], what: object) -> dict[str, Any]:
    """Meta's params.json as transformers' configuration."""
    if not {"dim", "n_heads"} <= params.keys():
        raise LocaterError(f"{what} has no dim and n_heads, which say how many heads there are and how wide")
    config = {
        "model_type": "llama",
        "hidden_size": params["dim"],
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": params.get("n_kv_heads") or params["n_heads"],
        "num_hidden_layers": params.get("n_layers"),
        "head_dim": params.get("head_dim"),
        "rms_norm_eps": params.get("norm_eps", 1e-5),
        "rope_theta": params.get("rope_theta") or 10000.0,
    }
    if params.get("use_scaled_rope"):  # 3.1's factor is 8, that of 3.2's small models 32; the older files do not say
        factor = params.get("rope_scaling_factor") or (32.0 if params["dim"] in (2048, 3072) else 8.0)
        lengths = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        config["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **lengths}
    return config


def whisper_config(dims: Mapping[str, Any], what: object) -> dict[str, Any]:
    """The `dims` of OpenAI's Whisper files as transformers' configuration."""
    named = {
        "d_model": "n_audio_state", "encoder_layers": "n_audio_layer", "encoder_attention_heads": "n_audio_head",
        "decoder_layers": "n_text_layer", "decoder_attention_heads": "n_text_head", "num_mel_bins": "n_mels",
        "max_source_positions": "n_audio_ctx", "max_target_positions": "n_text_ctx",
    }  # fmt: skip
    missing = [name for name in named.values() if not isinstance(dims.get(name), int)]
    if missing:
        raise LocaterError(f"the dims of {what} have no whole number {missing[0]}")
    return {"model_type": "whisper", **{name: dims[own] for name, own in named.items()}}
