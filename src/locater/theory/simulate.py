"""Monte Carlo over token sequences: the reference for everything exact, and the paper's Fig. 5.

Only the law of the tokens matters, so every simulation works in coordinates where it is simplest: with
symmetric W_QK the tokens are drawn in the eigenbasis of W, and no d × d product is formed for a walk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory.conditional import GivenQuery
from locater.theory.law import Spectrum
from locater.theory.process import TokenProcess
from locater.theory.sampling import logits_by_walks, logits_given_query

__all__ = ["Simulation", "rho_by_walks", "rho_given_query", "simulate"]


def rho_by_walks(law: Spectrum, process: TokenProcess, temperature: float, *, samples: int, seed: int) -> Array:
    """The share of simulated sequences with z_i in [0, 1], (T,), by drawing every token."""
    return _share_inside(logits_by_walks(law, GivenQuery.of(process), samples, seed), process, temperature)


def rho_given_query(law: Spectrum, process: TokenProcess, temperature: float, *, samples: int, seed: int) -> Array:
    """The same in law, by drawing the query token and then the logits given it."""
    return _share_inside(logits_given_query(law, GivenQuery.of(process), samples, seed), process, temperature)


def _share_inside(batches: Iterator[Array], process: TokenProcess, temperature: float) -> Array:
    inside, count = np.zeros(process.tokens), 0
    low, high = -temperature, temperature * (process.tokens - 1)
    for logits in batches:
        y = logits - logits.mean(1, keepdims=True)
        inside += ((y >= low) & (y <= high)).sum(0)
        count += len(y)
    return inside / count


@dataclass(frozen=True)
class Simulation:
    """Fig. 5's experiment on a grid of eigenvalue means and spreads."""

    means: Array  # (M,)
    stds: Array  # (S,)
    rho: Array  # (M, S, matrices, T): share of the walks with z_i in [0, 1]
    entropy: Array  # (M, S, matrices): attention entropy in nats, averaged over queries and walks
    eigenvalues: Array  # (M, S, matrices, d) of W = W_QK Σ
    temperature: float
    walks: int


