"""How each type of model starts, by its `model_type`: a line where it is like another's, a function where it is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from locater.models.initial.fields import Fields
from locater.models.initial.start import Initial
from locater.theory import RandomAttention, RandomLinear, RandomMLP, RandomTransformer

__all__ = ["FAMILIES"]


def _transformer(
    c: Fields, std: float, *, inner: int, activation: str, eps: float, head_width: int | None = None,
    key_heads: int | None = None, logit_scale: float | None = None, gated: bool = False, output: float | None = None,
    up: float | None = None, down: float | None = None, more: dict[str, Any] | None = None, **attention: Any,
) -> RandomTransformer:  # fmt: skip
    """All matrices alike and logits divided by √K, unless something else is given; `more` is the transformer's."""
    width, heads = c.width, c.heads
    each = c.head_width() if head_width is None else head_width
    linear = RandomLinear(width, std)
    made = RandomAttention(
        heads, key_heads or heads, each, linear, linear, linear, RandomLinear(heads * each, output or std),
        each**-0.5 if logit_scale is None else logit_scale, **attention,
    )  # fmt: skip
    mlp = RandomMLP(RandomLinear(width, up or std), RandomLinear(inner, down or std), c.activation(activation), gated)
    return RandomTransformer(c.layers, made, mlp, eps=eps, **(more or {}))


# ---------------------------------------------------------------------- rotary decoders, of which Llama was the first


def _decoder(
    c: Fields, *, eps: str | float = "rms_norm_eps", activation: str = "hidden_act", gated: bool = True,
    rotary: str = "all", window: str | None = None, norm: str = "pre", qk_norm: str | None = None,
    logit_scale: float | None = None, token_factor: float = 1.0, norm_gain: float = 1.0, own_head_dim: bool = True,
    refuse: str | None = None, more: dict[str, Any] | None = None, **attention: Any,
) -> Initial:  # fmt: skip
    """Llama, and what differs from it.

    Args:
        eps: The field, or what the class has in its place.
        rotary: "all" coordinates, a "part" of them, or "layers" that may have embeddings of their own.
        window: "all" layers have `sliding_window`, or those that `layer_types` says ("layers").
        qk_norm: "head" or "all" of them at once.
        norm_gain: Of the norms before the branches.
        refuse: A field which, if set, makes something that is not known here.
        more: Of the transformer.
    """
    if refuse is not None:
        c.refuse(refuse, "is not known here")
    std, width = c.std(), c.head_width(own=own_head_dim)
    small = c.eps(eps) if isinstance(eps, str) else eps
    seen, alike = (c.window(), None) if window == "all" else c.windows() if window == "layers" else (None, None)
    types = sorted(set(c.layer_types())) if rotary == "layers" else [None]
    rates, factors = zip(*(c.rotary(width, partial=rotary == "part", layer_type=kind) for kind in types), strict=True)
    if len(set(factors)) > 1:
        c.fail("rope_parameters scale some layers only, and layers are taken to be alike")
    by_type = dict(zip(types, rates, strict=True))
    by_layer = tuple(by_type[kind] for kind in c.layer_types()) if len(set(rates)) > 1 else ()
    made = _transformer(
        c, norm_gain * std, inner=c.whole("intermediate_size"), activation=activation, eps=small, head_width=width,
        key_heads=c.whole("num_key_value_heads"), gated=gated, output=std, down=std, rotary=rates[0], causal=c.causal,
        window=seen, logit_scale=factors[0] * (width**-0.5 if logit_scale is None else logit_scale),
        qk_norm_eps=None if qk_norm is None else small, qk_norm_all=qk_norm == "all",
        more={"norm": norm, "rotary": by_layer} | (more or {}), **attention,
    )  # fmt: skip
    return Initial(
        "", c.width, made, token_factor * std, most_tokens=alike,
        most_because="that its sliding window holds: beyond it layers differ, and they are taken to be alike",
    )  # fmt: skip


def _without_rotary(made: Initial, rotated: list[bool]) -> Initial:
    """In the layers that have none."""
    t = made.transformer
    rates = tuple(t.attention.rotary if each else () for each in rotated)
    return replace(made, transformer=replace(t, rotary=rates))


def _hunyuan(c: Fields) -> Initial:
    if (c["rope_parameters"] or {}).get("alpha") is not None:
        c.fail("rope_parameters with alpha, its own kind, are not known here")
    return _decoder(c, qk_norm="head")


