"""The QK-gradient of the one-layer network: Eq. (3), its expansion (19)–(21), its diagonal reduction (4).

The network is F = W_F {W_V X S̃(ω) + x_T} with the piecewise linear softmax S̃ and ω_i = x_Tᵀ W_QK x_i/λ, the loss
J = ½ E‖y − F‖². Tokens are rows here, X (B, T, d); the paper keeps them in columns.

W_QK is that of `QK` and of a model: W_Qᵀ W_K, so that ω_i = (W_Q x_T)·(W_K x_i)/λ. The paper writes ω = XᵀW_QK x_T/λ,
where W_Q multiplies the keys: its W_QK is the transpose of this one, and so is each of its gradients. z_i has the same
law either way.

All three terms of (3), transposed, are one linear map applied to three parts of the residual:

    ∇J = λ⁻¹ E[ x_T · ((XΓ) Xᵀ r)ᵀ ],   r = P̃ X Γᵀω  +  P̃ X γ̃₀  +  W_Vᵀ W_Fᵀ (W_F x_T − y)
                                            (19)          (20)            (21)

with P̃ = W_Vᵀ W_Fᵀ W_F W_V and XΓ, whose column i is (x_i − x̄)/T where token i is active and zero elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory.softmax import piecewise_softmax

__all__ = ["OneLayer", "QKGradient"]


@dataclass(frozen=True)
class QKGradient:
    """The three terms of Eq. (3), transposed to `QK`'s convention: each (d, d), averaged over the batch."""

    e19: Array
    e20: Array
    e21: Array

    @property
    def total(self) -> Array:
        return self.e19 + self.e20 + self.e21


@dataclass(frozen=True)
class OneLayer:
    """The network of Section 3, all matrices (d, d). ω_i = x_Tᵀ W_QK x_i/λ, as in `QK`: the paper's W_QK transposed."""

    w_qk: Array
    w_v: Array
    w_f: Array
    temperature: float

    def __post_init__(self) -> None:
        d = len(check.square("w_qk", self.w_qk))
        check.square("w_v", self.w_v, d)
        check.square("w_f", self.w_f, d)
        check.positive("temperature", self.temperature)

    def loss(self, tokens: ArrayLike, target: ArrayLike) -> float:
        """J for tokens (B, T, d) and target (B, d)."""
        x, y = self._batch(tokens, target)
        attention = piecewise_softmax(self._logits(x)).value
        mixed = np.einsum("bt,btd->bd", attention, x) @ self.w_v.T + x[:, -1]
        return float(0.5 * ((y - mixed @ self.w_f.T) ** 2).sum(-1).mean())

    def qk_gradient(self, tokens: ArrayLike, target: ArrayLike) -> QKGradient:
        """Eq. (3), term by term, in O(B T d + B d²)."""
        x, y = self._batch(tokens, target)
        omega = self._logits(x)
        pieces = piecewise_softmax(omega)
        centred = (x - x.mean(1, keepdims=True)) * pieces.active[..., None] / pieces.tokens  # (XΓ)ᵀ
        linear = pieces.value - pieces.gamma_tilde_0  # Γᵀω
        return self._terms(x, y, centred, linear, pieces.gamma_tilde_0)

    def diagonal_gradient(self, tokens: ArrayLike, target: ArrayLike) -> QKGradient:
        """The same with the off-diagonal entries of Γ dropped, as Section 3 argues one may."""
        x, y = self._batch(tokens, target)
        omega = self._logits(x)
        pieces = piecewise_softmax(omega)
        gamma_ii = pieces.active * (1 / pieces.tokens - 1 / pieces.tokens**2)
        return self._terms(x, y, x * gamma_ii[..., None], gamma_ii * omega, pieces.gamma_tilde_0)

    def qk_gradient_by_sums(self, tokens: ArrayLike, target: ArrayLike) -> QKGradient:
        """(19)–(21) as written: sums over i, j, α, β of scalars times x_T x_αᵀ. O(B T⁴): for small T."""
        x, y = self._batch(tokens, target)
        last = x[:, -1]
        pieces = piecewise_softmax(self._logits(x))
        gamma, gamma_0 = pieces.Gamma, pieces.gamma_tilde_0  # (B, α, i), (B, β)
        p = self._p_tilde()
        xpx = np.einsum("bid,de,bje->bij", x, p, x)
        e19 = np.einsum(
            "bai,bcj,bij,bc,bak,bl->lk", gamma, gamma, xpx, self._logits(x) * self.temperature, x, last, optimize=True
        ) / self.temperature**2  # fmt: skip
        e20 = np.einsum("bai,bc,bic,bak,bl->lk", gamma, gamma_0, xpx, x, last, optimize=True) / self.temperature
        residual = (last @ self.w_f.T - y) @ self.w_f @ self.w_v
        e21 = np.einsum("bai,bid,bd,bak,bl->lk", gamma, x, residual, x, last, optimize=True) / self.temperature
        return QKGradient(e19 / len(x), e20 / len(x), e21 / len(x))

    def _terms(self, x: Array, y: Array, centred: Array, linear: Array, constant: Array) -> QKGradient:
        last = x[:, -1]
        p = self._p_tilde()
        residuals = (
            np.einsum("bt,btd->bd", linear, x) @ p,
            np.einsum("bt,btd->bd", constant, x) @ p,
            (last @ self.w_f.T - y) @ self.w_f @ self.w_v,
        )
        scores = (np.einsum("btd,bd->bt", x, residual) for residual in residuals)
        unit = 1 / (self.temperature * len(x))
        return QKGradient(*(np.einsum("bt,btk,bl->lk", s, centred, last, optimize=True) * unit for s in scores))

    def _p_tilde(self) -> Array:
        return np.asarray(self.w_v.T @ self.w_f.T @ self.w_f @ self.w_v)

    def _logits(self, x: Array) -> Array:
        """ω_i = x_Tᵀ W_QK x_i/λ, (B, T)."""
        return np.asarray(np.einsum("btd,bd->bt", x, x[:, -1] @ self.w_qk) / self.temperature)

    def _batch(self, tokens: ArrayLike, target: ArrayLike) -> tuple[Array, Array]:
        x, y = check.finite("tokens", tokens), check.finite("target", target)
        d = len(self.w_qk)
        if x.ndim != 3 or x.shape[-1] != d or x.shape[1] < 2:
            raise LocaterError(f"tokens must be (batch, T ≥ 2, {d}), got shape {x.shape}")
        if y.shape != (len(x), d):
            raise LocaterError(f"target must be ({len(x)}, {d}) to match tokens, got shape {y.shape}")
        return x, y
