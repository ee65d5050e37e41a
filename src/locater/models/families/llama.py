"""Llama and those built like it: separate projections, grouped-query attention, full RoPE, RMSNorm before.

Mistral is the same; Qwen2 adds biases; Qwen3 normalises q and k per head; Granite has its own scale.
"""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import Heads, rms_norm, rope, separate
from locater.models.registry import Site, register


@register(
    checkpoints=("llama", "mistral", "qwen2", "qwen3", "granite"),
    paths=(r"(?:.*\.)?layers\.\d+\.self_attn",),
)
def read(site: Site) -> Attention:
    heads = Heads.of(site)
    query, key = separate(site, "q_proj", "k_proj", heads)
    return site.attention(
        query,
        key,
        scale=site.setting("attention_multiplier", default=heads.width**-0.5),
        rope=rope(site, heads.width),
        query_norm=rms_norm(site, "q_norm"),
        key_norm=rms_norm(site, "k_norm"),
        input_norm=rms_norm(site, "../input_layernorm"),
    )
