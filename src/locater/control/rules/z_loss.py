"""Attention z-loss: strength · the mean over queries and heads of logsumexp(logits)² (PaLM's z-loss, on attention)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["LossScale", "penalised", "squared"]

LossScale: TypeAlias = float | Callable[[], float]


def squared(logsumexp: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logsumexp² (…, queries) and whether a query counts: not one that sees no key, nor one that is not `counted`."""
    counts = logsumexp.detach() != -torch.inf
    if counted is not None:
        counts = counts & counted
    return logsumexp.masked_fill(~counts, 0).square(), counts


def penalised(carrier: Tensor, penalty: Tensor, loss_scale: LossScale = 1.0) -> Tensor:
    """The carrier as it is, through which backward reaches a penalty besides: its gradient joins the first loss's."""
    carried: Tensor = _Penalised.apply(carrier, penalty, loss_scale)  # type: ignore[no-untyped-call]
    return carried


class _Penalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, penalty: Tensor, loss_scale: LossScale) -> Tensor:
        ctx.loss_scale, ctx.like, ctx.has_joined = loss_scale, (penalty.dtype, penalty.device), False
        return carrier.view_as(carrier)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, None]:
        if ctx.has_joined:  # another loss of the same forward
            return gradients[0], None, None
        ctx.has_joined = True
        scale = ctx.loss_scale() if callable(ctx.loss_scale) else ctx.loss_scale
        dtype, device = ctx.like
        return gradients[0], torch.full((), float(scale), dtype=dtype, device=device), None
