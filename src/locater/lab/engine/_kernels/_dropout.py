# ruff: noqa: N803  # capitals are Triton's way to mark constants, and the legend's
"""Dropout, and the sum with a residual, in one pass over the numbers.

Legend: E stacked models.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from locater._triton import ceil, jit, on, tl
from locater.errors import LocaterError

_FLOAT = (torch.float32, torch.bfloat16, torch.float16)


@jit
@no_type_check
def kept(k, key, threshold):
    """Whether element k stays: the bits that `_random.dropout_bits` defines are at least the threshold."""
    whole = key.to(tl.int64)
    bits = (k.to(tl.uint32) * 0x9E3779B9) ^ whole.to(tl.uint32)
    bits = ((bits ^ (bits >> 16)) * 0xED5AD4BB) ^ (whole >> 32).to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return (bits ^ (bits >> 16)).to(tl.int32, bitcast=True) >= threshold


def threshold_of(rate: float) -> int:
    """Of signed 32-bit integers, a share of `rate` lies below it."""
    return min(round(rate * 2**32) - 2**31, 2**31 - 1)


@jit
@no_type_check
def _dropout_kernel(x, residual, key, y, M, threshold, scale, BLOCK: tl.constexpr):
    """y = residual + x · scale where x stays."""
    e = tl.program_id(1)
    k, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), e.to(tl.int64) * M
    value = tl.load(x + row + k, mask=k < M, other=0.0).to(tl.float32) * scale
    value = tl.where(kept(k, tl.load(key + e), threshold), value, 0.0)
    if residual is not None:
        value += tl.load(residual + row + k, mask=k < M, other=0.0).to(tl.float32)
    tl.store(y + row + k, value.to(y.dtype.element_ty), mask=k < M)


def dropout(x: Tensor, key: Tensor, rate: float) -> Tensor:
    """`_random.dropout` in one pass, without its gradient: x (E, …) contiguous, key (E,)."""
    return _dropout(x, None, key, rate)


def dropout_add(x: Tensor, residual: Tensor, key: Tensor, rate: float) -> Tensor:
    """residual + dropout(x), in the residual's precision."""
    return _dropout(x, residual, key, rate)


def _dropout(x: Tensor, residual: Tensor | None, key: Tensor, rate: float) -> Tensor:
    if key.shape != x.shape[:1] or key.dtype not in (torch.int64, torch.int32) or not key.is_contiguous():
        raise LocaterError(f"key must be ({x.shape[0]},) in int64, got {tuple(key.shape)} in {key.dtype}")
    for tensor in (x, x if residual is None else residual):
        if tensor.shape != x.shape or not tensor.is_contiguous() or tensor.dtype not in _FLOAT:
            raise LocaterError(f"x and residual must be contiguous, in 32 bits or 16, and of one shape: {x.shape}")
    y = torch.empty_like(x if residual is None else residual)
    count, block = x[0].numel(), 2048
    with on(x):
        _dropout_kernel[(ceil(count, block), x.shape[0])](
            x, residual, key, y, count, threshold_of(rate), 1 / (1 - rate), BLOCK=block, num_warps=4
        )
    return y
