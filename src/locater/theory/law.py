"""The general law behind ρ, and the spectra it specialises to.

For one query, z_i = 1/T + qᵀu_i/(λT) with u_i = k_i − k̄ in the head's own dimensions. Where (q, u_i) is
jointly Gaussian, qᵀu_i is a quadratic form in normals whose distribution `quadratic` knows exactly.
Everything else in this package that is called exact is a choice of means and covariances here.

Legend: T tokens, K head width, D model width. Σ feature covariance, W = W_QK Σ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erf

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory.process import TokenProcess
from locater.theory.quadratic import QuadraticForm

__all__ = [
    "Factored",
    "Spectral",
    "Spectrum",
    "inside_unit_interval",
    "logit_form",
    "normal_inside_unit_interval",
    "rho_from_gaussian",
    "spectrum_of",
]


@runtime_checkable
class Factored(Protocol):
    """W_QK = W_Qᵀ W_K kept as its factors, (..., K, D) each: `locater.QK` is one."""

    @property
    def w_q(self) -> Any: ...
    @property
    def w_k(self) -> Any: ...


Spectral: TypeAlias = ArrayLike | Factored


def logit_form(
    query_mean: ArrayLike,
    key_mean: ArrayLike,
    query_covariance: ArrayLike,
    key_covariance: ArrayLike,
    cross_covariance: ArrayLike,
) -> QuadraticForm:
    """The distribution of qᵀu for jointly Gaussian q and u, any means and covariances.

    `query_mean` and `key_mean` are E q and E u (..., K), the covariances Cov(q), Cov(u) and
    Cov(q, u) = E (q − E q)(u − E u)ᵀ (..., K, K); leading dimensions broadcast. The joint covariance may
    be singular.
    """
    return _product_form(*_joint(query_mean, key_mean, query_covariance, key_covariance, cross_covariance))


def _joint(*given: ArrayLike) -> tuple[Array, Array, Array]:
    """E q and E u (..., K) and the covariance of both (..., 2K, 2K), from the arguments of `logit_form`."""
    query_mean, key_mean, query_covariance, key_covariance, cross_covariance = given
    m_q, m_u = check.finite("query_mean", query_mean), check.finite("key_mean", key_mean)
    blocks = {
        "query_covariance": check.finite("query_covariance", query_covariance),
        "key_covariance": check.finite("key_covariance", key_covariance),
        "cross_covariance": check.finite("cross_covariance", cross_covariance),
    }
    width = m_q.shape[-1] if m_q.ndim else 0
    if width == 0 or m_u.shape[-1:] != (width,):
        raise LocaterError(f"query_mean and key_mean must end in the same head width, got {m_q.shape} and {m_u.shape}")
    for name, block in blocks.items():
        if block.shape[-2:] != (width, width):
            raise LocaterError(f"{name} must end in {width} × {width}, got shape {block.shape}")
    try:
        lead = np.broadcast_shapes(m_q.shape[:-1], m_u.shape[:-1], *(block.shape[:-2] for block in blocks.values()))
    except ValueError as error:
        shapes = [m_q.shape, m_u.shape, *(block.shape for block in blocks.values())]
        raise LocaterError(f"means and covariances have leading shapes that do not broadcast: {shapes}") from error
    joint = np.empty((*lead, 2 * width, 2 * width))
    joint[..., :width, :width] = check.symmetrised("query_covariance", blocks["query_covariance"])
    joint[..., width:, width:] = check.symmetrised("key_covariance", blocks["key_covariance"])
    joint[..., :width, width:] = blocks["cross_covariance"]
    joint[..., width:, :width] = np.swapaxes(blocks["cross_covariance"], -1, -2)
    return np.broadcast_to(m_q, (*lead, width)), np.broadcast_to(m_u, (*lead, width)), joint


def _product_form(m_q: Array, m_u: Array, joint: Array) -> QuadraticForm:
    """qᵀu = vᵀAv with v = (q, u) = m + L g and A = ½ [[0, I], [I, 0]]."""
    width, variance = m_q.shape[-1], np.diagonal(joint, axis1=-2, axis2=-1)
    f_q, f_u = _balancing(variance[..., :width] + m_q**2, variance[..., width:] + m_u**2)
    factors, m_q, m_u = np.concatenate([f_q, f_u], -1), f_q * m_q, f_u * m_u
    values, vectors = np.linalg.eigh(joint * factors[..., :, None] * factors[..., None, :])
    least, most = np.minimum(values[..., 0], variance.min(-1)), values[..., -1]
    if (least < -1e-7 * np.maximum(most, 0.0)).any():
        worst = least.flat[(least / np.where(most > 0, most, 1)).argmin()]
        raise LocaterError(
            "the joint covariance of query and key must be positive semidefinite, "
            f"its smallest eigenvalue is {worst:.6g}"
        )
    root = vectors * np.sqrt(np.where(values > 1e-15 * most[..., None], values, 0.0))[..., None, :]
    root_q, root_u = root[..., :width, :], root[..., width:, :]
    half = np.swapaxes(root_q, -1, -2) @ root_u
    weights, basis = np.linalg.eigh(0.5 * (half + np.swapaxes(half, -1, -2)))  # LᵀAL
    if not (m_q.any() or m_u.any()):
        return QuadraticForm(weights)
    gradient = 0.5 * (  # LᵀAm
        np.einsum("...kn,...k->...n", root_q, m_u) + np.einsum("...kn,...k->...n", root_u, m_q)
    )
    linear = np.einsum("...nm,...n->...m", basis, gradient)
    return QuadraticForm(weights, linear, (m_q * m_u).sum(-1))


def _balancing(q: Array, u: Array) -> tuple[Array, Array]:
    """Factors of q and u by coordinate, given their mean squares (…, K), that leave qᵀu and make both equally large.

    Otherwise the smaller is lost in the rounding of the larger. A coordinate that is 0 in one adds nothing.
    """
    there = (q > 0) & (u > 0)
    root_q, root_u = (np.sqrt(np.where(there, x, 1.0)) for x in (q, u))
    return np.where(there, np.sqrt(root_u / root_q), 0.0), np.where(there, np.sqrt(root_q / root_u), 0.0)


def rho_from_gaussian(
    query_mean: ArrayLike,
    key_mean: ArrayLike,
    query_covariance: ArrayLike,
    key_covariance: ArrayLike,
    cross_covariance: ArrayLike,
    *,
    tokens: int,
    temperature: float,
    method: str = "exact",
) -> Array:
    """The general law: P(0 ≤ z ≤ 1) for z = 1/T + qᵀu/(λT), exactly (absolute error below 1e-6).

    q is the query and u = k_i − k̄ the centred key as the head sees them, after norms, biases and RoPE;
    T is `tokens`, λ the `temperature`. Means are (..., K) and covariances (..., K, K), with
    `cross_covariance` = Cov(q, u). Leading dimensions (heads, key positions, …) broadcast, and the result
    has them. `method` "gaussian" takes z for normal, with its exact mean and variance: no eigenvalues.
    """
    check.one_of("method", method, ("exact", "gaussian"))
    tokens, temperature = check.at_least("tokens", tokens, 2), check.positive("temperature", temperature)
    joint = _joint(query_mean, key_mean, query_covariance, key_covariance, cross_covariance)
    if method == "exact":
        return inside_unit_interval(_product_form(*joint), tokens, temperature)
    mean, variance = _product_moments(*joint)
    unit = 1 / (temperature * tokens)
    return normal_inside_unit_interval(1 / tokens + unit * mean, unit**2 * variance)


def _product_moments(m_q: Array, m_u: Array, joint: Array) -> tuple[Array, Array]:
    """Mean and variance of qᵀu."""
    width = m_q.shape[-1]
    c_q, cross, c_u = joint[..., :width, :width], joint[..., :width, width:], joint[..., width:, width:]
    mean = (m_q * m_u).sum(-1) + np.trace(cross, axis1=-2, axis2=-1)
    of_products = (c_q * c_u).sum((-2, -1)) + (cross * np.swapaxes(cross, -1, -2)).sum((-2, -1))
    linear = np.einsum("...k,...kl,...l", m_u, c_q, m_u) + np.einsum("...k,...kl,...l", m_q, c_u, m_q)
    return mean, of_products + linear + 2 * np.einsum("...k,...kl,...l", m_u, cross, m_q)


def inside_unit_interval(form: QuadraticForm, tokens: int, temperature: float) -> Array:
    """P(0 ≤ 1/T + y/(λT) ≤ 1) = P(−λ ≤ y ≤ λ(T − 1))."""
    return form.interval_probability(-temperature, temperature * (tokens - 1))


def normal_inside_unit_interval(mean: Array, variance: Array) -> Array:
    """P(0 ≤ z ≤ 1) for a normal z; a point mass where the variance is zero."""
    spread = np.sqrt(2 * variance)
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = 0.5 * (erf((1 - mean) / spread) + erf(mean / spread))
    return np.asarray(np.where(spread > 0, inside, (mean >= 0) & (mean <= 1)))


class Spectrum(Protocol):
    """What the law of z needs to know of W = W_QK Σ for tokens with covariance K ⊗ Σ.

    Tokens are thought of in coordinates where they are white: x = √K Σ^½ g.
    """

    @property
    def dim(self) -> int:
        """How many white coordinates of a token matter."""

    @property
    def trace(self) -> Array:
        """tr W."""

    @property
    def scale(self) -> Array:
        """tr(W_QK Σ W_QKᵀ Σ)."""

    @property
    def trace_square(self) -> Array:
        """tr W²."""

    @property
    def size(self) -> float:
        """About the largest logit at unit position variance and temperature, of any head."""

    @property
    def shifts(self) -> bool:
        """Whether tokens have means that differ by position."""

    def form(self, process: TokenProcess) -> QuadraticForm:
        """qᵀu_i at every token, leading shape (..., T)."""

    def toward(self, query: Array, position: int = -1, /) -> Array:
        """What the other tokens are projected on: (W_Q x_q)·(W_K x_i) = toward(x_q)·x_i, for (n, dim) tokens."""

    def shift(self, query: Array, position: int = -1, /) -> Array | None:
        """What the tokens' means add to that, (n, T); None where they are zero, or one: softmax does not see it."""


