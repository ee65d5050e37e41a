"""Cross-entropy fused into the products with the vocabulary table, which are most of the work of a small model.

With the target's own logit as the shift, e_v = exp(s_v − s_target) and Z = Σ_v e_v, the loss of a token is log Z and
the gradient of its logits e_v/Z − 1[v = target]: one pass over the logits gives everything, no maximum is looked for,
and what remains is two products of e with matrices whose rows carry the 1/Z. The logits of all tokens are never in
memory at once, except on a GPU with Triton, where a wide model's e (bfloat16) is kept for the second product.

A shifted logit is capped at 75 so that no sum overflows. In training, a token whose loss exceeds 75 nats has a smaller
gradient and loss than it should: only a model that has diverged has such tokens. `losses` gives them right.

Legend: E stacked models, N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from locater.lab.engine import _kernels
from locater.lab.engine._kernels import CAP
from locater.lab.engine.model import add_rows_, embed

__all__ = ["LossGradient", "loss_and_gradient", "losses"]

_CHUNK_BYTES = 48 << 20  # of logits at a time: about what stays in a CPU's caches and allocator
_KEPT_BYTES = 16 << 30  # of e at a time on a GPU
_FEW = 2048  # words: so many, bytes among them, are no work on a GPU
_NARROW = 64  # up to this width, making e again costs less than writing and reading it


class LossGradient(NamedTuple):
    losses: Tensor  # (E, N) nats, float32, or float64 as x
    x: Tensor  # (E, N, D), the gradient of Σ weight · loss, in float32 or as x
    table: Tensor  # (E, V, D), likewise, in float32


def losses(x: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(x tableᵀ)[target] of every token, (E, N)."""
    if _few_words(x, table):
        return torch.cat([_logits(x[e], table[e], targets[e])[1] for e in _some_members(x, table)])
    shift = _target_logits(x, table, targets)
    if _by_kernels(x):
        z = _kernels.exp_logits(x, table, shift, product=False)[0]
    else:
        x, table = _summable(x, table)
        z, capped = torch.empty_like(shift), _may_exceed_cap(x, table, shift)
        for e, rows, buffer in _chunks(x, table):
            z[e, rows] = _exponentials(x[e, rows], table[e], shift[e, rows], buffer, capped).sum(1, dtype=shift.dtype)
    found = z.log()
    for e in torch.nonzero((found > 0.99 * CAP).any(1)).flatten().tolist():  # a model that has diverged
        for rows in torch.arange(x.shape[1], device=x.device).split(1024):
            found[e, rows] = (_wide(x[e, rows]) @ _wide(table[e]).mT).logsumexp(1) - shift[e, rows]
    return found


def loss_and_gradient(
    x: Tensor, table: Tensor, targets: Tensor, weights: Tensor, out: Tensor | None = None
) -> LossGradient:
    """The losses, and the gradients of Σ weights · losses; the table's into `out` (E, V, D) where given."""
    gradient = torch.empty(table.shape, dtype=_wide_dtype(x), device=x.device) if out is None else out
    if _few_words(x, table):
        return _by_softmax(x, table, targets, weights, gradient)
    shift = _target_logits(x, table, targets)
    if _by_kernels(x):
        return _by_kernel(x, table, targets, weights, shift, gradient)
    x, table = _summable(x, table)
    z, dx, capped = torch.empty_like(shift), torch.empty_like(x), _may_exceed_cap(x, table, shift)
    for e, rows, buffer in _chunks(x, table):
        exponentials = _exponentials(x[e, rows], table[e], shift[e, rows], buffer, capped)
        z[e, rows] = total = exponentials.sum(1, dtype=shift.dtype)
        exponentials.scatter_(1, targets[e, rows, None], (1 - total)[:, None].to(x.dtype))
        factor = (weights[e, rows] / total)[:, None]
        dx[e, rows] = ((exponentials @ table[e]) * factor).to(x.dtype)
        scaled = (x[e, rows] * factor).to(x.dtype)
        if gradient.dtype == x.dtype:
            gradient[e].addmm_(exponentials.mT, scaled, beta=float(rows.start > 0))
        else:
            product = exponentials.mT @ scaled
            gradient[e] = product if rows.start == 0 else gradient[e] + product
    return LossGradient(z.log(), dx, gradient)


