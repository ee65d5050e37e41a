"""Sharded parameters (FSDP2, tensor parallelism) made whole, and whole gradients handed back to the shards."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gathered", "is_sharded", "scattered_add_"]


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "full_tensor")


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; itself where it is not sharded."""
    if not is_sharded(tensor):
        return tensor
    whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return whole


@torch.no_grad()
def scattered_add_(parameter: Tensor, whole_gradient: Tensor) -> None:
    """Adds each rank's part of a gradient that every rank holds whole. No communication."""
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(whole_gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)
    part = replicated.redistribute(mesh, parameter.placements)
    if parameter.grad is None:
        parameter.grad = part.to(parameter.dtype)
    else:
        parameter.grad.add_(part)
