"""Which keys are masked for a query, for every room that asks.

A key is masked by its distance from the query (`causal`, `window`), by `key_mask`, or by `bias`. Distances are between
aligned positions: the last query stands at the last key.

Legend: B batch, H query heads, Tq queries, Tk keys; b, h, n, c of them in a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from locater.errors import LocaterError

Bias: TypeAlias = Tensor | Callable[[slice, slice], Tensor]

_ALL = slice(None)


def visible(mask: Tensor) -> Tensor:
    """Where a mask leaves keys unmasked. False masks in a boolean one, −∞ or the lowest number in an added one.

    NaN does not mask: it has to show in what is computed.
    """
    return mask if mask.dtype == torch.bool else ~(mask <= torch.finfo(mask.dtype).min / 2)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as a number to add to each logit, −∞ where it masks."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask.to(dtype).masked_fill(~visible(mask), -torch.inf)


def cut_from(x: Tensor, cut: Sequence[slice]) -> Tensor:
    """A block of x, of which a dimension of 1 repeats itself."""
    return x[tuple(_ALL if size == 1 else one for size, one in zip(x.shape, cut, strict=True))]


@dataclass(frozen=True)
class Visibility:
    """Which of the keys are masked for each of the queries."""

    shape: tuple[int, int, int, int]  # B, H, Tq, Tk
    device: torch.device
    causal: bool = False  # masks the keys after a query's own position
    window: int | None = None  # masks the keys so many positions away, and more
    key_mask: Tensor | None = None  # (B, Tk): False masks the key for every query
    bias: Bias | None = None  # expands to (B, H, Tq, Tk), or gives the block of two slices; added to logits, or boolean

    @cached_property
    def left(self) -> int:
        """How many keys before its own position a query may attend to; without a window, more than any distance."""
        return sum(self.shape[2:]) if self.window is None else self.window - 1

    @cached_property
    def right(self) -> int:
        """How many keys after its own position."""
        return 0 if self.causal else self.left

    @cached_property
    def offset(self) -> int:
        """The position of the first query."""
        return self.shape[3] - self.shape[2]

    def positions(self, rows: slice) -> Tensor:
        return torch.arange(rows.start + self.offset, rows.stop + self.offset, device=self.device)

    # ------------------------------------------------------------------ by distance alone

    def columns(self, rows: slice, among: slice) -> slice:
        """From the first to the last of the keys `among` that are near enough to one of the queries."""
        start, stop = rows.start + self.offset - self.left, rows.stop + self.offset + self.right
        return slice(max(among.start, start), min(among.stop, stop))

    def rows(self, columns: slice) -> slice:
        """From the first to the last of the queries that are near enough to one of the keys."""
        start, stop = columns.start - self.right - self.offset, columns.stop + self.left - self.offset
        return slice(max(0, start), min(self.shape[2], stop))

    def edges(self, rows: slice, columns: slice) -> list[slice]:
        """The keys that are near enough to some of the queries and not to others."""
        before = slice(columns.start, min(columns.stop, rows.stop - 1 + self.offset - self.left))
        after = slice(max(columns.start, rows.start + self.offset + self.right + 1), columns.stop)
        return [edge for edge in (before, after) if edge.start < edge.stop]

    def distant(self, positions: Tensor, columns: slice) -> Tensor:
        """Where keys are too far from queries at `positions` (b or 1, n): (b or 1, 1, n, c)."""
        column, position = torch.arange(columns.start, columns.stop, device=self.device), positions[:, None, :, None]
        masked = column > position + self.right
        return masked if self.window is None else masked | (column < position - self.left)

    # ------------------------------------------------------------------ by all that masks

    def masked(self, rows: slice, columns: slice) -> Tensor:
        """Where distance or `key_mask` masks the keys of a block: expands to (B, H, n, c)."""
        masked = self.distant(self.positions(rows)[None], columns)
        return masked if self.key_mask is None else masked | ~self.key_mask[:, None, None, columns]

    def bias_block(
        self, rows: slice, columns: slice, dtype: torch.dtype, batch: slice = _ALL, heads: slice = _ALL
    ) -> Tensor:
        """What the bias adds to the logits of a block (b, h, n, c), of size 1 where it repeats itself."""
        return additive(cut_from(self._given(rows, columns), (batch, heads, _ALL, _ALL)), dtype)

    def apply_(self, s: Tensor, rows: slice, columns: slice) -> Tensor:
        """Adds the bias to logits (B, H, n, c), and puts −∞ where a key is masked."""
        if self.bias is not None:
            s += self.bias_block(rows, columns, s.dtype)
        return s.masked_fill_(self.masked(rows, columns), -torch.inf)

    def unmasked_keys(self) -> Tensor:
        """How many keys each query may attend to: expands to (B, H, Tq)."""
        _, _, tq, tk = self.shape
        rows, columns = slice(0, tq), slice(0, tk)
        if self.bias is not None:
            return (visible(self._given(rows, columns)) & ~self.masked(rows, columns)).sum(-1)
        position = self.positions(rows)
        keys = position.new_ones(1, tk) if self.key_mask is None else self.key_mask
        before = functional.pad(keys.cumsum(1), (1, 0))  # (B or 1, Tk + 1): unmasked keys before each
        first, end = (position - self.left).clamp(min=0), (position + self.right + 1).clamp(max=tk)
        return (before[:, end] - before[:, first])[:, None]

    def _given(self, rows: slice, columns: slice) -> Tensor:
        """The bias of some queries and keys, in four dimensions."""
        if isinstance(self.bias, Tensor):
            return cut_from(self._checked(self.bias, self.shape), (_ALL, _ALL, rows, columns))
        assert self.bias is not None
        size = (rows.stop - rows.start, columns.stop - columns.start)
        return self._checked(self.bias(rows, columns), (*self.shape[:2], *size))

    def _checked(self, bias: Tensor, shape: Sequence[int]) -> Tensor:
        try:
            bias.expand(tuple(shape))
        except RuntimeError:
            raise LocaterError(f"bias must expand to {shape}, got {tuple(bias.shape)}") from None
        if bias.device != self.device or not (bias.is_floating_point() or bias.dtype == torch.bool):
            raise LocaterError(
                f"bias must be floating point or boolean, on {self.device}, got {bias.dtype} on {bias.device}"
            )
        return bias[(None,) * (4 - bias.ndim)]
