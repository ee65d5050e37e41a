"""Falcon: three layouts of one fused layer (new grouped, multi-query, plain), RoPE or ALiBi."""

from __future__ import annotations

from dataclasses import replace

from locater.models.attention import Alibi, Attention, Projection
from locater.models.families._parts import Heads, interleaved, layer_norm, projection, rope
from locater.models.families.bloom import alibi_slopes
from locater.models.registry import Site, register


@register("FalconAttention", checkpoints=("falcon",), paths=(r"(?:.*\.)?h\.\d+\.self_attention",))
def read(site: Site) -> Attention:
    heads = Heads.of(site)
    count = heads.groups * heads.per_group
    query, key = _split(site, replace(heads, groups=count, per_group=1))
    alibi = site.setting("alibi", default=False)
    norm = "../ln_attn" if site.optional("../ln_attn.weight") is not None else "../input_layernorm"
    return site.attention(
        query,
        key,
        scale=heads.width**-0.5,
        rope=None if alibi else rope(site, heads.width),
        position_bias=Alibi(alibi_slopes(count), rounded=True) if alibi else None,
        bias_scale=heads.width**-0.5,  # ALiBi is added before scaling here
        input_norm=layer_norm(site, norm, "layer_norm_epsilon"),
    )


def _split(site: Site, heads: Heads) -> tuple[Projection, Projection]:
    name, count, width = "query_key_value", heads.groups, heads.width
    if site.setting("new_decoder_architecture", default=False):
        groups = site.setting("num_kv_heads", default=count)
        shape = (groups, count // groups + 2, width)
        return (
            projection(site, name, lambda t: t.unflatten(0, shape)[:, :-2]),
            projection(site, name, lambda t: t.unflatten(0, shape)[:, -2:-1]),
        )
    if site.setting("multi_query", default=True):
        return (
            projection(site, name, lambda t: t.unflatten(0, (1, count + 2, width))[:, :-2]),
            projection(site, name, lambda t: t.unflatten(0, (1, count + 2, width))[:, -2:-1]),
        )
    return interleaved(site, name, heads)