def _gemma(c: Fields, **more: Any) -> Initial:
    return _decoder(c, token_factor=math.sqrt(c.width), refuse="use_bidirectional_attention", **more)


def _gemma2(c: Fields, **more: Any) -> Initial:
    cap = None if c["attn_logit_softcapping"] is None else c.number("attn_logit_softcapping")
    scale = c.number("query_pre_attn_scalar") ** -0.5
    return _gemma(
        c, activation="hidden_activation", norm="sandwich", window="layers", logit_scale=scale, softcap=cap, **more
    )


def _granite(c: Fields) -> Initial:
    return _decoder(
        c, logit_scale=c.number("attention_multiplier"), token_factor=c.number("embedding_multiplier"),
        more={"branch": c.number("residual_multiplier")},
    )  # fmt: skip


def _stablelm(c: Fields) -> Initial:
    return _decoder(
        c, eps="layer_norm_eps", rotary="part", refuse="qk_layernorm", own_head_dim=False,
        more={"parallel": bool(c["use_parallel_residual"])},
    )  # fmt: skip


def _cohere2(c: Fields) -> Initial:
    made = _decoder(c, eps="layer_norm_eps", window="layers", more={"parallel": True})
    return _without_rotary(made, c.sliding())


def _smollm3(c: Fields) -> Initial:
    rotated = c["no_rope_layers"]  # 1: it has some
    if not isinstance(rotated, list) or len(rotated) != c.layers:
        c.fail(f"no_rope_layers must have a number for each of {c.layers} layers, got {rotated!r:.60}")
    return _without_rotary(_decoder(c, window="layers"), [bool(each) for each in rotated])


def _exaone4(c: Fields) -> Initial:
    made = _decoder(c, norm="output", qk_norm="head", window="layers")
    return made if c["sliding_window"] is None else _without_rotary(made, c.sliding())


def _gpt_neox(c: Fields) -> Initial:
    width = c.head_width()
    rotary, factor = c.rotary(width, partial=True)
    made = _transformer(
        c, c.std(), inner=c.whole("intermediate_size"), activation="hidden_act", eps=c.eps("layer_norm_eps"),
        rotary=rotary, logit_scale=factor * width**-0.5, causal=c.causal,
        more={"parallel": bool(c["use_parallel_residual"])},
    )  # fmt: skip
    return Initial("", c.width, made, c.std())


def _falcon(c: Fields) -> Initial:
    c.refuse("alibi", "is not known here")
    new, width = bool(c["new_decoder_architecture"]), c.head_width()
    rotary, factor = c.rotary(width)
    made = _transformer(
        c, c.std(), inner=c.whole("ffn_hidden_size"), activation="activation", eps=c.eps("layer_norm_epsilon"),
        key_heads=c.whole("num_kv_heads") if new or not c["multi_query"] else 1, rotary=rotary,
        logit_scale=factor * width**-0.5, causal=c.causal, more={"parallel": new or bool(c["parallel_attn"])},
    )  # fmt: skip
    return Initial("", c.width, made, c.std())


def _gptj(c: Fields) -> Initial:
    turned = c.whole("rotary_dim", c.head_width())
    made = _transformer(
        c, c.std(), inner=_inner(c, "n_inner"), activation="activation_function", eps=c.eps("layer_norm_epsilon"),
        rotary=tuple(10_000.0 ** (-i / turned) for i in range(0, turned - 1, 2)), causal=c.causal,
        more={"parallel": True},
    )  # fmt: skip
    return Initial("", c.width, made, c.std(), most_tokens=c.whole("max_position_embeddings"))


# ---------------------------------------------------------------------- decoders with learned positions


def _inner(c: Fields, name: str) -> int:
    return 4 * c.width if c[name] is None else c.whole(name)


def _gpt2(c: Fields, *, key_heads: int | None = None) -> Initial:
    c.refuse("scale_attn_by_inverse_layer_idx", "makes layers differ, and they are taken to be alike")
    std = c.std()
    last = std / math.sqrt(2 * c.layers)  # c_proj, of both branches
    made = _transformer(
        c, std, inner=_inner(c, "n_inner"), activation="activation_function", eps=c.eps("layer_norm_epsilon"),
        output=last, down=last, logit_scale=None if c["scale_attn_weights"] else 1.0, key_heads=key_heads,
        causal=c.causal,
    )  # fmt: skip
    positions = c.whole("max_position_embeddings")
    return Initial("", c.width, made, std, position_std=std, most_tokens=positions, smaller_by_depth=True)


