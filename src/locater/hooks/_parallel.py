"""Heads that are spread over ranks: tensor parallelism."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn


def first_head(module: nn.Module, heads: int) -> int:
    """The number, in the whole model, of the first of the heads of a module that this rank computes.

    To be asked while the module runs: what FSDP has sharded is whole then, and rows that are sharded still are those
    of a rank's own heads.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    for parameter in module.parameters():
        for dim, placement in enumerate(getattr(parameter, "placements", ())):
            if parameter.ndim == 2 and placement.is_shard(0):
                return int(parameter.device_mesh.get_local_rank(dim)) * heads  # type: ignore[attr-defined]
    return 0
