"""OPT: separate projections with biases, learned positions."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import Heads, layer_norm, separate
from locater.models.registry import Site, register


@register("OPTAttention", checkpoints=("opt",), paths=(r"(?:.*\.)?layers\.\d+\.self_attn",))
def read(site: Site) -> Attention:
    heads = Heads.of(site)
    query, key = separate(site, "q_proj", "k_proj", heads)
    before = site.setting("do_layer_norm_before", default=True)
    return site.attention(
        query,
        key,
        scale=heads.width**-0.5,
        input_norm=layer_norm(site, "../self_attn_layer_norm") if before else None,
    )
