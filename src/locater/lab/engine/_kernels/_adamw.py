# ruff: noqa: N803  # capitals are Triton's way to mark constants, and the legend's
"""AdamW, one update of all members in one launch.

Legend: E stacked models, P parameters of a model.
"""

from __future__ import annotations

import math
from typing import no_type_check

import torch
from torch import Tensor

from locater._triton import ceil, jit, on, tl
from locater.errors import LocaterError


@jit
@no_type_check
def _correction(step, log_beta):
    """1 − β^step, in float32 to its last bits: the series where the difference would cancel."""
    u = step * log_beta
    series = 1 + u / 6 * (1 + u / 7 * (1 + u / 8))
    series = 1 + u / 2 * (1 + u / 3 * (1 + u / 4 * (1 + u / 5 * series)))
    return tl.where(u > -0.5, -u * series, 1 - tl.exp(u))


@jit
@no_type_check
def _adamw_kernel(
    p, g, m, v, low, learning_rate, decay, step, active, grad_scale, P, g_e, log_beta1, log_beta2, beta2, rest1, rest2,
    eps, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1)
    if tl.load(active + e) != 0:
        k, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), e.to(tl.int64) * P
        mask = k < P
        rate = tl.load(learning_rate + e).to(tl.float32)
        count = tl.load(step + e).to(tl.float32)
        size = rate / _correction(count, log_beta1)
        root = 1 / tl.sqrt(_correction(count, log_beta2))
        gradient = tl.load(g + e.to(tl.int64) * g_e + k, mask=mask, other=0.0).to(tl.float32)
        if grad_scale is not None:
            gradient *= tl.load(grad_scale + e).to(tl.float32)
        first = tl.load(m + row + k, mask=mask, other=0.0)
        second = tl.load(v + row + k, mask=mask, other=0.0)
        value = tl.load(p + row + k, mask=mask, other=0.0)
        first += rest1 * (gradient - first)
        second = beta2 * second + rest2 * gradient * gradient
        value *= 1 - rate * tl.load(decay + e).to(tl.float32)
        value -= size * (first / (tl.sqrt(second) * root + eps))
        tl.store(m + row + k, first, mask=mask)
        tl.store(v + row + k, second, mask=mask)
        tl.store(p + row + k, value, mask=mask)
        if low is not None:
            tl.store(low + row + k, value.to(low.dtype.element_ty), mask=mask)


@torch.no_grad()
def adamw_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    low: Tensor | None,
    *,
    learning_rate: Tensor,
    decay: Tensor,
    step: Tensor,
    active: Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    grad_scale: Tensor | None = None,
) -> None:
    """One update as `torch.optim.AdamW` makes it, of each member whose `active` is not 0; nothing of others changes.

    p, m, v (E, P) in float32, contiguous; g (E, P); `low`, if given, receives p in its own precision. All others are
    (E,) on the same device: `step` counts this update too, and the gradient is multiplied by `grad_scale`.
    P should be a multiple of 16, else rows start anywhere and are read 4 bytes at a time.
    """
    members, count = p.shape
    for name, tensor in (("p", p), ("m", m), ("v", v), ("low", p if low is None else low)):
        if tensor.shape != p.shape or not tensor.is_contiguous():
            raise LocaterError(f"{name} must be contiguous and {tuple(p.shape)} as p, got {tuple(tensor.shape)}")
    if any(tensor.dtype != torch.float32 for tensor in (p, m, v)):
        raise LocaterError(f"p, m and v must be float32, got {p.dtype}, {m.dtype} and {v.dtype}")
    if g.shape != p.shape or g.stride(1) != 1:
        raise LocaterError(f"g must be {tuple(p.shape)} as p with contiguous rows, got {tuple(g.shape)}")
    given = {"learning_rate": learning_rate, "decay": decay, "step": step, "active": active, "grad_scale": grad_scale}
    for name, value in given.items():
        if value is not None and (value.shape != (members,) or not value.is_contiguous() or value.device != p.device):
            raise LocaterError(f"{name} must be ({members},) on {p.device}, got {tuple(value.shape)} on {value.device}")
    if active.dtype == torch.bool:
        active = active.view(torch.uint8)
    numbers = (*(math.log(beta) for beta in betas), betas[1], 1 - betas[0], 1 - betas[1], eps)
    block = 1024  # 8 elements a thread
    with on(p):
        _adamw_kernel[(ceil(count, block), members)](
            p, g, m, v, low, learning_rate, decay, step, active, grad_scale, count, g.stride(0), *numbers,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