@dataclass(frozen=True)
class SymmetricSpectrum:
    """A symmetric W_QK, through the eigenvalues of W, (..., d)."""

    eigenvalues: Array

    @property
    def dim(self) -> int:
        return int(self.eigenvalues.shape[-1])

    @property
    def trace(self) -> Array:
        return np.asarray(self.eigenvalues.sum(-1))

    @property
    def scale(self) -> Array:
        return np.asarray((self.eigenvalues**2).sum(-1))

    @property
    def trace_square(self) -> Array:
        return self.scale

    @property
    def size(self) -> float:
        return float(np.abs(self.eigenvalues).max(initial=0.0) * self.dim)

    def form(self, process: TokenProcess) -> QuadraticForm:
        # The 2 × 2 covariance [[k, c], [c, s]] of an eigen-direction's x_T and x_i − x̄ turns
        # w·x_T·(x_i − x̄) into two squares with weights ½ w (c ± √(k s)).
        c, root = process.query_covariance, np.sqrt(process.query_variance * process.centred_variance)
        pair = 0.5 * np.stack([c - root, c + root], -1)  # (T, 2)
        weights = self.eigenvalues[..., None, :, None] * pair[:, None, :]
        return QuadraticForm(np.sort(weights.reshape(*weights.shape[:-2], -1), axis=-1))

    def toward(self, query: Array, _position: int = -1) -> Array:
        return query * self.eigenvalues

    shifts = False

    def shift(self, _query: Array, _position: int = -1) -> None:
        return None


