"""Cross-entropy fused into the products with the vocabulary table, which are most of the work of a small model.

With the target's own logit as the shift, e_v = exp(s_v − s_target) and Z = Σ_v e_v, the loss of a token is log Z and
the gradient of its logits e_v/Z − 1[v = target]: one pass over the logits gives everything, no maximum is looked for,
and what remains is two products of e with matrices whose rows carry the 1/Z. `_Chunks` does that in PyTorch, a chunk of
tokens at a time, and `_Kernels` in Triton; `_AllLogits` is a plain softmax, for few words on a GPU.

A shifted logit is capped at 75 so that no sum overflows. In training, a token whose loss exceeds 75 nats has a smaller
gradient and loss than it should: only a model that has diverged has such tokens. `losses` gives them right.

Legend: E stacked models, N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from locater.lab.engine import _kernels
from locater.lab.engine._kernels import CAP
from locater.lab.engine.model import add_rows_, embed

__all__ = ["LossGradient", "loss_and_gradient", "losses"]

_CHUNK_BYTES = 48 << 20  # of logits at a time: about what stays in a CPU's caches and allocator
_KEPT_BYTES = 16 << 30  # of e, or of logits and their softmax, at a time on a GPU
_FEW = 2048  # words: so many, bytes among them, are no work on a GPU
_NARROW = 64  # up to this width, making e again costs less than writing and reading it


class LossGradient(NamedTuple):
    losses: Tensor  # (E, N) nats, float32, or float64 as x
    x: Tensor  # (E, N, D), the gradient of Σ weight · loss, in float32 or as x
    table: Tensor  # (E, V, D), likewise, in float32


def losses(x: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(x tableᵀ)[target] of every token, (E, N)."""
    return _algorithm(x, table, targets).losses()


def loss_and_gradient(
    x: Tensor, table: Tensor, targets: Tensor, weights: Tensor, out: Tensor | None = None
) -> LossGradient:
    """The losses, and the gradients of Σ weights · losses; the table's into `out` (E, V, D) where given."""
    gradient = torch.empty(table.shape, dtype=_wide_dtype(x), device=x.device) if out is None else out
    return _algorithm(x, table, targets).loss_and_gradient(weights, gradient)


def _algorithm(x: Tensor, table: Tensor, targets: Tensor) -> _AllLogits | _Kernels | _Chunks:
    if x.is_cuda and table.shape[1] <= _FEW:
        return _AllLogits(x, table, targets)
    if x.dtype.itemsize == 2 and x.shape[-1] <= 128 and _kernels.available(x):
        return _Kernels(x, table, targets)
    if x.dtype == torch.float16:  # which cannot hold the e of a loss beyond 11 nats, as an untrained model has
        x, table = x.float(), table.float()
    return _Chunks(x, table, targets)


@dataclass(frozen=True)
class _Batch:
    x: Tensor  # (E, N, D)
    table: Tensor  # (E, V, D)
    targets: Tensor  # (E, N)


