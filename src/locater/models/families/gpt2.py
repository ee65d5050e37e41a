"""GPT-2: one Conv1D for q, k and v, stored transposed; learned positions, so no RoPE."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import Heads, layer_norm, projection, stacked
from locater.models.parts import Projection
from locater.models.registry import Site, register


@register(
    checkpoints=("gpt2",),
    paths=(r"(?:.*\.)?h\.\d+\.attn", r"(?:.*\.)?h\.\d+\.crossattention"),
)
def read(site: Site) -> Attention:
    heads = Heads.of(site)
    cross = site.optional("q_attn.weight") is not None
    query, key = _cross(site, heads) if cross else stacked(site, "c_attn", heads, transposed=True)
    scale = heads.width**-0.5 if site.setting("scale_attn_weights", default=True) else 1.0
    if site.setting("scale_attn_by_inverse_layer_idx", default=False):
        scale /= site.layer + 1
    return site.attention(
        query,
        key,
        kind="cross" if cross else "self",
        scale=scale,
        input_norm=None if cross else layer_norm(site, "../ln_1", "layer_norm_epsilon"),
    )


def _cross(site: Site, heads: Heads) -> tuple[Projection, Projection]:
    """q has a layer of its own, c_attn holds k and v."""
    rows = heads.key_rows
    return (
        projection(site, "q_attn", lambda t: t.unflatten(0, heads.query_shape), transposed=True),
        projection(site, "c_attn", lambda t: t[:rows].unflatten(0, heads.key_shape), transposed=True),
    )
