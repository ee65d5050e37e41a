"""What an activation does to inner products: E φ(u)φ(v) of centred normals u, v, the kernel of a random MLP.

φ(s z) of a standard normal z is Σ_n c_n(s) h_n(z) in orthonormal Hermite polynomials, and E h_m(z) h_n(z′) is ρⁿ for
m = n and zero otherwise. So E φ(u)φ(v) = Σ_n c_n(s_u) c_n(s_v) ρⁿ: one power series, whatever the activation.
What the first `_TERMS` leave of E φ² goes with the next two powers, that of φ's even part and that of its odd part, so
that the kernel is exact at ρ = ±1. ReLU and its square, whose series are long, have closed forms (Cho and Saul, 2009).
tanh's is long where u is large: its kernel is within 0.0001 up to a spread of 3, 0.005 up to 10, and 0.02 up to 30.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy.special import expit, ndtr

from locater.theory import _checks as check
from locater.theory._checks import Array

__all__ = ["ACTIVATIONS", "activation_kernel"]

_TERMS = 48  # of the series
_NODES = np.linspace(-9.0, 9.0, 361)  # of the trapezoidal rule, which is exact here but for tanh(s z), s > 30


def _gelu_tanh(u: Array) -> Array:
    return np.asarray(0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda u: np.maximum(u, 0.0),
    "relu2": lambda u: np.maximum(u, 0.0) ** 2,
    "gelu": lambda u: u * ndtr(u),
    "gelu_tanh": _gelu_tanh,
    "silu": lambda u: u * expit(u),
    "quick_gelu": lambda u: u * expit(1.702 * u),
    "tanh": np.tanh,
}
"""Those whose kernels are known, by name."""


def activation_kernel(activation: str, gram: Array) -> Array:
    """E φ(u_i)φ(u_j) of centred normals with covariance `gram` (..., T, T): the same shape."""
    check.one_of("activation", activation, tuple(ACTIVATIONS))
    gram = check.finite("gram", gram)
    variance = np.diagonal(gram, axis1=-2, axis2=-1)
    spread = np.sqrt(np.maximum(variance, 0.0))
    product = spread[..., :, None] * spread[..., None, :]
    cosine = np.divide(gram, product, out=np.zeros_like(gram), where=product > 0).clip(-1.0, 1.0)
    if activation == "relu":
        angle = np.arccos(cosine)
        return np.asarray(product / (2 * np.pi) * (np.sin(angle) + (np.pi - angle) * cosine))
    if activation == "relu2":
        angle = np.arccos(cosine)
        turned = 3 * np.sin(angle) * cosine + (np.pi - angle) * (1 + 2 * cosine**2)
        return np.asarray(product**2 / (2 * np.pi) * turned)
    # to 6 digits: behind a norm they are few
    digits = np.round(np.log(np.maximum(spread, 1e-300)), 6)
    logs, where = np.unique(digits, return_inverse=True)
    levels = np.exp(logs)
    c = _coefficients(activation, tuple(levels.tolist()))[where.reshape(spread.shape)]  # (..., T, terms)
    total = np.zeros_like(gram)
    for n in range(c.shape[-1] - 1, -1, -1):  # Horner
        total = total * cosine + c[..., :, None, n] * c[..., None, :, n]
    return np.asarray(total)


@lru_cache(maxsize=1)
def _quadrature() -> tuple[Array, Array]:
    """Weights of the nodes, and the orthonormal Hermite polynomials there (terms, nodes)."""
    weights, rows = np.exp(-(_NODES**2) / 2), [np.ones_like(_NODES), _NODES]
    for n in range(1, _TERMS - 1):
        rows.append((_NODES * rows[-1] - np.sqrt(n) * rows[-2]) / np.sqrt(n + 1))
    return weights / weights.sum(), np.stack(rows)


@lru_cache(maxsize=64)
def _coefficients(activation: str, spreads: tuple[float, ...]) -> Array:
    """c_n of φ(s z) for each s, (levels, terms + 2); the last two are what remains of E φ², even and odd."""
    weights, polynomials = _quadrature()
    values = ACTIVATIONS[activation](np.array(spreads)[:, None] * _NODES)
    c = (values * weights) @ polynomials.T
    parts = [(values + sign * values[:, ::-1]) / 2 for sign in (1, -1)]  # even and odd; `_TERMS` is even
    rest = [np.maximum((part**2) @ weights - (c[:, i::2] ** 2).sum(1), 0.0) for i, part in enumerate(parts)]
    return np.concatenate([c, np.sqrt(rest).T], 1)
