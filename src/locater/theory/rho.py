"""Signal propagation probability: how likely token i is on the slope of the paper's piecewise linear softmax.

ρ_i = P(0 ≤ z_i ≤ 1), z_i = ⟨γ^i, ω⟩ + γ₀^i = 1/T + (x_i − x̄)ᵀ W_QKᵀ x_T / (λT)        (Definition 1)

Softmax itself can look elsewhere: docs/idea.md.

Letters as in the paper: w eigenvalues of W = W_QK Σ, θ = i/T, ξ = tr W/√tr W², η = √tr W²/λ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erf

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory.law import Spectral, Spectrum, inside_unit_interval, normal_inside_unit_interval, spectrum_of
from locater.theory.process import TokenProcess

__all__ = [
    "Moments",
    "focus_limit",
    "gaussian_rho",
    "moments",
    "normal_spectrum",
    "rho",
    "rho_curve",
    "rho_curve_slope",
]

METHODS = ("exact", "gaussian", "asymptotic", "printed", "montecarlo")


class Moments(NamedTuple):
    """Mean and variance of z_i, (..., T) each."""

    mean: Array
    variance: Array


def rho(
    spectrum: Spectral,
    process: TokenProcess,
    temperature: float,
    method: str = "exact",
    *,
    samples: int = 100_000,
    seed: int = 0,
    covariance: ArrayLike | None = None,
) -> Array:
    """ρ_i for every token of `process`, the last one being the query: (..., tokens).

    ρ_i is the probability that token i is on the slope of the paper's piecewise linear softmax, 0 ≤ z_i ≤ 1; softmax
    itself can look elsewhere.

    Args:
        spectrum: The eigenvalues of W = W_QK Σ of a symmetric W_QK, (..., d), or a `QK`, symmetric or not. Leading
            dimensions are heads.
        process: How tokens depend on each other.
        temperature: λ, commonly √d.
        method: How ρ is computed.

            - `exact`: the distribution of z_i by inverting its characteristic function: no Gaussian or large-T
              approximation. Absolute error at most 1e-6, for any number of eigenvalues (one included), any sign, any
              scale, any T: the quadrature's nodes are doubled until two sums differ by less than 1e-9, and a form that
              does not settle raises an error instead (see `locater.theory.quadratic`).
            - `gaussian`: a normal law with the exact finite-T moments
            - `asymptotic`: Eq. (6) with the right variance: large T and d, the random walk only
            - `printed`: Eq. (6) as printed in the paper, whose variance is wrong
            - `montecarlo`: the share of simulated sequences; standard error √(ρ(1−ρ)/samples)
        covariance: Σ of the features, with a `QK`; the identity if not given.
        samples: How many sequences `montecarlo` simulates.
        seed: What it draws them from.
    """
    check.one_of("method", method, METHODS)
    temperature = check.positive("temperature", temperature)
    law = spectrum_of(spectrum, covariance)
    if method == "exact":
        return inside_unit_interval(law.form(process), process.tokens, temperature)
    if method == "gaussian":
        return gaussian_rho(law.trace, law.scale, law.trace_square, process, temperature)
    if method == "montecarlo":
        from locater.theory.simulate import rho_by_walks

        return rho_by_walks(law, process, temperature, samples=samples, seed=seed)
    return normal_inside_unit_interval(*_large_t_moments(law, process, temperature, method))


def moments(
    spectrum: Spectral,
    process: TokenProcess,
    temperature: float,
    form: str = "exact",
    *,
    covariance: ArrayLike | None = None,
) -> Moments:
    """Mean and variance of z_i (Lemma 1), with the arguments of `rho`. The forms:

    - `exact`: at every T, for every process and asymmetric W_QK: μ_i = 1/T + c_i tr W/(λT),
      v_i = [s_i k tr(W_QK Σ W_QKᵀ Σ) + c_i² tr W²]/(λT)²
    - `asymptotic`: T → ∞ for the random walk: (θ − ½) tr W/λ and, for symmetric W_QK, (2θ² − 2θ + 7/12) tr W²/λ²
    - `printed`: Lemma 1 as printed: variance (2θ² + 7/12) tr W²/λ², W_QK replaced by its symmetric part
    """
    check.one_of("form", form, ("exact", "asymptotic", "printed"))
    temperature = check.positive("temperature", temperature)
    law = spectrum_of(spectrum, covariance)
    if form == "exact":
        return _exact_moments(law, process, temperature)
    return _large_t_moments(law, process, temperature, form)


def gaussian_rho(
    trace: ArrayLike, scale: ArrayLike, trace_square: ArrayLike, process: TokenProcess, temperature: float
) -> Array:
    """ρ of a normal law with the exact moments, from tr W, tr(W_QK Σ W_QKᵀ Σ) and tr W² (...): (..., tokens)."""
    t, p, q = (np.asarray(value, dtype=np.float64) for value in (trace, scale, trace_square))
    return normal_inside_unit_interval(*_moments_of(t, p, q, process, temperature))


def _exact_moments(law: Spectrum, process: TokenProcess, temperature: float) -> Moments:
    return _moments_of(law.trace, law.scale, law.trace_square, process, temperature)


def _moments_of(trace: Array, scale: Array, trace_square: Array, process: TokenProcess, temperature: float) -> Moments:
    s, c, k = process.centred_variance, process.query_covariance, process.query_variance
    unit = 1 / (temperature * process.tokens)
    mean = 1 / process.tokens + c * trace[..., None] * unit
    variance = (s * k * scale[..., None] + c**2 * trace_square[..., None]) * unit**2
    return Moments(mean, variance)


def _large_t_moments(law: Spectrum, process: TokenProcess, temperature: float, form: str) -> Moments:
    if process.kind != "random walk":
        raise LocaterError(f"form {form!r} is the random walk's; use exact or gaussian for {process!r}")
    theta = np.arange(1, process.tokens + 1) / process.tokens
    mean = (theta - 0.5) * law.trace[..., None] / temperature
    if form == "printed":
        # of the symmetric part: tr((W + Wᵀ)²)/4, with Wᵀ taken with respect to Σ
        square = 0.5 * (law.scale + law.trace_square)
        variance = (2 * theta**2 + 7 / 12) * square[..., None]
    else:
        # s_i k/T² → θ² − θ + ⅓ and c_i²/T² → (θ − ½)²
        variance = (theta**2 - theta + 1 / 3) * law.scale[..., None] + (theta - 0.5) ** 2 * law.trace_square[..., None]
    return Moments(mean, variance / temperature**2)


def rho_curve(theta: ArrayLike, xi: ArrayLike, eta: ArrayLike, form: str = "asymptotic") -> Array:
    """ρ(θ) of Eq. (6) for the random walk at large T and d; the arguments broadcast.

    form "asymptotic" has the right variance factor 2θ² − 2θ + 7/12, "printed" the paper's 2θ² + 7/12.
    """
    theta, xi, eta = _curve_arguments(theta, xi, eta)
    root = np.sqrt(_twice_variance(theta, form))
    u = (theta - 0.5) * xi
    return np.asarray(0.5 * (erf(u / root) - erf((u - 1 / eta) / root)))


def rho_curve_slope(theta: ArrayLike, xi: ArrayLike, eta: ArrayLike, form: str = "asymptotic") -> Array:
    """ρ′(θ) of `rho_curve`.

    With D = 2 · variance factor, d/dθ (u/√D) = numerator/D^{3/2}; the numerators are ξ/6 and ξ/6 + (4θ − 2)/η
    for the right variance, ξ(2θ + 7/6) and ξ(2θ + 7/6) + 4θ/η for the printed one.
    """
    theta, xi, eta = _curve_arguments(theta, xi, eta)
    d = _twice_variance(theta, form)
    u = (theta - 0.5) * xi
    v = u - 1 / eta
    if form == "asymptotic":
        of_u, of_v = xi / 6, xi / 6 + (4 * theta - 2) / eta
    else:
        of_u, of_v = xi * (2 * theta + 7 / 6), xi * (2 * theta + 7 / 6) + 4 * theta / eta
    return np.asarray((of_u * np.exp(-(u**2) / d) - of_v * np.exp(-(v**2) / d)) / (np.sqrt(np.pi) * d**1.5))


def _twice_variance(theta: Array, form: str) -> Array:
    check.one_of("form", form, ("asymptotic", "printed"))
    return 4 * theta**2 + 7 / 6 - (4 * theta if form == "asymptotic" else 0.0)


def _curve_arguments(theta: ArrayLike, xi: ArrayLike, eta: ArrayLike) -> tuple[Array, Array, Array]:
    theta, xi, eta = check.finite("theta", theta), check.finite("xi", xi), check.finite("eta", eta)
    if (theta < 0).any() or (theta > 1).any():
        raise LocaterError(f"theta must be within 0 and 1, got {theta.min()} to {theta.max()}")
    if (eta <= 0).any():
        raise LocaterError(f"eta must be positive, got {eta.min()}")
    try:
        np.broadcast_shapes(theta.shape, xi.shape, eta.shape)
    except ValueError as error:
        raise LocaterError(
            f"theta, xi and eta must broadcast, got shapes {theta.shape}, {xi.shape}, {eta.shape}"
        ) from error
    return theta, xi, eta


def focus_limit(theta: ArrayLike, r: float) -> Array:
    """Lemma 2, limits 1 and 2 as they really are: ρ(θ) as ξ → ±∞, η → 0 with ξη → r, sign(ξ) = sign(r).

    One strictly between θ = ½ and θ = ½ + 1/r, zero outside; ½ at θ = ½ (not 1, as printed). At
    θ = ½ + 1/r, where that is a position, the limit depends on how ξη approaches r: NaN. Both
    variances give the same limit. r = 0 stands for ξ → +∞.
    """
    theta = check.finite("theta", theta)
    r = float(check.finite("r", r))
    distance = (theta - 0.5) * (1.0 if r >= 0 else -1.0)
    edge = np.inf if r == 0 else 1 / abs(r)
    limit = ((distance > 0) & (distance < edge)).astype(np.float64)
    limit = np.where(distance == 0, 0.5, limit)
    return np.asarray(np.where(np.isclose(distance, edge, rtol=1e-12, atol=0), np.nan, limit))


def normal_spectrum(mean: float, std: float, dim: int) -> Array:
    """`dim` eigenvalues that stand for a normal distribution: its mid-quantiles at (k − ½)/dim."""
    from scipy.special import ndtri

    mean, std = float(check.finite("mean", mean)), float(check.finite("std", std))
    if std < 0:
        raise LocaterError(f"std must not be negative, got {std}")
    dim = check.at_least("dim", dim, 1)
    return np.asarray(mean + std * ndtri((np.arange(dim) + 0.5) / dim))
