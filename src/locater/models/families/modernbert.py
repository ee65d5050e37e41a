"""ModernBERT: one layer with all of q, then k, then v; RoPE with another base in sliding-window layers."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import layer_norm, rope, rope_from, stacked, usual_attention
from locater.models.registry import Site, register
from locater.models.rope import Rope


@register("ModernBertAttention", checkpoints=("modernbert",), paths=(r"(?:.*\.)?layers\.\d+\.attn",))
def read(site: Site) -> Attention:
    norm = layer_norm(site, "../attn_norm", "norm_eps")
    return usual_attention(site, stacked, "Wqkv", rope=_rope, input_norm=norm)


def _rope(site: Site, width: int) -> Rope:
    layer_types = site.setting("layer_types", default=None)
    if layer_types is not None:
        return rope(site, width, layer_type=layer_types[site.layer])
    every = site.setting("global_attn_every_n_layers", default=3)
    base = "local_rope_theta" if site.layer % every else "global_rope_theta"
    return rope_from({"rope_theta": site.setting(base)}, width, site)