def _by_softmax(x: Tensor, table: Tensor, targets: Tensor, weights: Tensor, gradient: Tensor) -> LossGradient:
    """Members at once, their logits in memory: with few words there is nothing to gain by more."""
    found, dx = torch.empty_like(weights), torch.empty_like(x)
    for e in _some_members(x, table):
        s, found[e] = _logits(x[e], table[e], targets[e])
        p = s.softmax(-1)
        p.scatter_add_(2, targets[e, :, None], p.new_full((), -1).expand(*targets[e].shape, 1))
        p = (p * weights[e, :, None]).to(x.dtype)
        dx[e] = torch.bmm(p, table[e])
        gradient[e] = _wide_product(p.mT, x[e])
    return LossGradient(found, dx, gradient)


def _logits(x: Tensor, table: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (E, N, V) in float32, and the losses."""
    s = _wide_product(x, table.mT)
    return s, s.logsumexp(-1) - s.gather(2, targets[..., None])[..., 0]


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """In float32, of half factors too."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return torch.bmm(_wide(a), _wide(b))
    return torch.bmm(a, b, out_dtype=torch.float32)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))


def _few_words(x: Tensor, table: Tensor) -> bool:
    return x.is_cuda and table.shape[1] <= _FEW


def _some_members(x: Tensor, table: Tensor) -> Iterator[slice]:
    """As many at a time as have room for their logits."""
    size = max(1, _KEPT_BYTES // (16 * x.shape[1] * table.shape[1]))
    return (slice(start, start + size) for start in range(0, len(x), size))


def _by_kernel(
    x: Tensor, table: Tensor, targets: Tensor, weights: Tensor, shift: Tensor, gradient: Tensor
) -> LossGradient:
    if x.shape[-1] <= _NARROW:
        z, product = _kernels.exp_logits(x, table, shift)
        # a token's share of a word's gradient, weight · e/z, is an exponential too
        _kernels.weight_gradient(x, table, shift + z.log() - weights.log(), out=gradient)
        add_rows_(gradient, targets, -weights[..., None] * x)
        rows = embed(table, targets)
        return LossGradient(z.log(), weights[..., None] * (product / z[..., None] - rows), gradient)
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


def _summable(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """float16 cannot hold the exponential of a loss beyond 11 nats, which an untrained model has."""
    return (x.float(), table.float()) if x.dtype == torch.float16 else (x, table)


def _by_kernels(x: Tensor) -> bool:
    return x.dtype.itemsize == 2 and x.shape[-1] <= 128 and _kernels.available(x)


def _target_logits(x: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    logits: Tensor = torch.linalg.vecdot(_wide(x), _wide(embed(table, targets)))
    return logits


def _chunks(x: Tensor, table: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """Member, rows and a buffer for their logits: few enough rows that it stays small."""
    (e, n, _), v = x.shape, table.shape[1]
    size = max(1, min(n, _CHUNK_BYTES // (v * x.element_size())))
    buffer = torch.empty(size, v, dtype=x.dtype, device=x.device)
    for member in range(e):
        for start in range(0, n, size):
            rows = slice(start, min(start + size, n))
            yield member, rows, buffer[: rows.stop - start]


def _may_exceed_cap(x: Tensor, table: Tensor, shift: Tensor) -> bool:
    """Whether ‖x‖ · max ‖w‖, which no logit exceeds, leaves any doubt: a pass over all logits that is seldom needed."""
    if x.is_cuda:
        return True  # the pass costs less than waiting for the answer
    longest = torch.linalg.vector_norm(table, dim=-1, dtype=shift.dtype).amax(1, keepdim=True)
    bound = torch.linalg.vector_norm(x, dim=-1, dtype=shift.dtype) * longest - shift
    return not bool((bound < CAP).all())  # also where something is not a number


def _exponentials(x: Tensor, table: Tensor, shift: Tensor, buffer: Tensor, capped: bool) -> Tensor:
    shifted = torch.mm(x, table.mT, out=buffer).sub_(shift[:, None].to(x.dtype))
    return (shifted.clamp_(max=CAP) if capped else shifted).exp_()
