"""Entropy, largest logit and ρ of attention from its queries and keys; no T × T is ever formed.

Two implementations: blocks of logits in PyTorch, which run anywhere and are the reference, and a Triton kernel
(`_kernels`) on NVIDIA's GPUs. Both keep three numbers for each query while they pass over the keys: the maximum m so
far, ℓ = Σ e^(s − m) and w = Σ e^(s − m) (s − m). The logsumexp is m + ln ℓ, the entropy ln ℓ − w / ℓ.

Legend: B batch, H query heads, G key heads (H a multiple of G), R = H / G, K head width, Tq queries, Tk keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.measure import _kernels

__all__ = ["AttentionStatistics", "Bias", "attention_statistics", "signal_propagation"]

Bias: TypeAlias = Tensor | Callable[[slice, slice], Tensor]

_BLOCK = 1024  # queries and keys of a block, at most, on a CPU
_CPU_LOGITS, _LOGITS = 1 << 20, 1 << 24  # in a block: smaller ones are no faster, and slow where cores are shared
_NOTHING = -1e3  # e^this is 0, in float64 too; and unlike −∞ it may be multiplied by 0


class AttentionStatistics(NamedTuple):
    entropy: Tensor  # (B, H, Tq), nats, of each query's attention
    max_logit: Tensor  # (B, H, Tq)
    logsumexp: Tensor  # (B, H, Tq)
    rho: Tensor  # (H, Tk): the share of the batch with z in [0, 1], for the last query


@torch.no_grad()
def attention_statistics(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Bias | None = None,
) -> AttentionStatistics:
    """Statistics of the softmax over each query's visible keys, of q (B, H, Tq, K) and k (B, G, Tk, K).

    A logit is s = scale · q·k, with scale 1/√K unless given; softcap · tanh(s / softcap) if a `softcap` is; less
    slope · |distance| with `alibi_slopes` (H,); plus `bias`. Distances are between aligned places: the last query is at
    the last key, so that queries may be the last ones of longer keys (a cache).

    Which keys a query sees: with `causal` none after its own place; with a `window` only those less than `window`
    places away; never those where `key_mask` (B, Tk) is False (padding). `bias` is a tensor that expands to
    (B, H, Tq, Tk), or a function that takes two slices, of queries and of keys, and gives that block, so that T × T
    need not exist. Where it is −∞, or the lowest number of its dtype, or False if it is boolean, the key is hidden.

    A query that sees no key has entropy 0, max_logit and logsumexp −∞. A padded query is measured like any other; drop
    it by `key_mask`.

    rho is `signal_propagation` for one query of each sequence, its last, or the last that `key_mask` does not hide.

    Results are float64 for float64 inputs, else float32. Inputs and their autograd graph are left alone.
    """
    seen = _Attention.of(q, k, causal, scale, key_mask, window, softcap, alibi_slopes, bias)
    if bias is None and _kernels.applies(q, k, seen.view):
        entropy, top, lse = _kernels.row_statistics(q, k, seen.view)
    else:
        entropy, top, lse = seen.row_statistics()
    if bias is not None or (key_mask is not None and window is not None):
        given = {"key_mask": key_mask, "window": window, "bias": bias}
        names = " and ".join(name for name, value in given.items() if value is not None)
        _check_something_seen((top != -math.inf).flatten(1).any(1), names)
    rho = seen.signal_propagation(torch.tensor([-1]))[:, 0]
    # rounding may carry equal logits beyond what they can have
    return AttentionStatistics(entropy.clamp_(0, math.log(k.shape[2])), top, lse, rho)


@torch.no_grad()
def signal_propagation(
    q: Tensor,
    k: Tensor,
    *,
    queries: Sequence[int] = (-1,),
    causal: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Bias | None = None,
) -> Tensor:
    """Measured ρ (H, queries, Tk): the share of the batch where key i has z_i in [0, 1] for the chosen queries.

    z is the piecewise linear softmax of Definition 1: z_i = 1/T + (s_i − mean s)/T over the T keys that the query sees.
    A sequence counts for a key if the query sees it; where none of the batch does, ρ is NaN.

    Queries are rows of q; negative ones count back from each sequence's last visible token: -1 is the last that
    `key_mask` does not hide. A sequence whose query is padding, or before its start, does not count. In cross-attention
    (neither aligned nor of one length) queries have no keys of their own, and none is padding. Other options are those
    of `attention_statistics`.
    """
    seen = _Attention.of(q, k, causal, scale, key_mask, window, softcap, alibi_slopes, bias)
    rows, tq = [int(query) for query in queries], q.shape[2]
    if not rows or not all(-tq <= row < tq for row in rows):
        raise LocaterError(f"queries must be one or more rows from {-tq} to {tq - 1}, got {rows}")
    return seen.signal_propagation(torch.tensor(rows))


@dataclass(frozen=True)
class _Attention:
    """Queries, keys, and all that makes their logits, a block at a time."""

    q: Tensor
    k: Tensor
    view: _kernels.View
    bias: Bias | None
    own_keys: bool  # whether a query is the token at its place, not one of another sequence

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        causal: bool,
        scale: float | None,
        key_mask: Tensor | None,
        window: int | None,
        softcap: float | None,
        slopes: Tensor | None,
        bias: Bias | None,
    ) -> _Attention:
        _check_operands(q, k)
        (b, h, tq, width), tk = q.shape, k.shape[2]
        aligned = causal or window is not None or slopes is not None
        if aligned and tq > tk:
            raise LocaterError(
                f"places aligned to the last key (causal, window, ALiBi) need at least as many keys ({tk}) "
                f"as queries ({tq})"
            )
        scale = 1 / math.sqrt(width) if scale is None else float(scale)
        if not math.isfinite(scale):
            raise LocaterError(f"scale must be finite, got {scale}")
        if window is not None and window < 1:
            raise LocaterError(f"window must be 1 or more, a query's own place being the first, got {window}")
        if softcap is not None and not 0 < softcap < math.inf:
            raise LocaterError(f"softcap must be positive and finite, got {softcap}")
        _check_key_mask(key_mask, (b, tk), q.device)
        if slopes is not None and (slopes.shape != (h,) or slopes.device != q.device):
            raise LocaterError(
                f"alibi_slopes must be ({h},) on {q.device}, one a head, got {tuple(slopes.shape)} on {slopes.device}"
            )
        left = None if window is None or window >= tk else window - 1
        view = _kernels.View(scale, left, 0 if causal else left, key_mask, softcap, slopes)
        return cls(q, k, view, bias, own_keys=aligned or tq == tk)

    @property
    def _wide(self) -> torch.dtype:
        """float64, for float32 knows a logit of 50 to 1e-5 or so; float32 for half inputs and where it must be."""
        half = self.q.element_size() == self.k.element_size() == 2
        device = self.q.device.type
        return torch.float32 if device == "mps" or (half and device != "cpu") else torch.float64

    @property
    def _result(self) -> torch.dtype:
        return torch.float64 if torch.float64 in (self.q.dtype, self.k.dtype) else torch.float32

    @property
    def _budget(self) -> int:
        return _CPU_LOGITS if self.q.device.type == "cpu" else _LOGITS

    # ------------------------------------------------------------------ blocks of logits

    def _logits(
        self,
        out: Tensor,
        q: Tensor,
        place: Tensor,
        batch: slice,
        groups: slice,
        columns: slice,
        bias: Tensor | None,
        whole: bool,
    ) -> Tensor:
        """Logits (b, h, n, c) of q (b, h, n, K) at `place` (b or 1, n), in the memory of `out`.

        −∞ where a key is hidden; if `whole`, none is because of its place.
        """
        keys = self.k[batch, groups, columns].to(self._wide).flatten(0, 1)  # (b·g, c, K)
        left = q.to(self._wide).reshape(len(keys), -1, q.shape[3])  # (b·g, R·n, K): a group's heads share its keys
        shape = (*q.shape[:3], keys.shape[1])
        s = out[: math.prod(shape)].view(*left.shape[:2], shape[3])
        with torch.autocast(q.device.type, enabled=False):
            # half numbers are exact in TF32, should that be allowed, but not after scaling
            s = torch.baddbmm(s, left, keys.mT, beta=0, alpha=self.view.scale, out=s).view(shape)
        if self.view.softcap is not None:
            s.div_(self.view.softcap).tanh_().mul_(self.view.softcap)
        column = torch.arange(columns.start, columns.stop, device=s.device)
        if self.view.slopes is not None:
            slopes = self.view.slopes[self._heads(groups)].to(s.dtype)
            s.addcmul_(slopes[:, None, None], (place[:, None, :, None] - column).abs().to(s.dtype), value=-1)
        if bias is not None:
            s += bias
        if not whole and self.view.left is not None:
            s.masked_fill_(column < place[:, None, :, None] - self.view.left, -math.inf)
        if not whole and self.view.right is not None:
            s.masked_fill_(column > place[:, None, :, None] + self.view.right, -math.inf)
        if self.view.key_mask is not None:
            s.masked_fill_(~self.view.key_mask[batch, None, None, columns], -math.inf)
        return s

    def _heads(self, groups: slice) -> slice:
        per_group = self.q.shape[1] // self.k.shape[1]
        return slice(groups.start * per_group, groups.stop * per_group)

    def _bias(self, given: Bias, batch: slice, heads: slice, rows: slice, columns: slice) -> Tensor:
        """A block of the bias, −∞ where it hides; a dimension of 1 where it repeats itself."""
        (b, h, tq, _), tk = self.q.shape, self.k.shape[2]
        shape, cut = (b, h, tq, tk), (batch, heads, rows, columns)
        if not isinstance(given, Tensor):
            given, shape = given(rows, columns), (b, h, rows.stop - rows.start, columns.stop - columns.start)
            cut = (batch, heads, slice(None), slice(None))
        try:
            given.expand(shape)
        except RuntimeError:
            raise LocaterError(f"bias must expand to {shape}, got {tuple(given.shape)}") from None
        if given.device != self.q.device or not (given.is_floating_point() or given.dtype == torch.bool):
            raise LocaterError(
                f"bias must be floating point or boolean, on {self.q.device}, got {given.dtype} on {given.device}"
            )
        given = given[(None,) * (4 - given.ndim)]
        block = given[tuple(slice(None) if size == 1 else one for size, one in zip(given.shape, cut, strict=True))]
        if block.dtype == torch.bool:
            return torch.zeros_like(block, dtype=self._wide).masked_fill_(~block, -math.inf)
        return block.to(self._wide).masked_fill(block <= torch.finfo(block.dtype).min / 2, -math.inf)

    # ------------------------------------------------------------------ all queries

    def row_statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """Entropy, largest logit and logsumexp (B, H, Tq)."""
        q, result = self.q, self._result
        entropy, top, lse = (torch.empty(q.shape[:3], dtype=result, device=q.device) for _ in range(3))
        pieces = list(self._pieces())
        batch, groups, rows = pieces[0]  # none is larger
        block = q[batch, self._heads(groups), rows, 0].numel() * min(self._columns, self.k.shape[2])
        buffers = torch.empty(2, block, dtype=self._wide, device=q.device)
        for batch, groups, rows in pieces:
            where = (batch, self._heads(groups), rows)
            m, total, weighted = self._pass(buffers, batch, groups, rows)
            blind = m == -math.inf
            entropy[where] = (total.log() - weighted / total).masked_fill_(blind, 0)
            top[where] = m
            lse[where] = m + total.log()
        return entropy, top, lse

    def _pieces(self) -> Iterator[tuple[slice, slice, slice]]:
        """Batch, key heads and queries of a piece, such that a block of its logits fits the budget."""
        (b, h, tq, _), (_, g, tk, _) = self.q.shape, self.k.shape
        per_group, columns = h // g, min(tk, self._columns)
        n = max(1, min(tq, self._columns, self._budget // (columns * per_group)))
        groups = max(1, min(g, self._budget // (columns * per_group * n)))
        batch = max(1, min(b, self._budget // (columns * per_group * n * groups)))
        for one in _slices(0, b, batch):
            for some in _slices(0, g, groups):
                for rows in _slices(0, tq, n):
                    yield one, some, rows

    @property
    def _columns(self) -> int:
        return _BLOCK if self.q.device.type == "cpu" else 2 * _BLOCK

    def _pass(self, buffers: Tensor, batch: slice, groups: slice, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """m, ℓ and w of a piece, over blocks of the keys that one of its queries sees; two blocks fit the buffers."""
        tq, tk, left, right = self.q.shape[2], self.k.shape[2], self.view.left, self.view.right
        first, last = rows.start + tk - tq, rows.stop - 1 + tk - tq
        low = 0 if left is None else max(0, first - left)
        high = tk if right is None else min(tk, last + right + 1)
        heads, place = self._heads(groups), torch.arange(first, last + 1, device=self.q.device)[None]
        q = self.q[batch, heads, rows].to(self._wide)
        m = q.new_full(q.shape[:3], -math.inf)
        total, weighted = torch.zeros_like(m), torch.zeros_like(m)
        for columns in _slices(low, high, self._columns):
            whole = (left is None or columns.start >= last - left) and (
                right is None or columns.stop - 1 <= first + right
            )
            bias = None if self.bias is None else self._bias(self.bias, batch, heads, rows, columns)
            s = self._logits(buffers[0], q, place, batch, groups, columns, bias, whole)
            new = torch.maximum(m, s.amax(-1))
            shift = new.masked_fill(new == -math.inf, 0)  # a query that saw nothing yet
            growth = (m - shift).clamp_(min=_NOTHING)
            shrink = growth.exp()
            s -= shift[..., None]
            p = torch.exp(s, out=buffers[1, : s.numel()].view_as(s))
            total_before, total = total, total * shrink + p.sum(-1)
            p *= s if whole and bias is None and self.view.key_mask is None else s.clamp_(min=_NOTHING)
            weighted = (weighted + growth * total_before) * shrink + p.sum(-1)
            m = new
        return m, total, weighted

    # ------------------------------------------------------------------ chosen queries

    def signal_propagation(self, queries: Tensor) -> Tensor:
        """ρ (H, n, Tk)."""
        (b, h, _, _), tk, n = self.q.shape, self.k.shape[2], len(queries)
        index, counts = self._chosen(queries.to(self.q.device, non_blocking=True))
        inside = torch.zeros(h, n, tk, dtype=self._result, device=self.q.device)
        seeing = torch.zeros_like(inside)
        fit = max(1, self._budget // (h * tk))
        for rows in _slices(0, n, fit):
            for batch in _slices(0, b, max(1, fit // n)):
                s = self._chosen_logits(index[batch, rows], batch)
                seen = (s != -math.inf) & counts[batch, None, rows, None]
                tokens = seen.sum(-1, keepdim=True)
                mean = s.masked_fill(~seen, 0).sum(-1, keepdim=True) / tokens
                z = (1 + s - mean) / tokens
                inside[:, rows] += ((z >= 0) & (z <= 1) & seen).sum(0)
                seeing[:, rows] += seen.sum(0)
        return inside / seeing

    def _chosen(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (B, n) of the queries in each sequence, and whether they count."""
        (b, _, tq, _), tk = self.q.shape, self.k.shape[2]
        mask = self.view.key_mask
        if mask is None or not self.own_keys:
            tokens = torch.ones(b, tq, dtype=torch.bool, device=queries.device)
        else:
            tokens = mask[:, tk - tq :]
        end = tq - tokens.flip(1).int().argmax(1, keepdim=True)  # after each sequence's last visible token
        index = torch.where(queries < 0, queries + end, queries)
        counts = (index >= 0) & tokens.gather(1, index.clamp(min=0))
        return index.clamp_(min=0), counts

    def _chosen_logits(self, index: Tensor, batch: slice) -> Tensor:
        """Logits (b, H, n, Tk) of queries that may be others in each sequence."""
        (_, h, tq, width), (_, g, tk, _) = self.q.shape, self.k.shape
        q = torch.take_along_dim(self.q[batch], index[:, None, :, None], 2)
        s = torch.empty(*q.shape[:3], tk, dtype=self._wide, device=q.device)
        step = min(tk, max(1, self._budget // (len(index) * g * width)))
        buffer = s.new_empty(q[..., 0].numel() * step)
        for columns in _slices(0, tk, step):
            bias = None
            if self.bias is not None:
                bias = s.new_zeros(())
                for row in index.unique().tolist():
                    block = self._bias(self.bias, batch, slice(0, h), slice(row, row + 1), columns)
                    bias = torch.where((index == row)[:, None, :, None], block, bias)
            place = index + (tk - tq)
            s[..., columns] = self._logits(buffer, q, place, batch, slice(0, g), columns, bias, whole=False)
        return s


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))