def _gpt_bigcode(c: Fields) -> Initial:
    return _gpt2(c, key_heads=1 if c["multi_query"] else None)


def _gpt_neo(c: Fields) -> Initial:
    std, kinds, positions = c.std(), set(c["attention_layers"]), c.whole("max_position_embeddings")
    window = c.whole("window_size") if "local" in kinds else positions
    made = _transformer(
        c, std, inner=_inner(c, "intermediate_size"), activation="activation_function",
        eps=c.eps("layer_norm_epsilon"), logit_scale=1.0, window=window if kinds == {"local"} else None,
    )  # fmt: skip
    if len(kinds) == 1 or window >= positions:
        return Initial("", c.width, made, std, position_std=std, most_tokens=positions)
    because = "that its window_size holds: beyond it layers differ, and they are taken to be alike"
    return Initial("", c.width, made, std, position_std=std, most_tokens=window, most_because=because)


def _opt(c: Fields) -> Initial:
    std, narrow = c.std("init_std"), c.whole("word_embed_proj_dim")
    made = _transformer(
        c, std, inner=c.whole("ffn_dim"), activation="activation_function", eps=1e-5,  # nn.LayerNorm's own
        causal=c.causal, more={"norm": "pre" if c["do_layer_norm_before"] else "post"},
    )  # fmt: skip
    token_std = std if narrow == c.width else std * std * math.sqrt(narrow)  # project_in
    positions = c.whole("max_position_embeddings")
    return Initial("", c.width, made, token_std, position_std=std, most_tokens=positions)


def _clip(c: Fields, *, causal: bool) -> tuple[RandomTransformer, float]:
    factor, width = c.number("initializer_factor"), c.width
    small, plain = factor / math.sqrt(2 * c.layers * width), factor / math.sqrt(width)
    made = _transformer(
        c, small, output=plain, up=plain / math.sqrt(2), down=small, inner=c.whole("intermediate_size"),
        activation="hidden_act", eps=c.eps("layer_norm_eps"), causal=causal,
    )  # fmt: skip
    return made, factor


def _clip_text(c: Fields) -> Initial:
    made, factor = _clip(c, causal=c.causal)
    std, positions = 0.02 * factor, c.whole("max_position_embeddings")
    return Initial("", c.width, made, std, position_std=std, most_tokens=positions, smaller_by_depth=True)


# ---------------------------------------------------------------------- encoders


def _bert(c: Fields) -> Initial:
    c.whole("type_vocab_size")
    std = c.std()
    made = _transformer(
        c, std, inner=c.whole("intermediate_size"), activation="hidden_act", eps=c.eps("layer_norm_eps"),
        causal=bool(c["is_decoder"]) and c.causal, more={"norm": "post"},
    )  # fmt: skip
    positions = c.whole("max_position_embeddings")
    return Initial("", c.width, made, std, position_std=std, shared_std=std, normed=True, most_tokens=positions)


def _roberta(c: Fields) -> Initial:
    made, padding = _bert(c), c["pad_token_id"]  # positions count from behind it
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        c.fail(f"pad_token_id must be a whole number from 0, got {padding!r:.60}")
    return replace(made, most_tokens=c.whole("max_position_embeddings") - padding - 1)


def _distilbert(c: Fields) -> Initial:
    c.refuse("sinusoidal_pos_embds", "is not known here")
    std = c.std()
    made = _transformer(
        c, std, inner=c.whole("hidden_dim"), activation="activation", eps=1e-12, causal=False, more={"norm": "post"}
    )
    positions = c.whole("max_position_embeddings")
    return Initial("", c.width, made, std, position_std=std, normed=True, most_tokens=positions)


# ---------------------------------------------------------------------- images


