"""What positions add to the logits of a head, beside rotary embeddings: biases, gains and keys of offsets.

Legend: B batch, T tokens, G key heads (groups), R query heads per group, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.models.parts import Projection

__all__ = [
    "Alibi", "GridKeys", "PositionBias", "PositionKeys", "QueryGain", "RelativeBias", "RelativeKeys", "SineKeys",
    "TableBias", "TableKeys",
]  # fmt: skip


@dataclass(frozen=True)
class Alibi:
    """slope · key position, added to the logits."""

    slopes: Tensor  # (heads,)
    rounded: bool = False  # Falcon multiplies in bfloat16

    @classmethod
    def of(cls, heads: int, *, rounded: bool = False) -> Alibi:
        """2^(−8h/n) for a power of two n; the heads beyond one take every other slope of 2n."""
        power = 1 << (heads.bit_length() - 1)
        slopes = 2.0 ** (-8.0 * torch.arange(1, power + 1) / power)
        between = 2.0 ** (-8.0 * torch.arange(1, 2 * (heads - power) + 1, 2) / (2 * power))
        return cls(torch.cat([slopes, between]), rounded)

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        del query  # a shift by the query's position does not change a softmax
        slopes = self.slopes.bfloat16() if self.rounded else self.slopes
        return (slopes[:, None] * key[None].to(slopes.device))[:, None, :].to(torch.float32)


@dataclass(frozen=True)
class RelativeBias:
    """T5's learned bias per bucket of relative position."""

    table: Tensor  # (buckets, heads)
    bidirectional: bool
    max_distance: int

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        relative = key[None, :] - query[:, None]
        buckets, start = len(self.table), torch.zeros_like(relative)
        if self.bidirectional:
            buckets //= 2
            start = (relative > 0).long() * buckets
            distance = relative.abs()
        else:
            distance = (-relative).clamp(min=0)
        exact = buckets // 2
        large = exact + (
            torch.log(distance.float().clamp(min=1) / exact)
            / math.log(self.max_distance / exact)
            * (buckets - exact)
        ).long().clamp(max=buckets - exact - 1)  # fmt: skip
        bucket = start + torch.where(distance < exact, distance, large)
        return self.table[bucket].permute(2, 0, 1)  # (heads, T_q, T_k)


@dataclass(frozen=True)
class TableBias:
    """A learned bias for every pair of places in a window, as rows of a table."""

    table: Tensor  # (rows, heads)
    index: Tensor  # (T_q, T_k)

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        del query, key  # a window has its own places
        return self.table[self.index.to(self.table.device)].permute(2, 0, 1)


@dataclass(frozen=True)
class QueryGain:
    """Llama 4's: queries grow with their position p, by 1 + strength · ln(1 + ⌊(p + shift)/length⌋)."""

    strength: float
    length: float
    shift: int = 0

    def __call__(self, position: Tensor) -> Tensor:
        return 1 + self.strength * ((position.double() + self.shift) / self.length).floor().log1p()


@dataclass(frozen=True)
class SineKeys:
    """A key for every offset, made of its sines."""

    projection: Projection
    interleaved: bool  # sine and cosine beside each other
    sign: int  # of query position − key position

    def __call__(self, offsets: Tensor) -> Tensor:
        """(G, R, offsets, K)."""
        weight, bias = self.projection.weight, self.projection.bias
        width = weight.shape[-1]
        frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=weight.device) / width)
        angle = self.sign * offsets.to(weight.device).double()[:, None] * frequencies
        sines = torch.stack([angle.sin(), angle.cos()], -1 if self.interleaved else -2).flatten(-2).to(weight.dtype)
        keys = torch.einsum("od,grkd->grok", sines, weight)
        return keys if bias is None else keys + bias[:, :, None]


@dataclass(frozen=True)
class TableKeys:
    """A learned key for every offset; those beyond the table have its first and last."""

    table: Tensor  # (offsets, K)
    left: int  # the place of offset 0
    sign: int  # of query position − key position

    def __call__(self, offsets: Tensor) -> Tensor:
        """(1, 1, offsets, K)."""
        return self.table[(self.sign * offsets + self.left).clamp(0, len(self.table) - 1).to(self.table.device)][
            None, None
        ]


@dataclass(frozen=True)
class RelativeKeys:
    """Keys for the offsets between queries and keys: Transformer-XL's, made of sines, and Shaw's, of a table.

    With the first come two biases of queries: `content` where they are compared with keys, `position` with offsets.
    """

    keys: SineKeys | TableKeys
    content: Tensor | None = None  # (G, R, K)
    position: Tensor | None = None
    scaled: ClassVar[bool] = True

    def __call__(self, q: Tensor, k: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        """What is added to q·k (B, G, R, Tq, Tk)."""
        offsets, place = (positions[0][:, None] - positions[1][None, :]).unique(return_inverse=True)
        of_position = q if self.position is None else q + self.position[:, :, None]
        logits = (of_position @ self.keys(offsets).mT).gather(-1, place.to(q.device).expand(*q.shape[:-1], -1))
        return logits if self.content is None else logits + self.content[:, :, None] @ k.mT


@dataclass(frozen=True)
class GridKeys:
    """SAM's: the patches of an image have keys for how many rows, and how many columns, they are from the query."""

    rows: Tensor  # (2 · rows of the image − 1, K)
    columns: Tensor
    scaled: ClassVar[bool] = False  # by the factor of the logits

    def __call__(self, q: Tensor, k: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        """What is added to the logits (B, G, R, T, T)."""
        del positions  # an image has its own
        sizes = [(len(table) + 1) // 2 for table in (self.rows, self.columns)]
        if not q.shape[-2] == k.shape[-2] == math.prod(sizes):
            raise LocaterError(f"its positions are those of {sizes[0]} × {sizes[1]} patches, not of {q.shape[-2]}")
        by_row, by_column = (
            table[torch.arange(n)[:, None] - torch.arange(n) + n - 1]
            for table, n in zip((self.rows, self.columns), sizes, strict=True)
        )
        grid = q.unflatten(-2, sizes)  # (B, G, R, rows, columns, K)
        of_rows = torch.einsum("bgrhwk,hjk->bgrhwj", grid, by_row)[..., None]
        of_columns = torch.einsum("bgrhwk,wjk->bgrhwj", grid, by_column)[..., None, :]
        return (of_rows + of_columns).flatten(-2).flatten(-3, -2)


PositionBias = Callable[[Tensor, Tensor], Tensor]
PositionKeys = RelativeKeys | GridKeys