def _check_operands(q: Tensor, k: Tensor) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4 or not x.is_floating_point() or 0 in x.shape:
            raise LocaterError(
                f"{name} must be (batch, heads, tokens, head width), floating point, got {tuple(x.shape)} in {x.dtype}"
            )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise LocaterError(f"q and k must share batch and head width, got {tuple(q.shape)} and {tuple(k.shape)}")
    if q.shape[1] % k.shape[1]:
        raise LocaterError(f"the {q.shape[1]} query heads are no multiple of the {k.shape[1]} key heads")
    if q.device != k.device:
        raise LocaterError(f"q and k must be on one device, got {q.device} and {k.device}")


def _check_key_mask(key_mask: Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
    if key_mask is None:
        return
    if key_mask.shape != shape or key_mask.dtype != torch.bool or key_mask.device != device:
        raise LocaterError(
            f"key_mask must be {shape} (batch, keys), boolean with True where a key is visible, on {device}, "
            f"got {tuple(key_mask.shape)} in {key_mask.dtype} on {key_mask.device}"
        )
    _check_something_seen(key_mask.any(1), "key_mask")


def _check_something_seen(seen: Tensor, names: str) -> None:
    if not seen.all():
        number = int((~seen).nonzero()[0])
        raise LocaterError(f"nothing to measure in sequence {number} of the batch: all its keys are hidden by {names}")