@dataclass(frozen=True)
class HeadSpectrum:
    """Any W_QK, through the covariances of W_Q x and W_K x at unit position variance, (..., K, K)."""

    query: Array  # W_Q Σ W_Qᵀ
    key: Array  # W_K Σ W_Kᵀ
    cross: Array  # W_Q Σ W_Kᵀ
    query_mean: Array | None = None  # W_Q m (..., 1 or T, K), of tokens with a mean m
    key_mean: Array | None = None  # W_K m, less their mean

    @property
    def dim(self) -> int:
        return 2 * int(self.query.shape[-1])

    @property
    def trace(self) -> Array:
        return np.asarray(np.trace(self.cross, axis1=-2, axis2=-1))

    @property
    def scale(self) -> Array:
        return np.asarray((self.query * self.key).sum((-2, -1)))

    @property
    def trace_square(self) -> Array:
        return np.asarray((self.cross * np.swapaxes(self.cross, -1, -2)).sum((-2, -1)))

    @property
    def size(self) -> float:
        squares = [np.trace(part, axis1=-2, axis2=-1).max(initial=0.0) for part in (self.query, self.key)]
        means = (0.0 if part is None else np.abs(part).max(initial=0.0) for part in (self.query_mean, self.key_mean))
        q, k = (np.sqrt(square) + mean for square, mean in zip(squares, means, strict=True))
        return float(q) * float(k)

    def form(self, process: TokenProcess) -> QuadraticForm:
        s, c, k = process.centred_variance, process.query_covariance, process.query_variance
        zero = np.zeros(self.query.shape[-1])
        return logit_form(
            zero,
            zero,
            k * self.query[..., None, :, :],
            s[:, None, None] * self.key[..., None, :, :],
            c[:, None, None] * self.cross[..., None, :, :],
        )

    @cached_property
    def _roots(self) -> tuple[Array, Array]:
        """(W_Q; W_K) Σ^½ up to a rotation of the white coordinates, where those come first that a logit knows most."""
        joint = np.block([[self.query, self.cross], [self.cross.T, self.key]])
        to_query, to_key = np.split(check.square_root(joint), 2)
        half = to_query.T @ to_key
        values, basis = np.linalg.eigh(half + half.T)
        basis = basis[:, np.argsort(-np.abs(values))]
        return to_query @ basis, to_key @ basis

    def _queries(self, query: Array, position: int) -> Array:
        """W_Q x (n, K)."""
        projected = query @ self._roots[0].T
        if self.query_mean is not None:
            projected = projected + self.query_mean[position if len(self.query_mean) > 1 else 0]
        return np.asarray(projected)

    def toward(self, query: Array, position: int = -1) -> Array:
        return np.asarray(self._queries(query, position) @ self._roots[1])

    @property
    def shifts(self) -> bool:
        return self.key_mean is not None and self.key_mean.shape[-2] > 1

    def shift(self, query: Array, position: int = -1) -> Array | None:
        if self.key_mean is None or not self.shifts:
            return None
        return np.asarray(self._queries(query, position) @ self.key_mean.T)


