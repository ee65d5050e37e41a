"""ALBERT: a few modules, each used by many layers."""

from __future__ import annotations

import re

from locater.models.attention import Attention
from locater.models.families._parts import separate, usual_attention
from locater.models.registry import Site, register


@register(
    "AlbertAttention",
    checkpoints=("albert",),
    paths=(r"(?:.*\.)?albert_layer_groups\.\d+\.albert_layers\.\d+\.attention",),
)
def read(site: Site) -> Attention:
    """Layers are counted as they run: `inner_group_num` modules of a group after one another, for each hidden layer."""
    numbers = [int(number) for number in re.findall(r"\.(\d+)(?=\.)", f".{site.name}.")]
    group, inner = numbers[-2:] if len(numbers) > 1 else (0, 0)  # a module that is read by itself has no numbers
    count, groups = site.setting("num_hidden_layers"), site.setting("num_hidden_groups", default=1)
    steps = site.setting("inner_group_num", default=1)
    uses = tuple(layer * steps + inner for layer in range(count) if int(layer / (count / groups)) == group)
    shared = {"layer": uses[0], "layers": uses} if len(uses) > 1 else {"layer": uses[0] if uses else site.layer}
    return usual_attention(site, separate, "query", "key", **shared)
