"""Softmax attention of one query whose law, and that of its keys, is Gaussian with any means and covariances.

The query q and each key k_i are jointly normal, and given q the keys are independent of each other. In white
coordinates g of the query, q = m + L g with L Lᵀ = Cov(q), and

    k_i = m_i + D_iᵀ g + noise_i,    D_i = L⁺ Cov(q, k_i),    Cov(noise_i) = R_i = Cov(k_i) − D_iᵀ D_i.

So given q the logits are independent normals, with the mean q·(m_i + D_iᵀ g)/λ and the variance qᵀ R_i q/λ². Both are
quadratic forms of v = (1, g): of all keys they are one matrix product with the distinct entries of v vᵀ.

This is the law of a head of a real model, after norms, biases and RoPE (`measure.predict`); keys that depend on each
other given q change next to nothing there.

Legend: T keys, K head width, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory._strata import Strata
from locater.theory.attention import REPLICATES, AttentionLaw, over_heads, points_of, softmax_statistics
from locater.theory.sampling import sobol_normals

__all__ = ["attention_from_gaussian"]

_NEGATIVE = 1e-6  # of a covariance's mean variance: what rounding may leave below zero


def attention_from_gaussian(
    query_mean: ArrayLike,
    key_mean: ArrayLike,
    query_covariance: ArrayLike,
    key_covariance: ArrayLike,
    cross_covariance: ArrayLike,
    *,
    temperature: float,
    query: int = -1,
    samples: int | None = None,
    seed: int = 0,
) -> AttentionLaw:
    """What softmax attention does for a Gaussian query and Gaussian keys that are independent given it.

    Leading dimensions are heads, and broadcast.

    Args:
        query_mean: E q (..., K).
        key_mean: E k_i of each of the T keys that the query attends to, (..., T, K).
        query_covariance: Cov(q) (..., K, K).
        key_covariance: Cov(k_i) (..., T, K, K).
        cross_covariance: Cov(q, k_i) = E (q − E q)(k_i − E k_i)ᵀ (..., T, K, K).
        temperature: λ, commonly √K.
        query: The query's own position among the keys, which the result names; it changes no number.
        samples: How many are drawn: 16,384, rounded up to 32 times a power of two.
        seed: What they are drawn from.
    """
    temperature, points = check.positive("temperature", temperature), points_of(samples)
    parts, lead = _parts(query_mean, key_mean, query_covariance, key_covariance, cross_covariance)
    keys = parts[1].shape[-2]
    position, seed = check.position("query", query, keys), check.at_least("seed", seed, 0)

    def one(head: tuple[int, ...]) -> AttentionLaw:
        forms = _forms(temperature, *(part[head] for part in parts))
        if not max(np.abs(form).max() for form in forms) <= 1e200:
            raise LocaterError("the logits of these means and covariances overflow: take a larger temperature")
        estimate, error = Strata.none().estimate(
            [softmax_statistics(logits) for logits in _logits(*forms, points, seed)], [np.zeros(points)] * REPLICATES
        )
        return _law(estimate, error, position)

    return over_heads(lead, one)


def _parts(
    query_mean: ArrayLike, key_mean: ArrayLike, query_covariance: ArrayLike, key_covariance: ArrayLike, cross: ArrayLike
) -> tuple[tuple[Array, ...], tuple[int, ...]]:
    """The five with all their leading dimensions, and those."""
    m_q, m_k = check.finite("query_mean", query_mean), check.finite("key_mean", key_mean)
    width = m_q.shape[-1] if m_q.ndim else 0
    if width == 0 or m_k.ndim < 2 or m_k.shape[-1] != width or m_k.shape[-2] == 0:
        raise LocaterError(
            f"query_mean must be (..., K) and key_mean (..., T, K) of one width K, got {m_q.shape} and {m_k.shape}"
        )
    keys = m_k.shape[-2]
    made, ends = [m_q, m_k], [(width,), (keys, width)]
    for name, value, end in (
        ("query_covariance", query_covariance, (width, width)),
        ("key_covariance", key_covariance, (keys, width, width)),
        ("cross_covariance", cross, (keys, width, width)),
    ):
        array = check.finite(name, value)
        if np.abs(array).max(initial=0.0) > 1e150:
            raise LocaterError(f"{name} must be at most 1e150 in size: squares overflow")
        if array.shape[-len(end) :] != end:
            raise LocaterError(f"{name} must end in {' × '.join(map(str, end))}, got shape {array.shape}")
        made.append(array if name == "cross_covariance" else check.symmetrised(name, array))
        ends.append(end)
    leads = [array.shape[: array.ndim - len(end)] for array, end in zip(made, ends, strict=True)]
    try:
        lead = np.broadcast_shapes(*leads)
    except ValueError as error:
        raise LocaterError(f"means and covariances have leading shapes that do not broadcast: {leads}") from error
    return tuple(np.broadcast_to(array, lead + end) for array, end in zip(made, ends, strict=True)), lead


def _forms(temperature: float, m_q: Array, m_k: Array, s_q: Array, s_k: Array, cross: Array) -> tuple[Array, Array]:
    """The logits' means and variances given g as forms of v = (1, g): (T, K + 1, K + 1) each."""
    width = len(m_q)
    values, vectors = np.linalg.eigh(s_q)
    if values[0] < -_NEGATIVE * max(values.sum(), 0.0):
        raise LocaterError(
            f"query_covariance must be positive semidefinite, its smallest eigenvalue is {values[0]:.6g}"
        )
    values, vectors = values[::-1], vectors[:, ::-1]  # what varies most at the first Sobol coordinates
    there = values > 1e-15 * max(values[0], 0.0)
    root = np.sqrt(np.where(there, values, 0.0))
    inverse = np.divide(1.0, root, out=np.zeros(width), where=there)
    d = inverse[:, None] * (vectors.T @ cross)  # (T, K, K)
    rest = s_k - np.swapaxes(d, -1, -2) @ d
    _check_joint(s_k, rest, cross, vectors[:, ~there])
    to_query = np.concatenate([m_q[:, None], vectors * root], 1) / temperature  # q/λ = to_query v
    to_key = np.concatenate([m_k[:, :, None], np.swapaxes(d, -1, -2)], 2)  # E k_i given g = to_key_i v
    return to_query.T @ to_key, to_query.T @ rest @ to_query


