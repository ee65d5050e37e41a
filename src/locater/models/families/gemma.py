"""Gemma, Gemma 2 (softcap) and Gemma 3 (QK-norm, two rotary bases). RMSNorm's gain is stored minus one."""

from __future__ import annotations

from dataclasses import replace

from locater.models.attention import Attention
from locater.models.families._parts import Heads, rms_norm, rope, rope_from, separate
from locater.models.registry import Site, register
from locater.models.rope import Rope


@register(
    checkpoints=("gemma", "gemma2", "gemma3_text"),
    paths=(r"(?:.*\.)?layers\.\d+\.self_attn",),
)
def read(site: Site) -> Attention:
    if site.setting("model_type", default="") == "gemma3_text":
        site = replace(site, config={**_GEMMA3_DEFAULTS, **{k: v for k, v in site.config.items() if v is not None}})
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


# what a Gemma 3 config.json may leave out
_GEMMA3_DEFAULTS = {
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
}


def _rope(site: Site, width: int) -> Rope:
    """Gemma 3 rotates its sliding-window layers by a base of their own."""
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
