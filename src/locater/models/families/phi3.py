"""Phi-3: one layer with all of q, then k, then v; RoPE, possibly on a part of each head."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import rms_norm, rope, stacked, usual_attention
from locater.models.registry import Site, register


@register(checkpoints=("phi3",), paths=(r"(?:.*\.)?layers\.\d+\.self_attn",))
def read(site: Site) -> Attention:
    return usual_attention(site, stacked, "qkv_proj", rope=rope, input_norm=rms_norm(site, "../input_layernorm"))