def simulate(
    means: ArrayLike,
    stds: ArrayLike,
    *,
    dim: int = 128,
    tokens: int = 40,
    walks: int = 300,
    matrices: int = 10,
    covariance: str | ArrayLike = "isotropic",
    process: TokenProcess | None = None,
    temperature: float | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Simulation:
    """ρ and attention entropy of random W_QK = B diag(w) Bᵀ, w ~ N(mean, std²), on every (mean, std) of a grid.

    `covariance` is "isotropic" (Σ = I), "anisotropic" (the paper's RᵀR/d, R uniform on ±2.5) or a
    matrix. `temperature` defaults to √dim. Entropy is that of full (not causal) softmax attention,
    Eq. (1), averaged over queries: each walk is asked at one position, all positions by equally many.

    All cells of the grid share one set of bases, walks and standard normal eigenvalue draws, so that cells
    differ by their mean and std alone; within a cell everything is as independent as in the paper's
    recipe. The seed gives the same draws on every `device`.
    """
    means_, stds_ = check.finite("means", means).reshape(-1), check.finite("stds", stds).reshape(-1)
    if len(means_) == 0 or len(stds_) == 0 or (stds_ < 0).any():
        raise LocaterError("means and stds must not be empty, and stds not negative")
    dim, matrices = check.at_least("dim", dim, 1), check.at_least("matrices", matrices, 1)
    walks = check.at_least("walks", walks, 1)
    process = process or TokenProcess.random_walk(tokens)
    temperature = check.positive("temperature", np.sqrt(dim) if temperature is None else temperature)
    rng = np.random.default_rng(seed)
    root = _feature_root(covariance, dim, rng)
    draws = _Draws.sample(process, root, dim, walks, matrices, rng).on(device)
    shape = (len(means_), len(stds_), matrices)
    rho, entropy = np.empty((*shape, process.tokens)), np.empty(shape)
    eigenvalues = np.empty((*shape, dim))
    for m, mean in enumerate(means_):
        for s, std in enumerate(stds_):
            w = mean + std * draws.spread
            rho[m, s], entropy[m, s] = (check.to_numpy(part) for part in draws.statistics(w, temperature))
            eigenvalues[m, s] = draws.eigenvalues(check.to_numpy(w))
    return Simulation(means_, stds_, rho, entropy, eigenvalues, temperature, walks)


def _feature_root(covariance: str | ArrayLike, dim: int, rng: np.random.Generator) -> Array | None:
    """Σ^½, symmetric, or None for the identity."""
    if isinstance(covariance, str):
        check.one_of("covariance", covariance, ("isotropic", "anisotropic"))
        if covariance == "isotropic":
            return None
        r = rng.uniform(-2.5, 2.5, (dim, dim))
        sigma = r.T @ r / dim
    else:
        sigma = check.covariance("covariance", covariance, dim)
    values, vectors = np.linalg.eigh(sigma)
    return np.asarray((vectors * np.sqrt(values.clip(0))) @ vectors.T)


@dataclass(frozen=True)
class _Draws:
    """The randomness of a simulation, and the statistics of one (mean, std) cell.

    E matrices, N walks, T tokens, D dimensions. For ρ every walk asks at the last token; for the entropy walk
    n asks at token ⌊nT/N⌋, and `share` gives every token the same weight.
    """

    spread: Any  # (E, D) standard normal eigenvalues
    query: Any  # (E, N, D): Bᵀ Σ^½ g, the query in the eigenbasis of W_QK at unit position variance
    basis: Any | None  # (E, D, D): Σ^½ B; None where Σ = I
    variance_last: float  # K_TT
    mean_last: Any  # (T,): c/k
    noise_last: Any  # (E, N, T): centred logits of the last query given it, at b = 1
    variance_rotating: Any  # (N,): K_tt
    mean_rotating: Any  # (N, T): K_jt/K_tt
    noise_rotating: Any  # (E, N, T)
    share: Any  # (N,)

    @classmethod
    def sample(
        cls, process: TokenProcess, root: Array | None, dim: int, walks: int, matrices: int, rng: np.random.Generator
    ) -> _Draws:
        k = process.position_covariance
        tokens = len(k)
        spread = rng.standard_normal((matrices, dim))
        g = rng.standard_normal((matrices, walks, dim))
        basis = None
        if root is not None:
            b = np.linalg.qr(rng.standard_normal((matrices, dim, dim)))[0]
            # QR alone is not uniform on the orthogonal group; W = B diag(w) Bᵀ does not see the signs
            basis = root @ b
            g = g @ basis
        noise = rng.standard_normal((matrices, walks, tokens))
        given = [check.square_root(k - np.outer(k[t], k[t]) / k[t, t]) for t in range(tokens)]  # given x_t
        turn = np.arange(walks) * tokens // walks
        share = 1 / np.bincount(turn, minlength=tokens)[turn]
        rotating = np.empty_like(noise)
        for t in np.unique(turn):
            rotating[:, turn == t] = noise[:, turn == t] @ given[t].T
        last = noise @ given[-1].T
        return cls(
            spread, g, basis, float(k[-1, -1]), process.query_covariance / k[-1, -1],
            last - last.mean(-1, keepdims=True), np.diag(k)[turn], k[turn] / np.diag(k)[turn, None], rotating,
            share / share.sum(),
        )  # fmt: skip

    def on(self, device: str) -> _Draws:
        """Moved to a torch device; the CPU needs no torch."""
        if device == "cpu":
            return self
        import torch

        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise LocaterError(f"device {device!r} cannot be used here: {reason}") from error
        moved: dict[str, Any] = {
            name: torch.as_tensor(value, device=device) if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }
        return _Draws(**moved)

    def statistics(self, w: Any, temperature: float) -> tuple[Any, Any]:
        """ρ (E, T) and entropy (E,) for eigenvalues w (E, D) of W_QK."""
        toward = self.query * w[:, None, :]  # diag(w) Bᵀ Σ^½ g
        a = (toward * self.query).sum(-1)
        # W_QKᵀ x_T seen through Σ^½: what the other tokens are projected on
        b = ((toward if self.basis is None else toward @ self.basis.swapaxes(-1, -2)) ** 2).sum(-1)
        y = self._logits(a, b, self.variance_last, self.mean_last, self.noise_last)
        tokens = y.shape[-1]
        rho = 1.0 * ((y >= -temperature) & (y <= temperature * (tokens - 1)))
        omega = self._logits(a, b, self.variance_rotating, self.mean_rotating, self.noise_rotating) / temperature
        return rho.mean(1), (_entropy(omega) * self.share).sum(-1)

    @staticmethod
    def _logits(a: Any, b: Any, variance: Any, mean: Any, noise: Any) -> Any:
        return (a * variance)[..., None] * mean + ((b * variance) ** 0.5)[..., None] * noise

    def eigenvalues(self, w: Array) -> Array:
        """Those of W = W_QK Σ, (E, D)."""
        if self.basis is None:
            return w
        root_b = check.to_numpy(self.basis)
        return np.linalg.eigvalsh((root_b * w[:, None, :]) @ root_b.swapaxes(-1, -2))


def _entropy(logits: Any) -> Any:
    """Entropy of softmax over the last axis, in nats: lse − E[ω]. For numpy arrays and tensors alike."""
    shifted = logits - (logits.max(-1, keepdims=True) if isinstance(logits, np.ndarray) else logits.amax(-1, True))
    e = np.exp(shifted) if isinstance(shifted, np.ndarray) else shifted.exp()
    total = e.sum(-1)
    log_total = np.log(total) if isinstance(total, np.ndarray) else total.log()
    return log_total - (e * shifted).sum(-1) / total
