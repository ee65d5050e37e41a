"""Entropy, largest logit and ρ of attention from its queries and keys; no T × T is ever formed.

Two implementations: blocks of logits in PyTorch, which run anywhere and are the reference, and a Triton kernel
(`_kernels`) on NVIDIA's GPUs. Both keep three numbers for each query while they pass over the keys: the maximum m so
far, ℓ = Σ e^(s − m) and w = Σ e^(s − m) (s − m). The logsumexp is m + ln ℓ, the entropy ln ℓ − w / ℓ. See `_blocks`.

Legend: B batch, H query heads, G key heads (H a multiple of G), R = H / G, K head width, Tq queries, Tk keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.measure import _kernels
from locater.measure._blocks import Sums, counted_from, cut_from, shares, slices, within

__all__ = ["AttentionStatistics", "Bias", "attention_statistics", "signal_propagation"]

Bias: TypeAlias = Tensor | Callable[[slice, slice], Tensor]

_BLOCK = 2048  # queries and keys of a block, at most
_CPU_LOGITS, _LOGITS = 1 << 20, 1 << 24  # in a block: smaller ones are no faster, and slow where cores are shared


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
    # rounding may carry equal logits beyond what they can have
    return AttentionStatistics(entropy.clamp_(0, math.log(k.shape[2])), top, lse, seen.last_propagation())


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

    def _products(self, out: Tensor, q: Tensor, keys: Tensor) -> Tensor:
        """Scaled products (b, h, n, c) of q (b, h, n, K) with keys (b, g, c, K), in the memory of `out`."""
        keys = keys.flatten(0, 1)
        left = q.to(keys.dtype).reshape(len(keys), -1, q.shape[3])  # (b·g, R·n, K): a group's heads share its keys
        shape = (*q.shape[:3], keys.shape[1])
        s = out[: math.prod(shape)].view(*left.shape[:2], shape[3])
        with torch.autocast(q.device.type, enabled=False):
            # half numbers are exact in TF32, should that be allowed, but not after scaling
            return torch.baddbmm(s, left, keys.mT, beta=0, alpha=self.view.scale, out=s).view(shape)

    def _finish_(
        self, s: Tensor, place: Tensor, batch: slice, heads: slice, columns: slice, bias: Tensor | None
    ) -> Tensor:
        """Makes logits of products (b, h, n, c) of queries at `place` (b or 1, n), −∞ where bias or mask hide a key."""
        view = self.view
        if view.softcap is not None:
            s.div_(view.softcap).tanh_().mul_(view.softcap)
        if view.slopes is not None:
            slopes, column = view.slopes[heads].to(s.dtype), torch.arange(columns.start, columns.stop, device=s.device)
            s.addcmul_(slopes[:, None, None], (place[:, None, :, None] - column).abs().to(s.dtype), value=-1)
        if bias is not None:
            s += bias
        if view.key_mask is not None:
            s.masked_fill_(~view.key_mask[batch, None, None, columns], -math.inf)
        return s

    def _hide_(self, s: Tensor, place: Tensor, columns: slice) -> None:
        """−∞ where a key (b, h, n, c) is hidden by its distance from the query at `place` (b or 1, n)."""
        column, place = torch.arange(columns.start, columns.stop, device=s.device), place[:, None, :, None]
        if self.view.left is not None:
            s.masked_fill_(column < place - self.view.left, -math.inf)
        if self.view.right is not None:
            s.masked_fill_(column > place + self.view.right, -math.inf)

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
        block = cut_from(given, cut)
        if block.dtype == torch.bool:
            return torch.zeros_like(block, dtype=self._wide).masked_fill_(~block, -math.inf)
        return block.to(self._wide).masked_fill(block <= torch.finfo(block.dtype).min / 2, -math.inf)

    # ------------------------------------------------------------------ all queries

    def row_statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """Entropy, largest logit and logsumexp (B, H, Tq)."""
        q, result = self.q, self._result
        entropy, top, lse = (torch.empty(q.shape[:3], dtype=result, device=q.device) for _ in range(3))
        batch, groups, queries = self._sizes()
        columns = min(_BLOCK, self.k.shape[2])
        per_group = self.q.shape[1] // self.k.shape[1]
        buffer = torch.empty(batch * groups * per_group * queries * columns, dtype=self._wide, device=q.device)
        for some in slices(0, len(q), batch):
            for group in slices(0, self.k.shape[1], groups):
                where = (some, self._heads(group))
                sums = self._pass(buffer, some, group, queries)
                entropy[where] = (sums.total.log() - sums.weighted / sums.total).masked_fill_(sums.m == -math.inf, 0)
                top[where] = sums.m
                lse[where] = sums.m + sums.total.log()
        return entropy, top, lse

    def _sizes(self) -> tuple[int, int, int]:
        """How many sequences, key heads and queries a block of logits has that fits the budget."""
        (b, h, tq, _), (_, g, tk, _) = self.q.shape, self.k.shape
        per_group, columns = h // g, min(tk, _BLOCK)
        queries = max(1, min(tq, _BLOCK, self._budget // (columns * per_group)))
        groups = max(1, min(g, self._budget // (columns * per_group * queries)))
        return max(1, min(b, self._budget // (columns * per_group * queries * groups))), groups, queries

    def _pass(self, buffer: Tensor, batch: slice, groups: slice, queries: int) -> Sums:
        """Of all queries of some sequences and heads, by blocks that fit the buffer, of so many queries each."""
        tq, tk, left, right = self.q.shape[2], self.k.shape[2], self.view.left, self.view.right
        heads, ahead = self._heads(groups), tk - tq  # the place of the first query
        q = self.q[batch, heads]
        sums = Sums(q.shape[:3], self._wide, q.device)
        for keys in slices(0, tk, _BLOCK):
            k = self.k[batch, groups, keys].to(self._wide)
            low = 0 if right is None else max(0, keys.start - right - ahead)
            high = tq if left is None else min(tq, keys.stop + left - ahead)
            for rows in slices(low, high, queries):  # those that see one of the keys
                columns = self._seen(rows, keys)
                s = self._products(buffer, q[:, :, rows], k[:, :, counted_from(keys, columns)])
                sums.add((slice(None), slice(None), rows), self._of_block(s, batch, heads, rows, columns))
        return sums

    def _of_block(self, s: Tensor, batch: slice, heads: slice, rows: slice, columns: slice) -> Sums:
        """Of one block of products (b, h, n, c), which are overwritten."""
        bias = None if self.bias is None else self._bias(self.bias, batch, heads, rows, columns)
        ahead, masked = self.k.shape[2] - self.q.shape[2], bias is not None or self.view.key_mask is not None
        block = Sums(s.shape[:3], s.dtype, s.device)
        for part in shares(s.shape, s.device):
            b, h, n = (within(outer, inner) for outer, inner in zip((batch, heads, rows), part, strict=True))
            seen = self._seen(n, columns)
            if seen.start >= seen.stop:
                continue
            cut = (*part, counted_from(columns, seen))
            place = torch.arange(n.start + ahead, n.stop + ahead, device=s.device)[None]
            x = self._finish_(s[cut], place, b, h, seen, None if bias is None else cut_from(bias, cut))
            edges = self._edges(n, seen)
            for edge in edges:
                self._hide_(x[..., counted_from(seen, edge)], place, edge)
            block.set(part, x, hidden=masked or bool(edges))
        return block

    def _seen(self, rows: slice, keys: slice) -> slice:
        """From the first of the keys that is near enough to one of the queries to the last."""
        left, right, ahead = self.view.left, self.view.right, self.k.shape[2] - self.q.shape[2]
        start = keys.start if left is None else max(keys.start, rows.start + ahead - left)
        return slice(start, keys.stop if right is None else min(keys.stop, rows.stop + ahead + right))

    def _edges(self, rows: slice, keys: slice) -> list[slice]:
        """Where keys are near enough to some of the queries and not to others."""
        left, right, ahead = self.view.left, self.view.right, self.k.shape[2] - self.q.shape[2]
        found = []
        if left is not None:
            found.append(slice(keys.start, min(keys.stop, rows.stop - 1 + ahead - left)))
        if right is not None:
            found.append(slice(max(keys.start, rows.start + ahead + right + 1), keys.stop))
        return [edge for edge in found if edge.start < edge.stop]

    # ------------------------------------------------------------------ chosen queries

    def last_propagation(self) -> Tensor:
        """ρ (H, Tk) of each sequence's last query.

        Where nothing is hidden from it there is nothing to count: a dozen small launches on a GPU, made while the
        kernel still runs, where the general way takes four times as many and waits for the kernel to end.
        """
        if self.bias is not None or self.view.key_mask is not None or self.view.left is not None:
            return self.signal_propagation(torch.tensor([-1]))[:, 0]
        (b, h, _, _), tk = self.q.shape, self.k.shape[2]
        inside = torch.zeros(h, tk, dtype=self._result, device=self.q.device)
        place, everywhere = torch.full((1, 1), tk - 1, device=self.q.device), (slice(0, h), slice(0, tk))
        for batch in slices(0, b, max(1, self._budget // (h * tk))):
            s = self._finish_(self._last_products(batch), place, batch, *everywhere, None)
            beyond = s - s.mean(-1, keepdim=True)  # Tk z − 1
            inside += ((beyond >= -1) & (beyond <= tk - 1)).sum(0)[:, 0]
        return inside / b

    def _last_products(self, batch: slice) -> Tensor:
        """Scaled products (b, H, 1, Tk) of the last query with all keys."""
        q, k = self.q[batch, :, -1:], self.k[batch]
        (b, h, _, width), (_, g, tk, _) = q.shape, k.shape
        if q.is_cuda and q.dtype == k.dtype and self._wide == torch.float32:
            left = q.reshape(b * g, h // g, width)  # half numbers, whose products float32 holds exactly
            s = torch.bmm(left, k.flatten(0, 1).mT, out_dtype=torch.float32)
            return s.mul_(self.view.scale).view(b, h, 1, tk)
        s = q.new_empty(b, h, 1, tk, dtype=self._wide)
        step = min(tk, max(1, self._budget // (b * g * width)))
        buffer = s.new_empty(b * h * step)
        for columns in slices(0, tk, step):
            s[..., columns] = self._products(buffer, q, k[:, :, columns].to(self._wide))
        return s

    def signal_propagation(self, queries: Tensor) -> Tensor:
        """ρ (H, n, Tk)."""
        (b, h, _, _), tk, n = self.q.shape, self.k.shape[2], len(queries)
        index, counts = self._chosen(queries.to(self.q.device, non_blocking=True))
        inside = torch.zeros(h, n, tk, dtype=self._result, device=self.q.device)
        seeing = torch.zeros_like(inside)
        fit = max(1, self._budget // (h * tk))
        for rows in slices(0, n, fit):
            for batch in slices(0, b, max(1, fit // n)):
                s = self._chosen_logits(index[batch, rows], batch)
                seen = (s != -math.inf) & counts[batch, None, rows, None]
                tokens = seen.sum(-1, keepdim=True)
                beyond = s - s.masked_fill(~seen, 0).sum(-1, keepdim=True) / tokens  # T z − 1
                inside[:, rows] += ((beyond >= -1) & (beyond <= tokens - 1) & seen).sum(0)
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
        for columns in slices(0, tk, step):
            bias = None
            if self.bias is not None:
                bias = s.new_zeros(())
                for row in index.unique().tolist():
                    block = self._bias(self.bias, batch, slice(0, h), slice(row, row + 1), columns)
                    bias = torch.where((index == row)[:, None, :, None], block, bias)
            products = self._products(buffer, q, self.k[batch, :, columns].to(self._wide))
            place = index + (tk - tq)
            s[..., columns] = self._finish_(products, place, batch, slice(0, h), columns, bias)
            self._hide_(s[..., columns], place, columns)
        return s


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
