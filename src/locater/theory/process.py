"""Gaussian token sequences: where the paper's random walk is one case among many.

Tokens x_1 … x_T in ℝ^d are jointly Gaussian with mean zero and Cov(x_i, x_j) = K_ij Σ. K is the
position covariance, the subject of this file; Σ, the feature covariance, is passed where it is used.
The last token is the query.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array

__all__ = ["TokenProcess"]


class TokenProcess:
    """A zero-mean Gaussian token sequence with a given position covariance K (tokens, tokens).

    The law of ρ_i depends on K through three numbers (0-based arrays over i below):

    - `centred_variance`: s_i = K_ii − (2/T) Σ_j K_ij + (1/T²) Σ_jk K_jk, of x_i − x̄
    - `query_covariance`: c_i = K_iT − (1/T) Σ_j K_jT, of x_i − x̄ with x_T
    - `query_variance`: k = K_TT, of x_T
    """

    def __init__(self, position_covariance: ArrayLike) -> None:
        self._set(check.covariance("position_covariance", position_covariance), "any")

    @classmethod
    def _trusted(cls, position_covariance: Array, kind: str) -> TokenProcess:
        """Skips the eigenvalue check, for covariances that are positive semidefinite by construction."""
        process = cls.__new__(cls)
        process._set(position_covariance, kind)
        return process

    def _set(self, position_covariance: Array, kind: str) -> None:
        if len(position_covariance) < 2:
            raise LocaterError("a token process needs at least 2 tokens, got a 1 × 1 position_covariance")
        self.position_covariance = position_covariance
        self.kind = kind

    @classmethod
    def random_walk(cls, tokens: int) -> TokenProcess:
        """Assumption 1: x_1 ~ N(0, Σ), x_{t+1} ~ N(x_t, Σ), so K_ij = min(i, j)."""
        i = np.arange(1, check.at_least("tokens", tokens, 2) + 1, dtype=np.float64)
        return cls._trusted(np.minimum.outer(i, i), "random walk")

    @classmethod
    def autoregressive(cls, tokens: int, decay: float) -> TokenProcess:
        """Stationary first-order autoregression: K_ij = decay^|i−j|, −1 ≤ decay ≤ 1."""
        tokens = check.at_least("tokens", tokens, 2)
        decay = float(check.finite("decay", decay))
        if abs(decay) > 1:
            raise LocaterError(f"decay must be between -1 and 1, got {decay}")
        lag = np.abs(np.subtract.outer(np.arange(tokens), np.arange(tokens)))
        return cls._trusted(np.power(decay, lag, dtype=np.float64), "autoregressive")

    @classmethod
    def independent(cls, tokens: int) -> TokenProcess:
        """K = I."""
        return cls._trusted(np.eye(check.at_least("tokens", tokens, 2)), "independent")

    def __repr__(self) -> str:
        return f"TokenProcess({self.kind}, tokens={self.tokens})"

    @property
    def tokens(self) -> int:
        return len(self.position_covariance)

    @cached_property
    def centred_variance(self) -> Array:
        k = self.position_covariance
        return np.asarray(np.maximum(np.diag(k) - 2 * k.mean(1) + k.mean(), 0.0))

    @cached_property
    def query_covariance(self) -> Array:
        to_query = self.position_covariance[:, -1]
        return np.asarray(to_query - to_query.mean())

    @property
    def query_variance(self) -> float:
        return float(self.position_covariance[-1, -1])

    @cached_property
    def factor(self) -> Array:
        """L with L Lᵀ = K: x = L g turns independent normals into the sequence."""
        try:
            return np.asarray(np.linalg.cholesky(self.position_covariance), dtype=np.float64)
        except np.linalg.LinAlgError:
            return check.square_root(self.position_covariance)

    def sample(
        self, count: int, dim: int | None = None, *, covariance: ArrayLike | None = None, seed: int = 0
    ) -> Array:
        """`count` sequences (count, tokens, d), with Σ = `covariance` or the identity in `dim` dimensions."""
        (sequences,) = self.sample_batches(count, dim, covariance=covariance, seed=seed, batch=count)
        return sequences

    def sample_batches(
        self,
        count: int,
        dim: int | None = None,
        *,
        covariance: ArrayLike | None = None,
        seed: int = 0,
        batch: int | None = None,
    ) -> Iterator[Array]:
        """The same sequences in batches that fit a cache (or of `batch`), for counts that fit no memory."""
        count = check.at_least("count", count, 1)
        if (dim is None) == (covariance is None):
            raise LocaterError("give either dim (for an identity covariance) or covariance")
        root = None
        if covariance is not None:
            root = check.square_root(check.covariance("covariance", covariance, dim))
            dim = len(root)
        dim = check.at_least("dim", dim if dim is not None else 0, 1)
        batch = batch or max(1, (1 << 18) // (self.tokens * dim))
        rng = np.random.default_rng(seed)
        for start in range(0, count, batch):
            g = rng.standard_normal((min(batch, count - start), self.tokens, dim))
            # the Cholesky factor of the random walk is all ones: a running sum
            x = np.cumsum(g, axis=1) if self.kind == "random walk" else self.factor @ g
            yield x if root is None else x @ root.T