def spectrum_of(
    spectrum: Spectral, covariance: ArrayLike | None = None, mean: ArrayLike | None = None
) -> SymmetricSpectrum | HeadSpectrum:
    """Reads eigenvalues of W (..., d), or a factored W_QK with the tokens' covariance and mean (D,) or (T, D)."""
    if not isinstance(spectrum, Factored):
        if covariance is not None:
            raise LocaterError("covariance goes with a QK; eigenvalues are those of W_QK Σ already")
        if mean is not None:
            raise LocaterError("mean goes with a QK: eigenvalues do not say in which directions it is")
        return SymmetricSpectrum(check.real_eigenvalues(spectrum))
    w_q, w_k = check.finite("w_q", spectrum.w_q), check.finite("w_k", spectrum.w_k)
    if not getattr(spectrum, "square", True):
        raise LocaterError(
            "queries and keys of this W_QK are made of different states; the theory is of one kind of token"
        )
    sigma = None if covariance is None else check.covariance("covariance", covariance, w_q.shape[-1])

    def product(a: Array, b: Array) -> Array:
        return np.asarray((a if sigma is None else a @ sigma) @ np.swapaxes(b, -1, -2))

    sizes = [np.diagonal(product(w, w), axis1=-2, axis2=-1) for w in (w_q, w_k)]
    m_q = m_k = None
    if mean is not None:
        m = check.finite("mean", mean)
        if m.shape[-1:] != w_q.shape[-1:] or m.ndim > 2:
            raise LocaterError(f"mean must be ({w_q.shape[-1]},), or (tokens, {w_q.shape[-1]}), got shape {m.shape}")
        if np.abs(m).max(initial=0.0) > 1e100:
            raise LocaterError(f"mean must be at most 1e100 in size, got {np.abs(m).max():.6g}: squares overflow")
        m_q, m_k = (np.atleast_2d(m) @ np.swapaxes(w, -1, -2) for w in (w_q, w_k))
        m_k = m_k - m_k.mean(-2, keepdims=True)  # softmax does not see what all keys have
        sizes = [size + (each**2).mean(-2) for size, each in zip(sizes, (m_q, m_k), strict=True)]
    f_q, f_k = _balancing(*sizes)
    w_q, w_k = f_q[..., None] * w_q, f_k[..., None] * w_k
    if m_q is not None and m_k is not None:
        m_q, m_k = m_q * f_q[..., None, :], m_k * f_k[..., None, :]
    return HeadSpectrum(product(w_q, w_q), product(w_k, w_k), product(w_q, w_k), m_q, m_k)