def _check_joint(s_k: Array, rest: Array, cross: Array, null: Array) -> None:
    """Whether each key's joint covariance with the query is one."""
    size = np.trace(s_k, axis1=-2, axis2=-1)
    allowed = _NEGATIVE * np.maximum(size, 0.0) + 1e-300
    outside = np.abs(null.T @ cross).max((-2, -1), initial=0.0) > np.sqrt(_NEGATIVE) * np.abs(cross).max(initial=0.0)
    try:
        np.linalg.cholesky(rest + allowed[:, None, None] * np.eye(rest.shape[-1]))
        negative = np.zeros(len(rest), bool)
    except np.linalg.LinAlgError:
        least = np.linalg.eigvalsh(rest)[:, 0]
        negative = least < -allowed
    if (wrong := outside | negative).any():
        raise LocaterError(
            f"the joint covariance of the query and key {int(wrong.argmax())} must be positive semidefinite: "
            "what Cov(q, k) explains is more than the key varies, or along what the query does not"
        )


def _logits(mean: Array, variance: Array, points: int, seed: int) -> Iterator[Array]:
    """Logits (T, N), a replicate at a time."""
    rng, width, keys = np.random.default_rng(seed), mean.shape[-1] - 1, len(mean)
    rows, columns = np.triu_indices(width + 1)
    folded = np.concatenate([mean, variance])  # (2T, K + 1, K + 1)
    folded = (folded + np.swapaxes(folded, -1, -2)).reshape(2 * keys, -1)[:, rows * (width + 1) + columns]
    folded /= np.where(rows == columns, 2, 1)
    for _ in range(REPLICATES):
        normals = sobol_normals(width + keys, points, rng)
        v = np.concatenate([np.ones((1, points)), normals[:width]])
        centre, square = np.split(folded @ (v[rows] * v[columns]), 2)  # (T, N) each
        yield centre + np.sqrt(np.maximum(square, 0.0)) * normals[width:]


def _law(mean: Array, error: Array, query: int) -> AttentionLaw:
    """From the means and errors of `softmax_statistics`."""
    keys = len(mean) - 3
    entropy, square, largest = mean[keys:]
    return AttentionLaw(
        weights=mean[:keys],
        entropy=np.asarray(entropy),
        entropy_std=np.asarray(np.sqrt(max(0.0, square - entropy**2))),
        largest_weight=np.asarray(largest),
        alpha=None,
        signal=None,
        weights_error=error[:keys],
        entropy_error=np.asarray(error[keys]),
        largest_weight_error=np.asarray(error[keys + 2]),
        signal_error=None,
        tokens=keys,
        query=query,
        process="general",
    )
