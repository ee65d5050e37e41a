"""The piecewise linear softmax of Section 2, beside softmax and sparsemax.

Around the origin softmax is linear, S(ω)_i ≈ ⟨γ^i, ω⟩ + γ₀^i with γ^i = e^i/T − 1/T² and
γ₀^i = 1/T; cutting each entry off at 0 and 1 gives S̃(ω) = Γᵀω + γ̃₀. Its entries need not sum to one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array

__all__ = ["PiecewiseSoftmax", "piecewise_softmax", "softmax", "sparsemax"]


@dataclass(frozen=True)
class PiecewiseSoftmax:
    """S̃ at one batch of logits ω (..., T)."""

    linear: Array  # z_i = ⟨γ^i, ω⟩ + γ₀^i before the cut, (..., T)

    @property
    def tokens(self) -> int:
        return int(self.linear.shape[-1])

    @property
    def value(self) -> Array:
        """S̃(ω), (..., T)."""
        return self.linear.clip(0.0, 1.0)

    @property
    def active(self) -> NDArray[np.bool_]:
        """Which tokens are on the slope: z_i in [0, 1] (Definition 1), (..., T)."""
        return (self.linear >= 0) & (self.linear <= 1)

    @property
    def gamma(self) -> Array:
        """The Taylor coefficients, column i is γ^i, (T, T); they do not depend on ω."""
        return np.eye(self.tokens) / self.tokens - 1 / self.tokens**2

    @property
    def gamma_0(self) -> float:
        return 1 / self.tokens

    @property
    def Gamma(self) -> Array:  # noqa: N802 — the paper's letter
        """Γ, column i is γ̃^i: γ^i where token i is active, else zero, (..., T, T)."""
        return self.gamma * self.active[..., None, :]

    @property
    def gamma_tilde_0(self) -> Array:
        """γ̃₀: 1/T where active, 0 below, 1 above, (..., T)."""
        return np.where(self.active, self.gamma_0, (self.linear > 1).astype(np.float64))


def piecewise_softmax(logits: ArrayLike) -> PiecewiseSoftmax:
    """S̃ and its coefficients at `logits` (..., T), over the last axis."""
    omega = _logits(logits)
    tokens = omega.shape[-1]
    return PiecewiseSoftmax((omega - omega.mean(-1, keepdims=True)) / tokens + 1 / tokens)


def softmax(logits: ArrayLike) -> Array:
    omega = _logits(logits)
    e = np.exp(omega - omega.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def sparsemax(logits: ArrayLike) -> Array:
    """The projection onto the simplex (Martins and Astudillo, 2016), over the last axis."""
    omega = _logits(logits)
    ordered = -np.sort(-omega, axis=-1)
    excess = np.cumsum(ordered, axis=-1) - 1
    rank = np.arange(1, omega.shape[-1] + 1)
    support = (ordered * rank > excess).sum(-1, keepdims=True)
    threshold = np.take_along_axis(excess, support - 1, axis=-1) / support
    return np.asarray(np.maximum(omega - threshold, 0.0))


def _logits(logits: ArrayLike) -> Array:
    omega = check.finite("logits", logits)
    if omega.ndim == 0 or omega.shape[-1] < 2:
        raise LocaterError(f"logits need a last axis of at least 2 tokens, got shape {omega.shape}")
    return omega
