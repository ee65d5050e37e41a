"""T5: no scale, no biases, a learned bias per bucket of relative position that the first block lends to all."""

from __future__ import annotations

import re

from torch import Tensor

from locater.models.attention import Attention, RelativeBias
from locater.models.families._parts import Heads, rms_norm, separate
from locater.models.registry import Site, register


@register(
    "T5Attention",
    checkpoints=("t5",),
    paths=(r"(?:.*\.)?(?:encoder|decoder)\.block\.\d+\.layer\.\d+\.(?:SelfAttention|EncDecAttention)",),
)
def read(site: Site) -> Attention:
    heads = Heads(site.setting("num_heads"), 1, site.setting("d_kv"))
    query, key = separate(site, "q", "k", heads)
    cross, decoder = site.name.endswith("EncDecAttention"), "decoder." in site.name
    block = re.search(r"block\.(\d+)", site.name)
    bias = None if cross else _first_bias(site)
    return site.attention(
        query,
        key,
        layer=int(block.group(1)) if block else site.layer,
        kind="cross" if cross else "decoder" if decoder else "encoder",
        scale=1.0,
        position_bias=None
        if bias is None
        else RelativeBias(bias, not decoder, site.setting("relative_attention_max_distance", default=128)),
        input_norm=None if cross else rms_norm(site, "../layer_norm"),
    )


def _first_bias(site: Site) -> Tensor | None:
    first = re.sub(r"block\.\d+", "block.0", site.name)
    return site.tensors.get(f"{first}.relative_attention_bias.weight")
