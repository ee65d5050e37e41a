"""The tokens given the query: the two scalars that a head's logits depend on, and the noise around them.

Tokens have Cov(x_i, x_j) = K_ij Σ, the query is x_q. Given it, the other tokens are normal,

    x_i = u_i x_q + noise_i,    u_i = K_iq/K_qq,    Cov(noise_i, noise_j) = C_ij Σ,    C = K − K_·q K_q·/K_qq,

and so are the logits ω_i = h·x_i with h = W_QKᵀ x_q/λ:  ω ~ N(a u, b C),  a = h·x_q,  b = hᵀΣh.
Whatever softmax does depends on a, b and K alone.

Arrays here have tokens first and samples last, (T, N).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory.process import TokenProcess

__all__ = ["GivenQuery"]


@dataclass(frozen=True)
class GivenQuery:
    """The tokens that the query at `position` attends to, itself among them, given it."""

    process: TokenProcess
    position: int  # of the query, from 0
    tokens: int  # attended to: the first so many of the process

    @classmethod
    def of(cls, process: TokenProcess, query: int = -1, causal: bool = True) -> GivenQuery:
        """`query` counts from 0, or back from the last token if negative."""
        if not isinstance(process, TokenProcess):
            raise LocaterError(f"process must be a TokenProcess, got {type(process).__name__}")
        position = check.position("query", query, process.tokens)
        return cls(process, position, position + 1 if causal else process.tokens)

    @cached_property
    def _attended(self) -> Array:
        return self.process.position_covariance[: self.tokens, : self.tokens]

    @property
    def query_variance(self) -> float:
        """K_qq."""
        return float(self._attended[self.position, self.position])

    @cached_property
    def regression(self) -> Array:
        """u (T,)."""
        k = self.query_variance
        u = self._attended[self.position] / k if k > 0 else np.zeros(self.tokens)
        return np.asarray(u)

    @cached_property
    def covariance(self) -> Array:
        """C (T, T); the query's own row and column are zero."""
        c = self._attended - np.outer(self.regression, self._attended[self.position])
        c[self.position] = c[:, self.position] = 0.0
        return np.asarray(c)

    @cached_property
    def independent(self) -> bool:
        """Whether the others are independent of the query and of each other, and alike."""
        rest = np.delete(np.delete(self._attended, self.position, 0), self.position, 1)
        with_query = np.delete(self._attended[self.position], self.position)
        return not with_query.any() and len(rest) > 0 and bool((rest == rest[0, 0] * np.eye(len(rest))).all())

    # ------------------------------------------------------------------ the noise, C = L Lᵀ

    @cached_property
    def order(self) -> list[int]:
        """The tokens but the query, the nearest to it first."""
        others = (i for i in range(self.tokens) if i != self.position)
        return sorted(others, key=lambda i: (abs(i - self.position), i))

    def noise(self, normals: Array) -> Array:
        """L times standard normals (T − 1, N): (T, N)."""
        if self._chain is None:
            return np.asarray(self._root @ normals)
        slope, spread = self._chain
        noise = np.zeros((self.tokens, normals.shape[1]))
        for row, i in enumerate(self.order):
            noise[i] = spread[i] * normals[row]
            if slope[i]:
                noise[i] += slope[i] * noise[self._towards_query(i)]
        return noise

    def quadratic(self, weights: Array) -> Array:
        """pᵀCp = ‖Lᵀp‖² of weights (T, N): (N,)."""
        if self._chain is None:
            return np.asarray(((self._root.T @ weights) ** 2).sum(0))
        slope, spread = self._chain
        total, carried = np.zeros(weights.shape[1]), weights.copy()
        for i in reversed(self.order):
            total += (spread[i] * carried[i]) ** 2
            if slope[i]:
                carried[self._towards_query(i)] += slope[i] * carried[i]
        return total

    def _towards_query(self, i: int) -> int:
        return i + 1 if i < self.position else i - 1

    @cached_property
    def _root(self) -> Array:
        """L (T, T − 1) by principal components, the largest first: the first normals matter most."""
        return np.ascontiguousarray(check.square_root(self.covariance)[:, :0:-1])

    @cached_property
    def _chain(self) -> tuple[Array, Array] | None:
        """Of a Markov process: slope and spread of each token given its neighbour on the query's side; else None."""
        k, count = self._attended, self.tokens
        slope, spread = np.zeros(count), np.zeros(count)
        for i in self.order:
            near = self._towards_query(i)
            slope[i] = k[i, near] / k[near, near] if k[near, near] > 0 else 0.0
            spread[i] = np.sqrt(max(0.0, k[i, i] - slope[i] * k[i, near]))
            beyond = slice(near, None) if i < self.position else slice(0, near + 1)  # the query and what is past it
            if np.abs(k[i, beyond] - slope[i] * k[near, beyond]).max() > 1e-12 * np.sqrt(k[i, i] * k.diagonal().max()):
                return None
        return slope, spread
