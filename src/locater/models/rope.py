"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from locater.errors import LocaterError

__all__ = ["Rope"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: coordinate pairs are rotated by position · frequency."""

    frequencies: Tensor  # (pairs,), float64
    interleaved: bool = False  # pairs (0, 1), (2, 3), … rather than (0, half), (1, half + 1), …
    gain: float = 1.0  # on both q and k
    stretched: Callable[[int], Tensor] | None = field(default=None, repr=False)  # frequencies of texts of a length
    on_a_line: bool = True  # else positions are given as the angles (T, pairs) themselves: patches of an image

    @property
    def pairs(self) -> int:
        return len(self.frequencies)

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """x (..., T, K) rotated to `position` (T,); coordinates beyond the rotary ones pass."""
        return self.rotate_by(x, *self.angles(position.to(x.device), x.dtype))

    def angles(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines (T, pairs) with the gain in them, which `rotate_by` takes for any number of tensors."""
        if self.on_a_line:
            length = 0 if self.stretched is None else int(position.max()) + 1
            frequencies = self.frequencies if self.stretched is None else self.stretched(length)
            position = position.to(torch.float64)[:, None] * frequencies.to(position.device)
        elif position.ndim != 2:
            raise LocaterError("positions here are those of an image's patches: give their angles (T, pairs)")
        angle = position.to(torch.float64)
        return self.gain * angle.cos().to(dtype), self.gain * angle.sin().to(dtype)

    def rotate_by(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (..., T, K) by these angles."""
        pairs = self.pairs
        rotary, passed = x[..., : 2 * pairs], x[..., 2 * pairs :]
        if self.interleaved:
            a, b = rotary[..., 0::2], rotary[..., 1::2]
            rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = rotary[..., :pairs], rotary[..., pairs:]
            rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([rotated, passed], -1)

    def rotate_rows(self, weight: Tensor, offset: float) -> Tensor:
        """R(offset) applied to the rows of a weight (..., K, D): the key as seen `offset` positions later."""
        if not self.on_a_line and offset:
            raise LocaterError("an offset needs positions on a line, and here they are those of an image's patches")
        shape = (1,) if self.on_a_line else (1, self.pairs)
        position = torch.full(shape, offset, dtype=torch.float64, device=weight.device)
        return self.rotate(weight.mT[..., None, :], position)[..., 0, :].mT
