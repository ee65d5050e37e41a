"""GGUF files, read through llama.cpp's own Python package: mapped, and dequantised tensor by tensor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError, require
from locater.models.checkpoint import Checkpoint

__all__ = ["open_gguf"]

# GGUF's architecture to the model_type whose names and layout it follows
_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
}


def open_gguf(path: Path) -> Checkpoint:
    gguf = require("gguf", "hf")
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise LocaterError(f"{path} is truncated or not a GGUF file: {error}") from error
    architecture = _field(reader, "general.architecture")
    if architecture not in _ARCHITECTURES:
        raise LocaterError(
            f"{path}: GGUF architecture {architecture!r} is not one locater reads: {', '.join(_ARCHITECTURES)}"
        )
    config = _config(reader, architecture)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if any(name.startswith("rope_factors_") for name in stored):
        raise LocaterError(f"{path} uses rotary embeddings that change with the length of the text (longrope)")
    blocks = {name.split(".")[1] for name in stored if name.startswith("blk.")}
    if config["num_hidden_layers"] is not None and len(blocks) < config["num_hidden_layers"]:
        raise LocaterError(
            f"{path} holds {len(blocks)} of {config['num_hidden_layers']} blocks: it is one part of a split file; "
            "merge the parts first"
        )
    if "rope_freqs.weight" in stored:
        factors = stored["rope_freqs.weight"].data.astype("float64").tolist()
        config["rope_parameters"] = {"rope_type": "factors", "rope_theta": config["rope_theta"], "factors": factors}
    where = {name: tensor for tensor in reader.tensors if (name := _name(tensor.name)) is not None}

    def load(name: str) -> Tensor:
        tensor = where[name]
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        values = values.reshape(tuple(reversed(tensor.shape.tolist())))
        if architecture == "llama":
            values = _unpermuted(name, values, config)
        if architecture.startswith("gemma") and name.endswith(("norm.weight", "layernorm.weight")):
            values = values - 1  # stored with the one that the model adds
        return values

    return Checkpoint(str(path), config, frozenset(where), load)


def _name(stored: str) -> str | None:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight; None for what attention does not need."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored)
    if match is None or match.group(2) not in _NAMES:
        return None
    return f"model.layers.{match.group(1)}.{_NAMES[match.group(2)]}.{match.group(3)}"


def _unpermuted(name: str, values: Tensor, config: dict[str, Any]) -> Tensor:
    """Undoes llama.cpp's order of the q and k rows of llama-type models: neighbouring pairs back to halves."""
    key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if key is None:
        return values
    heads = config[key]
    if len(values) % (2 * heads):
        raise LocaterError(f"{name} has {len(values)} rows, which do not split into {heads} heads")
    paired = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def _config(reader: Any, architecture: str) -> dict[str, Any]:
    def field(name: str) -> Any:
        return _field(reader, f"{architecture}.{name}")

    heads = field("attention.head_count")
    config = {
        "model_type": _ARCHITECTURES[architecture],
        "hidden_size": field("embedding_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv") or heads,
        "head_dim": field("attention.key_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base") or 10000.0,
        "attn_logit_softcapping": field("attn_logit_softcapping"),
        "num_hidden_layers": field("block_count"),
    }
    if config["hidden_size"] is None or heads is None:
        raise LocaterError(f"the GGUF file says neither {architecture}.embedding_length nor head_count")
    rotary = field("rope.dimension_count")
    width = config["head_dim"] or config["hidden_size"] // heads
    if rotary is not None and rotary != width:
        config["partial_rotary_factor"] = rotary / width
    kind = field("rope.scaling.type")
    if architecture == "gemma3":
        config["rope_local_base_freq"] = field("rope.freq_base_swa") or 10000.0
    if kind not in (None, "none"):
        config["rope_scaling"] = {"rope_type": kind, "factor": field("rope.scaling.factor")}
    return config


def _field(reader: Any, name: str) -> Any:
    field = reader.fields.get(name)
    return None if field is None else field.contents()
