"""OPT: separate projections with biases, learned positions."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import layer_norm, separate, usual_attention
from locater.models.registry import Site, register


@register("OPTAttention", checkpoints=("opt",), paths=(r"(?:.*\.)?layers\.\d+\.self_attn",))
def read(site: Site) -> Attention:
    before = site.setting("do_layer_norm_before", default=True)
    norm = layer_norm(site, "../self_attn_layer_norm") if before else None
    return usual_attention(site, separate, "q_proj", "k_proj", input_norm=norm)
