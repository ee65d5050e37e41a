# ruff: noqa: N803  # capitals are Triton's way to mark constants, and the legend's
"""The end of a residual branch in one pass: add its bias, drop, add the residual, normalise.

    sum = residual + dropout(branch + bias)        normed = LayerNorm(sum) · weight + shift

In Triton on a GPU: a launch forward and one backward, which also leaves the gradients of bias, weight and shift as sums
over blocks of rows, to be added up in a fixed order. Elsewhere PyTorch's own operations.

Legend: E stacked models, N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.nn import functional

from locater.lab.engine import _kernels
from locater.lab.engine._kernels import jit, kept, tl
from locater.lab.engine._random import dropout_add

EPS = 1e-5
_LARGEST_WIDTH = 1024


def norm(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    """LayerNorm of x (E, N, D) with each model's own weight and shift (E, D)."""
    return torch.addcmul(shift[:, None], functional.layer_norm(x, x.shape[-1:], eps=EPS), weight[:, None])


def add(branch: Tensor, bias: Tensor, residual: Tensor, key: Tensor | None, rate: float) -> Tensor:
    """residual + dropout(branch + bias); no dropout without a key."""
    branch = branch + bias[:, None]
    return residual + branch if key is None else dropout_add(branch, residual, key, rate)


def add_norm(
    branch: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, key: Tensor | None, rate: float
) -> tuple[Tensor, Tensor]:
    """`add`, and `norm` of it: branch and residual (E, N, D), bias, weight and shift (E, D), key (E,)."""
    if _kernels.available(branch) and branch.shape[-1] <= _LARGEST_WIDTH and branch.dtype == residual.dtype:
        return _apply(branch, bias, residual, weight, shift, key, rate)
    total = add(branch, bias, residual, key, rate)
    return total, norm(total, weight, shift)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        branch: Tensor,
        bias: Tensor,
        residual: Tensor,
        weight: Tensor,
        shift: Tensor,
        key: Tensor | None,
        rate: float,
    ) -> tuple[Tensor, Tensor]:
        e, n, d = branch.shape
        branch, residual = branch.contiguous(), residual.contiguous()
        total, normed = torch.empty_like(residual), torch.empty_like(residual)
        mean, deviation = (torch.empty(e, n, device=branch.device) for _ in range(2))
        rows = _rows(d)
        with _kernels.on(branch):
            _forward[(-(-n // rows), e)](
                branch, bias, residual, weight, shift, key, total, normed, mean, deviation, n,
                bias.stride(0), weight.stride(0), shift.stride(0), _kernels.threshold_of(rate), 1 / (1 - rate), EPS,
                D=d, BLOCK_D=_power(d), ROWS=rows, num_warps=4,
            )  # fmt: skip
        ctx.save_for_backward(total, mean, deviation, weight, key)
        ctx.rate = rate
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, of_total: Tensor | None, of_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        total, mean, deviation, weight, key = ctx.saved_tensors
        e, n, d = total.shape
        assert of_normed is not None  # the normed branch is what everything after it uses
        of_branch, of_residual = torch.empty_like(total), torch.empty_like(total)
        rows = _rows(d)
        parts = torch.empty(3, e, -(-n // rows), d, device=total.device)
        with _kernels.on(total):
            _backward[(-(-n // rows), e)](
                total, mean, deviation, weight, key, of_normed.contiguous(),
                None if of_total is None else of_total.contiguous(), of_branch, of_residual, parts, n,
                weight.stride(0), parts.stride(0), _kernels.threshold_of(ctx.rate), 1 / (1 - ctx.rate),
                D=d, BLOCK_D=_power(d), ROWS=rows, num_warps=4,
            )  # fmt: skip
        of_bias, of_weight, of_shift = parts.sum(2).to(weight.dtype)
        return of_branch, of_bias, of_residual, of_weight, of_shift, None, None


_apply: Callable[..., tuple[Tensor, Tensor]] = _AddNorm.apply


def _power(d: int) -> int:
    return 1 << (d - 1).bit_length()


def _rows(d: int) -> int:
    """That a program takes: some thousand numbers."""
    return max(1, 4096 // _power(d))


@jit
@no_type_check
def _forward(
    branch, bias, residual, weight, shift, key, total, normed, mean, deviation, N, bias_e, weight_e, shift_e,
    threshold, scale, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1)
    member = e.to(tl.int64)
    rows, ds = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    wide = ds < D
    there = (rows < N)[:, None] & wide[None, :]
    k = rows[:, None] * D + ds[None, :]
    at = member * N * D + k
    x = tl.load(branch + at, mask=there, other=0.0).to(tl.float32)
    x += tl.load(bias + member * bias_e + ds, mask=wide, other=0.0).to(tl.float32)[None, :]
    if key is not None:
        x = tl.where(kept(k, tl.load(key + e), threshold), x * scale, 0.0)
    x += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    low = x.to(total.dtype.element_ty)
    tl.store(total + at, low, mask=there)
    x = tl.where(there, low.to(tl.float32), 0.0)  # what is normalised is what is kept
    average = tl.sum(x, 1) / D
    apart = tl.where(there, x - average[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(apart * apart, 1) / D + eps)
    w = tl.load(weight + member * weight_e + ds, mask=wide, other=0.0).to(tl.float32)
    b = tl.load(shift + member * shift_e + ds, mask=wide, other=0.0).to(tl.float32)
    y = apart * inverse[:, None] * w[None, :] + b[None, :]
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=there)
    tl.store(mean + member * N + rows, average, mask=rows < N)
    tl.store(deviation + member * N + rows, inverse, mask=rows < N)


@jit
@no_type_check
def _backward(
    total, mean, deviation, weight, key, of_normed, of_total, of_branch, of_residual, parts, N, weight_e, part,
    threshold, scale, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    e, block = tl.program_id(1), tl.program_id(0)
    member = e.to(tl.int64)
    rows, ds = block * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    wide = ds < D
    there = (rows < N)[:, None] & wide[None, :]
    k = rows[:, None] * D + ds[None, :]
    at = member * N * D + k
    average = tl.load(mean + member * N + rows, mask=rows < N, other=0.0)
    inverse = tl.load(deviation + member * N + rows, mask=rows < N, other=0.0)
    x = (tl.load(total + at, mask=there, other=0.0).to(tl.float32) - average[:, None]) * inverse[:, None]
    x = tl.where(there, x, 0.0)
    g = tl.load(of_normed + at, mask=there, other=0.0).to(tl.float32)
    w = tl.load(weight + member * weight_e + ds, mask=wide, other=0.0).to(tl.float32)
    gw = g * w[None, :]
    of_x = (gw - (tl.sum(gw, 1) / D)[:, None] - x * (tl.sum(gw * x, 1) / D)[:, None]) * inverse[:, None]
    if of_total is not None:
        of_x += tl.load(of_total + at, mask=there, other=0.0).to(tl.float32)
    of_x = tl.where(there, of_x, 0.0)
    tl.store(of_residual + at, of_x.to(of_residual.dtype.element_ty), mask=there)
    if key is not None:
        of_x = tl.where(kept(k, tl.load(key + e), threshold), of_x * scale, 0.0)
    tl.store(of_branch + at, of_x.to(of_branch.dtype.element_ty), mask=there)
    to = parts + (member * tl.num_programs(0) + block) * D + ds  # [bias, weight, shift], E, blocks, D
    tl.store(to, tl.sum(of_x, 0), mask=wide)
    tl.store(to + part, tl.sum(g * x, 0), mask=wide)
    tl.store(to + 2 * part, tl.sum(g, 0), mask=wide)
