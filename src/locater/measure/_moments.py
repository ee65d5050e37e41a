"""First and second moments of hidden states over sequences, in sums of T × T, D × D and T × D numbers.

They are what a token process K ⊗ Σ, Cov(x_i, x_j) = K_ij Σ, is estimated from. K and Σ have a common factor to share;
here the mean of K's diagonal is 1, so that Σ is the covariance of a token, averaged over positions.

Legend: E members, B sequences of each, T tokens, D model width.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from locater.errors import LocaterError

Array = NDArray[np.float64]

_TOGETHER = 1 << 22  # numbers that are made float64 at a time


class Covariances(NamedTuple):
    """Of hidden states x_1 … x_T: Cov(x_i, x_j) is taken for K_ij Σ, with a mean of 1 on K's diagonal.

    They are what the theory asks for: `rho(qk, TokenProcess(c.position_covariance), covariance=c.covariance)`.
    """

    position_covariance: Array  # K (T, T): of x_i · x_j, over tr Σ
    covariance: Array  # Σ (D, D): of a token, averaged over positions
    mean: Array  # (T, D): of the tokens at each position, which K and Σ are without
    sequences: int


class Moments:
    """Sums over the sequences so far that have T tokens or more, their first T."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        # sequences (E,), Σ x_i (E, T, D), Σ x_i x_iᵀ over positions, too (E, D, D), Σ x_i · x_j (E, T, T)
        self._sums: tuple[Tensor, ...] = ()

    @torch.no_grad()
    def add(self, x: Tensor, real: Tensor | None = None, members: int = 1) -> None:
        """Hidden states (B, T or more, D), (E·B, …) of E members; padding is left out wherever it stands."""
        if x.ndim != 3 or x.shape[1] < self.tokens:
            return
        whole = torch.ones(len(x), dtype=torch.bool, device=x.device)
        if real is not None and real.shape == x.shape[:2]:
            whole = real.sum(1) >= self.tokens
            x = torch.take_along_dim(x, (~real).byte().argsort(dim=1, stable=True)[:, : self.tokens, None], 1)
        x = x[:, : self.tokens].unflatten(0, (members, -1))
        whole = whole.unflatten(0, (members, -1))
        step = max(1, _TOGETHER // (members * self.tokens * x.shape[3]))
        for some, counts in zip(x.split(step, 1), whole.split(step, 1), strict=True):
            self._add(some, counts)

    def _add(self, x: Tensor, counts: Tensor) -> None:
        """x (E, B, T, D), of which sequences count (E, B)."""
        x = x.float() if x.device.type == "mps" else x.double()
        x = torch.where(counts[..., None, None], x, 0)
        by_feature = x.flatten(1, 2)  # (E, B·T, D)
        by_position = x.transpose(1, 2).flatten(2)  # (E, T, B·D)
        with torch.autocast(x.device.type, enabled=False):
            sums: tuple[Tensor, ...] = (
                counts.sum(1),
                x.sum(1),
                by_feature.mT @ by_feature,
                by_position @ by_position.mT,
            )
        if (
            self._sums
        ):  # made anew: those of inference mode cannot be changed outside of it, and the model may have moved
            sums = tuple(old.to(new.device) + new for old, new in zip(self._sums, sums, strict=True))
        self._sums = sums

    def sequences(self, member: int = 0) -> int:
        return int(self._sums[0][member]) if self._sums else 0

    def covariances(self, member: int = 0) -> Covariances:
        """About the mean of each position, unbiased; of two sequences or more."""
        count, first, features, positions = self._of(member)
        mean = first / count
        rounding = 1e-13 * float(np.trace(features))
        features, positions = features - count * mean.T @ mean, positions - count * mean @ mean.T
        if np.trace(features) < rounding:
            raise LocaterError("the hidden states are the same in all sequences: they have no covariance")
        return Covariances(*_separated(features, positions, (count - 1) * self.tokens), mean, count)

    def about_zero(self, member: int = 0) -> Covariances:
        """Of tokens whose mean is known to be zero."""
        count, first, features, positions = self._of(member)
        return Covariances(*_separated(features, positions, count * self.tokens), np.zeros_like(first), count)

    def _of(self, member: int) -> tuple[int, Array, Array, Array]:
        first, features, positions = (x[member].double().cpu().numpy() for x in self._sums[1:])
        return self.sequences(member), first, features, positions


def _separated(features: Array, positions: Array, tokens: int) -> tuple[Array, Array]:
    """K and Σ of the two sums over so many tokens, which have one trace."""
    return positions * len(positions) / np.trace(features), features / tokens
