"""Bounds (5), (7), (8), (9) and (10): as they hold, and as printed.

An inequality chain is returned as its members in the printed order, so that it can be tested, drawn and
read: `Chain.holds` says whether they really are in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array

__all__ = [
    "Chain",
    "eigenvalue_variance",
    "entropy_lower_bound",
    "entropy_nu",
    "rank_bound",
    "scale_bound",
    "trace_bound",
]


@dataclass(frozen=True)
class Chain:
    """Members of an inequality a ≤ b ≤ … with their names."""

    names: tuple[str, ...]
    values: tuple[float, ...]

    def scaled(self, unit: float) -> Chain:
        """Every member times `unit`: the chains are homogeneous in W, so tiny and huge ones cannot underflow."""
        return Chain(self.names, tuple(unit * float(value) for value in self.values))

    def holds(self, rounding: float = 1e-9) -> bool:
        """In ascending order, up to `rounding` relative to the largest member."""
        slack = rounding * max(abs(value) for value in self.values)
        return all(a <= b + slack for a, b in pairwise(self.values))

    def __str__(self) -> str:
        return " ≤ ".join(f"{name} = {value:.6g}" for name, value in zip(self.names, self.values, strict=True))


def trace_bound(eigenvalues: ArrayLike) -> Chain:
    """(5): |tr W| ≤ √(d tr W²), for real spectra."""
    w, unit = _in_units(check.real_eigenvalues(eigenvalues))
    if w.ndim != 1:
        raise LocaterError(f"eigenvalues must be those of one W, (d,), got shape {w.shape}")
    return Chain(("|tr W|", "√(d tr W²)"), (float(abs(w.sum())), np.sqrt(len(w) * (w**2).sum()))).scaled(unit)


def rank_bound(w_qk: ArrayLike, covariance: ArrayLike, form: str = "frobenius") -> Chain:
    """(7), for any W_QK, in one of these forms:

    - `frobenius`: |tr W|/(√d ‖Σ‖₂) ≤ ‖W_QK‖_F ≤ Σ|entries|
    - `spectral`: |tr W|/(d ‖Σ‖₂) ≤ ‖W_QK‖₂ ≤ ‖W_QK‖_F
    - `printed`: |tr W|/(√d ‖Σ‖₂) ≤ ‖W_QK‖₂ ≤ ‖W_QK‖_F ≤ ‖W_QK‖₁, with Dong et al.'s induced 1-norm: neither the first
      nor the last step holds in general
    """
    check.one_of("form", form, ("frobenius", "spectral", "printed"))
    w, unit = _in_units(check.square("w_qk", w_qk))
    d = len(w)
    sigma = check.covariance("covariance", covariance, d)
    largest = float(np.linalg.norm(sigma, 2))
    if largest == 0:
        raise LocaterError("covariance must not be zero")
    trace = abs(float(np.trace(w @ sigma)))
    spectral, frobenius = float(np.linalg.norm(w, 2)), float(np.linalg.norm(w))
    if form == "frobenius":
        names: tuple[str, ...] = ("|tr W|/(√d‖Σ‖₂)", "‖W_QK‖_F", "Σ|W_QK|")
        values: tuple[float, ...] = (trace / (np.sqrt(d) * largest), frobenius, np.abs(w).sum())
    elif form == "spectral":
        names = ("|tr W|/(d‖Σ‖₂)", "‖W_QK‖₂", "‖W_QK‖_F")
        values = (trace / (d * largest), spectral, frobenius)
    else:
        names = ("|tr W|/(√d‖Σ‖₂)", "‖W_QK‖₂", "‖W_QK‖_F", "‖W_QK‖₁")
        values = (trace / (np.sqrt(d) * largest), spectral, frobenius, float(np.linalg.norm(w, 1)))
    return Chain(names, values).scaled(unit)


def scale_bound(w_qk: ArrayLike, covariance: ArrayLike, form: str = "trace") -> Chain:
    """(10), for any W_QK, with the scale tr(W_QK Σ W_QKᵀ Σ), which is tr W² where W_QK is symmetric:

    - `trace`: |tr W_QK| ≤ ‖Σ⁻¹‖_F √scale
    - `spectral`: ‖W_QK‖₂ ≤ ‖Σ⁻¹‖₂ √scale
    - `printed`: ‖W_QK‖₂ ≤ |tr W_QK| ≤ ‖Σ⁻¹‖_F √tr W²: the first step needs a symmetric W_QK that is semidefinite, the
      second a symmetric one
    """
    check.one_of("form", form, ("trace", "spectral", "printed"))
    w, unit = _in_units(check.square("w_qk", w_qk))
    sigma, _ = _in_units(check.covariance("covariance", covariance, len(w)))  # of whose size the bound knows nothing
    if np.linalg.matrix_rank(sigma) < len(w):
        raise LocaterError("covariance must be invertible for the bound (10)")
    inverse = np.linalg.inv(sigma)
    scale = float(np.trace(w @ sigma @ w.T @ sigma))
    trace, spectral = abs(float(np.trace(w))), float(np.linalg.norm(w, 2))
    if form == "trace":
        chain = Chain(("|tr W_QK|", "‖Σ⁻¹‖_F √scale"), (trace, np.linalg.norm(inverse) * np.sqrt(scale)))
    elif form == "spectral":
        chain = Chain(("‖W_QK‖₂", "‖Σ⁻¹‖₂ √scale"), (spectral, np.linalg.norm(inverse, 2) * np.sqrt(scale)))
    else:
        square = float(np.trace(w @ sigma @ w @ sigma))
        root = np.sqrt(square) if square >= 0 else np.nan
        chain = Chain(
            ("‖W_QK‖₂", "|tr W_QK|", "‖Σ⁻¹‖_F √tr W²"), (spectral, trace, float(np.linalg.norm(inverse) * root))
        )
    return chain.scaled(unit)


def _in_units(w: Array) -> tuple[Array, float]:
    """w over its largest entry, and that entry."""
    unit = float(np.abs(w).max()) or 1.0
    return w / unit, unit


def eigenvalue_variance(trace: ArrayLike, trace_square: ArrayLike, dim: int) -> Array:
    """(8): V[w] = tr W²/d − (tr W/d)², for real spectra.

    With tr(WᵀW) in place of tr W² it is an upper bound, met by symmetric W alone: tr(WᵀW) sums squared
    singular values.
    """
    dim = check.at_least("dim", dim, 1)
    return np.asarray(check.finite("trace_square", trace_square) / dim - (check.finite("trace", trace) / dim) ** 2)


def entropy_lower_bound(nu: ArrayLike, tokens: int, form: str = "zhai") -> Array:
    """(9): the least entropy, in nats, of attention over `tokens` keys whose logits have norm at most ν.

    form "zhai" is Theorem 3.1 of Zhai et al. (2023), with β = exp(−ν√(T/(T−1))):
    ln(1 + (T−1)β) + ν√(T(T−1)) β/(1 + (T−1)β). It starts at ln T and falls; one logit up and all others down
    attains it. form "printed" is the paper's Eq. (9), which exceeds ln T.
    """
    check.one_of("form", form, ("zhai", "printed"))
    nu_ = check.finite("nu", nu)
    if (nu_ < 0).any():
        raise LocaterError(f"nu must not be negative, got {nu_.min()}")
    t = check.at_least("tokens", tokens, 2)
    if form == "printed":
        e = np.exp(-nu_)
        return np.asarray(np.log1p(t * e) + nu_ * np.exp(-nu_ / 2) / (1 / t + e))
    odds = (t - 1) * np.exp(-nu_ * np.sqrt(t / (t - 1)))  # (T−1)β
    return np.asarray(np.log1p(odds) + nu_ * np.sqrt(t / (t - 1)) * odds / (1 + odds))


def entropy_nu(tokens: ArrayLike, w_qk: ArrayLike, temperature: float) -> float:
    """ν of (9) for tokens X (T, d) as rows: ‖XXᵀ‖₂ ‖W_QK‖₂/λ bounds the norm of every query's logits.

    (The paper leaves out λ.)
    """
    x = check.finite("tokens", tokens)
    if x.ndim != 2:
        raise LocaterError(f"tokens must be (T, d), one sequence, got shape {x.shape}")
    w = check.square("w_qk", w_qk, x.shape[1])
    temperature = check.positive("temperature", temperature)
    return float(np.linalg.norm(x, 2) ** 2 * np.linalg.norm(w, 2) / temperature)
