"""Phi-3: one layer with all of q, then k, then v; RoPE, possibly on a part of each head."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import Heads, rms_norm, rope, stacked
from locater.models.registry import Site, register


@register("Phi3Attention", checkpoints=("phi3",), paths=(r"(?:.*\.)?layers\.\d+\.self_attn",))
def read(site: Site) -> Attention:
    heads = Heads.of(site)
    query, key = stacked(site, "qkv_proj", heads)
    return site.attention(
        query,
        key,
        scale=heads.width**-0.5,
        rope=rope(site, heads.width),
        input_norm=rms_norm(site, "../input_layernorm"),
    )