class _AllLogits(_Batch):
    """A softmax over logits that are all in memory, those of as many models at once as there is room for."""

    def losses(self) -> Tensor:
        return torch.cat([self._logits(e)[1] for e in self._parts()])

    def loss_and_gradient(self, weights: Tensor, gradient: Tensor) -> LossGradient:
        found, dx = torch.empty_like(weights), torch.empty_like(self.x)
        for e in self._parts():
            s, found[e] = self._logits(e)
            p = s.softmax(-1)
            p.scatter_add_(2, self.targets[e, :, None], p.new_full((), -1).expand(*self.targets[e].shape, 1))
            p = (p * weights[e, :, None]).to(dx.dtype)
            dx[e] = torch.bmm(p, self.table[e])
            gradient[e] = _wide_product(p.mT, self.x[e])
        return LossGradient(found, dx, gradient)

    def _parts(self) -> Iterator[slice]:
        size = max(1, _KEPT_BYTES // (16 * self.x.shape[1] * self.table.shape[1]))
        return (slice(start, start + size) for start in range(0, len(self.x), size))

    def _logits(self, e: slice) -> tuple[Tensor, Tensor]:
        """Logits (·, N, V) in float32, and the losses."""
        s = _wide_product(self.x[e], self.table[e].mT)
        return s, s.logsumexp(-1) - s.gather(2, self.targets[e, :, None])[..., 0]


class _Exponentials(_Batch, ABC):
    """What `_Kernels` and `_Chunks` share: the shift, and the losses from Z."""

    @cached_property
    def shift(self) -> Tensor:
        """The targets' logits, (E, N)."""
        logits: Tensor = torch.linalg.vecdot(_wide(self.x), _wide(embed(self.table, self.targets)))
        return logits

    def losses(self) -> Tensor:
        found = self._sums().log()
        for e in torch.nonzero((found > 0.99 * CAP).any(1)).flatten().tolist():  # a model that has diverged
            for rows in torch.arange(found.shape[1], device=found.device).split(1024):
                logits = _wide(self.x[e, rows]) @ _wide(self.table[e]).mT
                found[e, rows] = logits.logsumexp(1) - self.shift[e, rows]
        return found

    @abstractmethod
    def _sums(self) -> Tensor:
        """Z, (E, N)."""


class _Kernels(_Exponentials):
    """Triton's e, which never leaves the chip where the width is small and is kept in bfloat16 where it is not."""

    def _sums(self) -> Tensor:
        return _kernels.exp_logits(self.x, self.table, self.shift, product=False)[0]

    def loss_and_gradient(self, weights: Tensor, gradient: Tensor) -> LossGradient:
        return (self._made_twice if self.x.shape[-1] <= _NARROW else self._kept)(weights, gradient)

    def _made_twice(self, weights: Tensor, gradient: Tensor) -> LossGradient:
        x, table, targets, shift = self.x, self.table, self.targets, self.shift
        z, product = _kernels.exp_logits(x, table, shift)
        # a token's share of a word's gradient, weight · e/z, is an exponential too
        _kernels.weight_gradient(x, table, shift + z.log() - weights.log(), out=gradient)
        add_rows_(gradient, targets, -weights[..., None] * x)
        rows = embed(table, targets)
        return LossGradient(z.log(), weights[..., None] * (product / z[..., None] - rows), gradient)

    def _kept(self, weights: Tensor, gradient: Tensor) -> LossGradient:
        x, table, targets, shift = self.x, self.table, self.targets, self.shift
        (e, n, _), v = x.shape, table.shape[1]
        z, dx = torch.empty_like(shift), torch.empty(x.shape, device=x.device)
        size = max(1, _KEPT_BYTES // (2 * n * v))
        kept = torch.empty(min(size, e), n, v, dtype=torch.bfloat16, device=x.device)
        for start in range(0, e, size):
            part = slice(start, min(start + size, e))
            exponentials = kept[: part.stop - start]
            z[part], product = _kernels.exp_logits(x[part], table[part], shift[part], out=exponentials)
            factor = (weights[part] / z[part])[..., None]
            rows = embed(table[part], targets[part])
            dx[part] = torch.addcmul(-weights[part, :, None] * rows, product, factor)
            exponentials.scatter_(2, targets[part, :, None], (1 - z[part])[..., None].to(torch.bfloat16))
            scaled = (x[part] * factor).to(torch.bfloat16)
            torch.bmm(exponentials.mT, scaled, out_dtype=torch.float32, out=gradient[part])
        return LossGradient(z.log(), dx, gradient)


class _Chunks(_Exponentials):
    """PyTorch's own operations, on so few tokens of one model at a time that e stays small."""

    def _sums(self) -> Tensor:
        z = torch.empty_like(self.shift)
        for e, rows, exponentials in self._exponentials():
            z[e, rows] = exponentials.sum(1, dtype=z.dtype)
        return z

    def loss_and_gradient(self, weights: Tensor, gradient: Tensor) -> LossGradient:
        x, table = self.x, self.table
        z, dx = torch.empty_like(self.shift), torch.empty_like(x)
        for e, rows, exponentials in self._exponentials():
            z[e, rows] = total = exponentials.sum(1, dtype=z.dtype)
            exponentials.scatter_(1, self.targets[e, rows, None], (1 - total)[:, None].to(x.dtype))
            factor = (weights[e, rows] / total)[:, None]
            dx[e, rows] = ((exponentials @ table[e]) * factor).to(x.dtype)
            scaled = (x[e, rows] * factor).to(x.dtype)
            if gradient.dtype == x.dtype:
                gradient[e].addmm_(exponentials.mT, scaled, beta=float(rows.start > 0))
            else:
                product = exponentials.mT @ scaled
                gradient[e] = product if rows.start == 0 else gradient[e] + product
        return LossGradient(z.log(), dx, gradient)

    def _exponentials(self) -> Iterator[tuple[int, slice, Tensor]]:
        """Member, rows, and their e in a buffer that the next chunk takes over."""
        x, (members, n), v, capped = self.x, self.shift.shape, self.table.shape[1], self._may_exceed_cap()
        size = max(1, min(n, _CHUNK_BYTES // (v * x.element_size())))
        buffer = torch.empty(size, v, dtype=x.dtype, device=x.device)
        for e in range(members):
            for start in range(0, n, size):
                rows = slice(start, min(start + size, n))
                shifted = torch.mm(x[e, rows], self.table[e].mT, out=buffer[: rows.stop - start])
                shifted.sub_(self.shift[e, rows, None].to(x.dtype))
                yield e, rows, (shifted.clamp_(max=CAP) if capped else shifted).exp_()

    def _may_exceed_cap(self) -> bool:
        """Whether ‖x‖ · max ‖w‖, which no logit exceeds, leaves any doubt: capping is a pass that is seldom needed."""
        if self.x.is_cuda:
            return True  # the pass costs less than waiting for the answer
        x, words = (torch.linalg.vector_norm(a, dim=-1, dtype=self.shift.dtype) for a in (self.x, self.table))
        bound = x * words.amax(1, keepdim=True) - self.shift
        return not bool((bound < CAP).all())  # also where something is not a number


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """In float32, of half factors too."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return torch.bmm(_wide(a), _wide(b))
    return torch.bmm(a, b, out_dtype=torch.float32)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))
