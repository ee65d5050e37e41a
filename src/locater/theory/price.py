"""How entropy and signal of softmax attention change with trace, trace_square and scale, in closed form.

Under the three-number law the logits are normal, ω ~ N(μ u, b C + σ² u uᵀ) with μ = k·trace/λ,
σ² = k²(trace_square + scale)/λ², b = k·scale/λ². By Price's theorem the derivatives of E f(ω) are expectations again:

    ∂/∂μ = E[u·∇f],    ∂/∂σ² = ½ E[uᵀ∇²f u],    ∂/∂b = ½ E tr[C ∇²f],

and for entropy and β gradient and Hessian are polynomials in the weights p and ln p.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory.attention import REPLICATES, points_of, scalars_of, three_number_logits
from locater.theory.conditional import GivenQuery
from locater.theory.process import TokenProcess

__all__ = ["AttentionGradient", "attention_gradient"]


class AttentionGradient(NamedTuple):
    """Values (...) and derivatives (..., 3) with respect to trace, trace_square and scale; standard errors of each."""

    entropy: Array
    signal: Array
    entropy_gradient: Array
    signal_gradient: Array
    entropy_gradient_error: Array
    signal_gradient_error: Array


def attention_gradient(
    trace: ArrayLike,
    trace_square: ArrayLike,
    scale: ArrayLike,
    process: TokenProcess,
    temperature: float,
    *,
    samples: int | None = None,
    seed: int = 0,
    query: int = -1,
    causal: bool = True,
) -> AttentionGradient:
    """Entropy and signal of the three-number law and their derivatives, with the arguments of `attention_from_traces`.

    All are sampled, for independent tokens too.
    """
    given, points, seed = GivenQuery.of(process, query, causal), points_of(samples), check.at_least("seed", seed, 0)
    shape, scalars = scalars_of(given, temperature, trace, trace_square, scale)
    if not scalars:
        raise LocaterError("attention of no head")
    found = np.empty((*shape, REPLICATES, 8))
    for head, of_head in scalars.items():
        for row, logits in enumerate(three_number_logits(given, of_head, points, seed)):
            found[(*head, row)] = _derivatives(logits, given).mean(-1)
    by_scalars = found.reshape(*shape, REPLICATES, 2, 4)  # value, ∂μ, ∂σ², ∂b of both
    mu, variance, b = (by_scalars[..., i] for i in (1, 2, 3))
    unit = given.query_variance / temperature
    gradient = np.stack([unit * mu, unit**2 * variance, unit**2 * variance + unit / temperature * b], -1)
    value, mean = by_scalars[..., 0].mean(-2), gradient.mean(-3)
    error = gradient.std(-3, ddof=1) / np.sqrt(REPLICATES)
    return AttentionGradient(
        value[..., 0], value[..., 1], mean[..., 0, :], mean[..., 1, :], error[..., 0, :], error[..., 1, :]
    )


def _derivatives(logits: Array, given: GivenQuery) -> Array:
    """f, u·∇f, ½ uᵀ∇²f u and ½ tr[C∇²f] of entropy and of β, at logits (T, N): (8, N)."""
    shifted = logits - logits.max(0)
    p = np.exp(shifted)
    total = p.sum(0)
    p /= total
    return np.concatenate([_of_entropy(p, shifted - np.log(total), given), _of_signal(p, given)])


def _of_entropy(p: Array, log_p: Array, given: GivenQuery) -> Array:
    """∂H/∂ω_j = −s_j with s = p (ln p + H), and ∂²H/∂ω_j∂ω_k = −(s_j + p_j) δ_jk + s_j p_k + p_j s_k + p_j p_k."""
    entropy = -(p * log_p).sum(0)
    s = p * (log_p + entropy)
    u, c = given.regression, given.covariance.diagonal()
    along, up = u @ s, u @ p
    cross = 0.5 * (given.quadratic(p + s) - given.quadratic(p - s))  # 2 pᵀCs
    curvature = -(u**2) @ (s + p) + 2 * along * up + up**2
    spread = -c @ (s + p) + cross + given.quadratic(p)
    return np.stack([entropy, -along, 0.5 * curvature, 0.5 * spread])


def _of_signal(p: Array, given: GivenQuery) -> Array:
    """β = c·p − pᵀCp, c the diagonal of C; with y = Cp and e = c − 2y less its mean, ∂β/∂ω_j = p_j e_j."""
    u, covariance = given.regression, given.covariance
    c, y = covariance.diagonal(), covariance @ p
    twice, d = (p * y).sum(0), c[:, None] - 2 * y
    e = p * (d - (p * d).sum(0))
    up = u[:, None] * p
    sums, along = up.sum(0), u @ e
    curvature = (u**2) @ e - 2 * sums * along - 2 * (up * (covariance @ up)).sum(0)
    curvature += 4 * sums * (up * y).sum(0) - 2 * sums**2 * twice
    spread = c @ e - 2 * (e * y).sum(0) - 2 * (p * (covariance**2 @ p)).sum(0) + 4 * (p * y**2).sum(0) - 2 * twice**2
    return np.stack([c @ p - twice, along, 0.5 * curvature, 0.5 * spread])
