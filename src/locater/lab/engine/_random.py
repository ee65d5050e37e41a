"""Dropout whose masks are computed, not drawn: element k of a site, at a step, of a member, is a hash of the four.

So a member's masks do not depend on which members it is trained with, nor on the device, and a backward pass makes its
mask again instead of keeping it.

Legend: E stacked models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.lab.engine import _kernels


def _signed(value: int, bits: int = 64) -> int:
    """The integer of so many bits that has the same ones, as two's complement writes it."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_SEED, _STEP, _SITE, _START = (
    _signed(odd) for odd in (0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xAF251AF3B0F025B5, 0x632BE59BD9B4E019)
)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)  # splitmix64's
_STRIDE, _ROUND = _signed(0x9E3779B9, 32), _signed(0xED5AD4BB, 32)
_LEFT, _RIGHT = _signed(0x7FEB352D, 32), _signed(0x846CA68B, 32)  # lowbias32's


def site_key(seeds: Tensor, step: Tensor | int, site: Tensor | int) -> Tensor:
    """64 bits for each member, on its device: seeds (E,) in int64. A site (S, 1) gives the keys of S sites at once."""
    if seeds.dtype != torch.int64:
        raise LocaterError(f"seeds must be int64, got {seeds.dtype}")
    x = seeds * _SEED + _START
    for value, odd in ((step, _STEP), (site, _SITE)):
        x = x + (value * odd if isinstance(value, Tensor) else _signed(value * odd))
    # splitmix64's finaliser; `>>` copies the sign, which the mask takes away again
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _FIRST
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _SECOND
    return x ^ (x >> 31 & (1 << 33) - 1)


def dropout_bits(key: Tensor, count: int) -> Tensor:
    """32 random bits for each of `count` elements: (E, count) in int32. This is what the Triton kernel computes too.

    Half of the key, a round of mixing, the other half, and the finaliser lowbias32: with one half alone, the streams of
    two keys would be the same but for an exclusive or of the index.
    """
    key = key.to(torch.int64)[:, None]
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    x = torch.arange(count, dtype=torch.int32, device=key.device).mul_(_STRIDE) ^ low
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_ROUND).bitwise_xor_(high)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_LEFT)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_RIGHT)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def keep_mask(key: Tensor, count: int, rate: float) -> Tensor:
    """Which of `count` elements stay: (E, count), True with probability 1 − rate."""
    return dropout_bits(key, count) >= _kernels.threshold_of(_checked(rate))


def dropout(x: Tensor, key: Tensor, rate: float) -> Tensor:
    """x/(1 − rate) where `keep_mask` says so, else 0. x (E, …), key (E,); elements of a member count row by row."""
    return x if _checked(rate) == 0 else _apply(x, None, key, rate)


def dropout_add(x: Tensor, residual: Tensor, key: Tensor, rate: float) -> Tensor:
    """residual + dropout(x), in one pass on a GPU."""
    return residual + x if _checked(rate) == 0 else _apply(x, residual, key, rate)


def _checked(rate: float) -> float:
    if not 0 <= rate < 1:
        raise LocaterError(f"rate must lie in [0, 1), got {rate!r}")
    return rate


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, key: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(key, None)
        ctx.rate, ctx.dtype = rate, x.dtype
        others = (x,) if residual is None else (x, residual)
        if all(_kernels.available(tensor) and tensor.dtype != torch.float64 for tensor in others):
            if residual is None:
                return _kernels.dropout(x.contiguous(), key, rate)
            return _kernels.dropout_add(x.contiguous(), residual.contiguous(), key, rate)
        kept = keep_mask(key, x[0].numel(), rate).view(x.shape)
        ctx.save_for_backward(key, kept)  # a byte an element is cheaper here than making it again
        if residual is None:
            return (x * (1 / (1 - rate))).mul_(kept)
        wide = torch.promote_types(residual.dtype, torch.float32)
        return (x.to(wide) * (1 / (1 - rate))).mul_(kept).add_(residual).to(residual.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        key, kept = ctx.saved_tensors
        wanted, added, *_ = ctx.needs_input_grad
        own = None
        if wanted:
            own = dropout(gradient, key, ctx.rate) if kept is None else (gradient * (1 / (1 - ctx.rate))).mul_(kept)
            own = own.to(ctx.dtype)
        return own, gradient if added else None, None, None


_apply: Callable[[Tensor, Tensor | None, Tensor, float], Tensor] = _Dropout.apply
