"""Vision transformers whose attention has q_proj and k_proj; older ones are laid out as BERT."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import layer_norm, separate, usual_attention
from locater.models.registry import Site, register


@register(
    "ViTAttention",
    checkpoints=("vit",),
    paths=(r"(?:.*\.)?layers?\.\d+\.attention(?:\.attention)?(?=\.(?:q_proj|query)\.)",),
)
def read(site: Site) -> Attention:
    older = site.optional("query.weight") is not None
    layers = ("query", "key") if older else ("q_proj", "k_proj")
    norm = layer_norm(site, "../layernorm_before" if not older else "../../layernorm_before", "layer_norm_eps")
    return usual_attention(site, separate, *layers, input_norm=norm)
