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

    def largest_product(self, gram_q: Tensor, gram_k: Tensor) -> Tensor:
        """At least tr(gram_q R gram_k Rᵀ), (…) of (…, K, K), for rotations R of every pair by any angle.

        The product of a block of one, between two pairs, with the rotated block of the other is at most that of their
        norms. Where all coordinates are rotary, and both have rank one or pairs are unrelated and isotropic, there it
        is the maximum. The gain is left out.
        """
        total = (gram_q * gram_k)[..., 2 * self.pairs :, 2 * self.pairs :].sum((-2, -1))
        norms_q, norms_k = self._block_norms(gram_q), self._block_norms(gram_k)
        return total + (norms_q[0] * norms_k[0]).sum((-2, -1)) + 2 * (norms_q[1] * norms_k[1]).sum(-1)

    def _block_norms(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        """Between two pairs (…, pairs, pairs), and between one and the coordinates without rotation (…, pairs)."""
        squares = self._over_pairs(gram.square()[..., : 2 * self.pairs, :].mT).mT  # (…, pairs, K)
        return self._over_pairs(squares).sqrt(), squares[..., 2 * self.pairs :].sum(-1).sqrt()

    def _over_pairs(self, x: Tensor) -> Tensor:
        """(…, pairs), the sum of each pair's two coordinates of (…, K)."""
        if self.interleaved:
            return x[..., 0 : 2 * self.pairs : 2] + x[..., 1 : 2 * self.pairs : 2]
        return x[..., : self.pairs] + x[..., self.pairs : 2 * self.pairs]

    def mean_gram(self, gram: Tensor) -> Tensor:
        """The mean of R gram Rᵀ (..., K, K) over rotations R of every pair by an angle of its own, gain aside.

        What is left of a pair is half its trace, in both coordinates; of what relates it to others, nothing. The
        coordinates beyond the rotary ones keep what relates them to each other.
        """
        end = 2 * self.pairs
        half = self._over_pairs(gram.diagonal(dim1=-2, dim2=-1)) / 2
        found = torch.zeros_like(gram)
        each = half.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat([half, half], dim=-1)
        found.diagonal(dim1=-2, dim2=-1)[..., :end] = each
        found[..., end:, end:] = gram[..., end:, end:]
        return found
