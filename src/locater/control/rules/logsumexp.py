"""The logsumexp of every query's logits with its gradient, no T × T kept.

Forward is `measure.attention_statistics`. Backward computes the logits again, a block of queries at a time: with
p = e^(s − lse) the softmax, ∂lse_i/∂q_i = scale Σ_j p_ij k_j and ∂lse_i/∂k_j = scale p_ij q_i, times 1 − tanh² under a
softcap. A sink's is the weight that it has, e^(sink − lse).

Legend: B batch, H query heads, G key heads, R = H / G, Tq queries, Tk keys, K head width, n and c of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from locater.hooks import Call, Visibility
from locater.measure import attention_statistics

__all__ = ["logsumexp"]

_CPU_LOGITS, _LOGITS = 1 << 20, 1 << 25  # in a block


def logsumexp(call: Call) -> Tensor:
    """(B, H, Tq), −∞ for queries whose keys are all masked; differentiable in q, k and sinks, not in biases."""
    found: Tensor = _LogSumExp.apply(call.q, call.k, call.sinks, call.detached())  # type: ignore[no-untyped-call]
    return found


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, sinks: Tensor | None, call: Call) -> Tensor:
        lse = attention_statistics(call.q, call.k, rho=False, **call.options()).logsumexp
        ctx.save_for_backward(q, k, sinks, lse)
        # what is saved is not kept a second time
        ctx.call = replace(call, q=q.new_empty(0), k=k.new_empty(0), sinks=None)
        return lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        q, k, sinks, lse = ctx.saved_tensors
        d_sinks = None
        if sinks is not None:
            weight = (sinks.to(lse.dtype)[:, None] - lse).exp()  # (B, H, Tq)
            d_sinks = (weight * upstream).sum((0, 2)).to(sinks.dtype)
        return (*_gradients(replace(ctx.call, q=q, k=k), lse, upstream), d_sinks, None)


def _gradients(call: Call, lse: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    (b, h, _, width), g = call.q.shape, call.k.shape[1]
    wide = torch.float64 if lse.dtype == torch.float64 else torch.float32
    scale = width**-0.5 if call.scale is None else call.scale
    d_q = torch.empty(call.q.shape, dtype=wide, device=lse.device)
    d_k = torch.zeros(call.k.shape, dtype=wide, device=lse.device)
    lse = lse.to(wide).masked_fill(lse == -torch.inf, torch.inf)  # all its keys are masked: p is 0
    masks = call.visibility
    for rows, columns in _blocks(masks):
        queries, keys = call.q[:, :, rows].to(wide), call.k[:, :, columns].to(wide)
        folded = queries.reshape(b, g, -1, width)  # (B, G, R·n, K): a group's heads share its keys
        with torch.autocast(lse.device.type, enabled=False):
            s = (folded @ keys.mT).mul_(scale).view(b, h, -1, keys.shape[2])  # (B, H, n, c)
            bent = None
            if call.softcap is not None:
                bent = torch.tanh(s / call.softcap)
                s = call.softcap * bent
            p = masks.apply_(s, rows, columns).sub_(lse[:, :, rows, None]).exp_()
            p.mul_(upstream[:, :, rows, None].to(wide)).mul_(scale)
            if bent is not None:
                p.mul_(1 - bent.square())
            p = p.view(b, g, -1, keys.shape[2])
            d_q[:, :, rows] = (p @ keys).view(b, h, -1, width)
            d_k[:, :, columns] += p.mT @ folded
    return d_q.to(call.q.dtype), d_k.to(call.k.dtype)


def _blocks(masks: Visibility) -> Iterator[tuple[slice, slice]]:
    """Queries of a block, and the keys that are unmasked for one of them."""
    b, h, tq, tk = masks.shape
    size = max(1, (_CPU_LOGITS if masks.device.type == "cpu" else _LOGITS) // (b * h * tk))
    for start in range(0, tq, size):
        rows = slice(start, min(start + size, tq))
        yield rows, masks.columns(rows, slice(0, tk))