def _patches(c: Fields) -> tuple[int, int]:
    """Pixels of one, and how many an image has."""
    (high, wide), (rows, columns) = c.sides("image_size"), c.sides("patch_size")
    return c.whole("num_channels", 1024) * rows * columns, (high // rows) * (wide // columns)


def _vit(c: Fields, *, inner: int | None = None, branch: float = 1.0) -> Initial:
    std, (pixels, patches) = c.std(), _patches(c)
    made = _transformer(
        c, std, inner=c.whole("intermediate_size") if inner is None else inner, activation="hidden_act",
        eps=c.eps("layer_norm_eps"), head_width=c.head_width(own=True), causal=False, more={"branch": branch},
    )  # fmt: skip
    return Initial(
        "", c.width, made, std * math.sqrt(pixels), position_std=std, first_std=std, pixels=pixels,
        most_tokens=patches + 1,
    )  # fmt: skip


def _dinov2(c: Fields) -> Initial:
    c.refuse("use_swiglu_ffn", "is not known here")
    if c.std() > 0.5:  # weights are cut off at 2
        c.fail(f"initializer_range must be at most 0.5, got {c.std():g}")
    return _vit(c, inner=int(c.width * c.number("mlp_ratio")), branch=c.number("layerscale_value"))


def _clip_vision(c: Fields) -> Initial:
    (made, factor), (pixels, patches) = _clip(c, causal=False), _patches(c)
    std = c.std() * factor
    return Initial(
        "", c.width, made, std * math.sqrt(pixels), position_std=std, first_std=factor / math.sqrt(c.width),
        pixels=pixels, normed=True, most_tokens=patches + 1, smaller_by_depth=True,
    )  # fmt: skip


def _siglip_vision(c: Fields) -> Initial:
    """Xavier's uniform distribution, and Flax's for patches."""
    width, inner, (pixels, patches) = c.width, c.whole("intermediate_size"), _patches(c)
    xavier = math.sqrt(2 / (width + inner))
    made = _transformer(
        c, width**-0.5, up=xavier, down=xavier, inner=inner, activation="hidden_act", eps=c.eps("layer_norm_eps"),
        causal=False,
    )  # fmt: skip
    cut = 0.87962566103423978  # std of a normal cut off at 2, which lecun_normal_ divides by and does not cut
    return Initial(
        "", width, made, 1 / cut, position_std=width**-0.5, pixels=pixels, most_tokens=patches
    )  # fmt: skip


_norm_behind: dict[str, Any] = {"norm": "output", "qk_norm": "all"}
FAMILIES: dict[str, Callable[[Fields], Initial]] = {
    "arcee": partial(_decoder, gated=False),
    "bert": _bert,
    "camembert": _roberta,
    "clip_text_model": _clip_text,
    "clip_vision_model": _clip_vision,
    "codegen": _gptj,
    "cohere": partial(_decoder, eps="layer_norm_eps", refuse="use_qk_norm", more={"parallel": True}),
    "cohere2": _cohere2,
    "dinov2": _dinov2,
    "distilbert": _distilbert,
    "ernie4_5": _decoder,
    "exaone4": _exaone4,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": partial(_gemma2, qk_norm="head", rotary="layers"),
    "glm": partial(_decoder, rotary="part"),
    "glm4": partial(_decoder, rotary="part", norm="sandwich"),
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "granite": _granite,
    "helium": _decoder,
    "hunyuan_v1_dense": _hunyuan,
    "llama": _decoder,
    "ministral": partial(_decoder, window="layers"),
    "mistral": partial(_decoder, window="all"),
    # its norms multiply by 1 + w, and w starts at 1
    "nemotron": partial(_decoder, eps="norm_eps", gated=False, rotary="part", norm_gain=2.0),
    "olmo": partial(_decoder, eps=1e-5, refuse="clip_qkv"),
    "olmo2": partial(_decoder, **_norm_behind),
    "olmo3": partial(_decoder, **_norm_behind, rotary="layers", window="layers"),
    "opt": _opt,
    "phi": partial(
        _decoder, eps="layer_norm_eps", gated=False, rotary="part", refuse="qk_layernorm", more={"parallel": True}
    ),
    "phi3": partial(_decoder, rotary="part", window="all"),
    "qwen2": partial(_decoder, window="layers"),
    "qwen3": partial(_decoder, qk_norm="head", window="layers"),
    "roberta": _roberta,
    "seed_oss": _decoder,
    "siglip_vision_model": _siglip_vision,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": partial(_decoder, eps="norm_epsilon", gated=False, window="all"),
    "vit": _vit,
    "xlm-roberta": _roberta,
}
"""Readers by `model_type`."""
