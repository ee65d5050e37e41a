"""Blocks of logits, and what is kept of them: m = max s, ℓ = Σ e^(s − m) and w = Σ e^(s − m) (s − m) of each query.

On a CPU, logits are taken in shares so small that PyTorch works on each with one thread, in the cache. Two threads that
wait for each other after each of some hundred operations gain nothing, and lose ten times that where cores are shared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Part: TypeAlias = tuple[slice, slice, slice]  # of the batch, heads and queries of a block

SHARE = (1 << 15) - 1  # numbers: one more, and PyTorch shares them out
_NOTHING = -1e3  # e^this is 0, in float64 too; and unlike −∞ it may be multiplied by 0


class Sums:
    """m, ℓ and w of queries (b, h, n) over the keys so far; a head's sink (h,), if there is one, is the first."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, sinks: Tensor | None = None
    ) -> None:
        self.m = torch.full(tuple(shape), -math.inf, dtype=dtype, device=device)
        if sinks is not None:
            self.m.copy_(sinks[:, None])
        self.total, self.weighted = (self.m != -math.inf).to(dtype), torch.zeros_like(self.m)

    def set(self, part: Part, s: Tensor, *, masked: bool) -> None:
        """Those of a part from its logits (b, h, n, c), which are overwritten; if `masked`, some of them may be −∞."""
        m = torch.amax(s, -1, out=self.m[part])
        s -= (m.masked_fill(m == -math.inf, 0) if masked else m)[..., None]
        p = _exp(s)
        torch.sum(p, -1, out=self.total[part])
        p *= s.clamp_(min=_NOTHING) if masked else s
        torch.sum(p, -1, out=self.weighted[part])

    def add(self, part: Part, other: Sums) -> None:
        """Those of a part's queries over further keys."""
        own = (self.m[part], self.total[part], self.weighted[part])
        m = torch.maximum(own[0], other.m)
        shift = m.masked_fill(m == -math.inf, 0)  # all keys so far were masked
        total, weighted = torch.zeros_like(m), torch.zeros_like(m)
        for one_m, one_total, one_weighted in (own, (other.m, other.total, other.weighted)):
            growth = (one_m - shift).clamp_(min=_NOTHING)
            shrink = _exp(growth)
            total += one_total * shrink
            weighted += (one_weighted + growth * one_total) * shrink
        for old, new in zip(own, (m, total, weighted), strict=True):
            old.copy_(new)


def _exp(x: Tensor) -> Tensor:
    """e^x. On a CPU, PyTorch's own shares out a few hundred numbers already; its 2^x does not."""
    return (x * math.log2(math.e)).exp2_() if x.device.type == "cpu" else x.exp()


def shares(shape: Sequence[int], device: torch.device) -> Iterator[Part]:
    """A block of logits (b, h, n, c) in parts that are worked on at a time."""
    b, h, n, c = shape
    most = SHARE if device.type == "cpu" else b * h * n * c
    queries = max(1, min(n, most // c))
    heads = max(1, min(h, most // (c * queries)))
    batch = max(1, min(b, most // (c * queries * heads)))
    return itertools.product(slices(0, b, batch), slices(0, h, heads), slices(0, n, queries))


def slices(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))


def within(outer: slice, inner: slice) -> slice:
    """`inner`, which is counted from where `outer` begins, as counted from 0."""
    return slice(outer.start + inner.start, outer.start + inner.stop)


def counted_from(outer: slice, inner: slice) -> slice:
    """`inner`, which is counted from 0, as counted from where `outer` begins."""
    return slice(inner.start - outer.start, inner.stop - outer.start)
