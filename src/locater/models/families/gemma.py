"""Gemma, Gemma 2 (softcap) and Gemma 3 (QK-norm, two rotary bases). RMSNorm's gain is stored minus one."""

from __future__ import annotations

from locater.models.attention import Attention, Rope
from locater.models.families._parts import Heads, rms_norm, rope, rope_from, separate
from locater.models.registry import Site, register


@register(
    "GemmaAttention",
    "Gemma2Attention",
    "Gemma3Attention",
    checkpoints=("gemma", "gemma2", "gemma3_text", "gemma3"),
    paths=(r"(?:.*\.)?layers\.\d+\.self_attn",),
)
def read(site: Site) -> Attention:
    heads = Heads.of(site)
    query, key = separate(site, "q_proj", "k_proj", heads)
    return site.attention(
        query,
        key,
        scale=site.setting("query_pre_attn_scalar", default=heads.width) ** -0.5,
        rope=_rope(site, heads.width),
        query_norm=rms_norm(site, "q_norm", plus_one=True),
        key_norm=rms_norm(site, "k_norm", plus_one=True),
        softcap=site.setting("attn_logit_softcapping", default=None),
        input_norm=rms_norm(site, "../input_layernorm", plus_one=True),
    )


def _rope(site: Site, width: int) -> Rope:
    """Gemma 3 turns its sliding-window layers by a base of their own."""
    layer_types = site.setting("layer_types", default=None)
    if layer_types is None:  # older configurations: every sixth layer is global
        pattern = site.setting("sliding_window_pattern", "_sliding_window_pattern", default=6)
        sliding = bool((site.layer + 1) % pattern)
    else:
        sliding = layer_types[site.layer] == "sliding_attention"
    local_base = site.setting("rope_local_base_freq", default=None)
    if sliding and local_base is not None and site.setting("rope_parameters", default=None) is None:
        return rope_from({"rope_theta": local_base}, width, site)
    return rope(site, width, layer_type="sliding_attention" if sliding else "full_attention")
