"""Softmax over independent tokens, by one-dimensional integrals.

The query's own logit is a, the N others are independent N(0, v). With Gumbel noise on every logit the largest is at
token i with probability p_i, and its law is that of ln Σe^ω plus one Gumbel variable; both make sums over tokens into
products under one integral over x = −ln s:

    φ(x) = E exp(−e^(ω−x)),   A(x) = exp(−e^(a−x)),   P(largest ≤ x) = φ^N A,
    E p_own = ∫ e^(a−x) A φ^N dx,   E Σ_others p ω = N ∫ E[ω e^(ω−x) exp(−e^(ω−x))] φ^(N−1) A dx,

and likewise for squares. Each integrand is analytic in a strip of half width π/2: the trapezoidal rule with step 0.3
has a relative error near e^(−π²/0.3).
"""

from __future__ import annotations

import numpy as np
from scipy.interpolate import RectBivariateSpline
from scipy.special import ndtr

from locater.theory._checks import Array

_STEP = 0.3
_LEAST, _MOST = -4.0, 38.0  # a Gumbel variable is below or above with probability e^−54 and e^−38
_SPREAD = 9.0  # a standard normal is beyond with probability 1e-19
MOST_SPREAD = 8.0  # of the logits, for which the grids are still short; beyond, sampling is as good


def expected(a: Array, v: Array, others: int) -> Array:
    """Own weight, entropy, its square, and Σ_others p(1 − p), expected given own logits a and variances v: (4, …).

    By a table over (a, √v), as many nodes as the range needs, and splines of fifth degree.
    """
    most = saturating(float(v.max()), others)
    a, spread = a.clip(-most, most), np.sqrt(v)
    grid_a, grid_spread = _grid(a, 0.25, -most - 2), _grid(spread, 0.1, 0.0)
    table = np.stack([_at(grid_a, float(each) ** 2, others) for each in grid_spread], -1)
    found = [RectBivariateSpline(grid_a, grid_spread, part, kx=5, ky=5).ev(a, spread) for part in table]
    return np.stack(found)


def expected_of_normal(mean: float, variance: float, v: float, others: int) -> Array:
    """The same over a normal own logit: (4,)."""
    step = min(0.25, 0.3 / np.sqrt(max(variance, 1e-300)))
    t = np.arange(-_SPREAD, _SPREAD + step, step)
    most = saturating(v, others)
    weight = np.exp(-0.5 * t**2)
    values = np.stack(_at((mean + np.sqrt(variance) * t).clip(-most, most), v, others))
    return np.asarray(values @ (weight / weight.sum()))


def saturating(v: float, others: int) -> float:
    """The own logit from which the query attends to itself alone, but for e^−38."""
    return float(_SPREAD * np.sqrt(v) + np.log(others) + _MOST)


def _grid(values: Array, step: float, least: float) -> Array:
    low, high = float(values.min()), float(values.max())
    room = max(0.0, 6 * step - (high - low)) / 2
    low = max(least, low - room)
    return np.linspace(low, max(high, low + 6 * step), max(7, int(np.ceil((high - low) / step)) + 1))


def _at(a: Array, v: float, others: int) -> tuple[Array, Array, Array, Array]:
    """What `expected` gives, for own logits a (A,) and one variance; M below is the mean logit Σ p ω."""
    v = max(v, 1e-12)  # Σ p(1 − p) is E Σ_others p ω/v by Stein's lemma
    spread = np.sqrt(v)
    # the others' largest logit is hardly below its own smallest, and the own one hardly below a
    low = max(a.min() + _LEAST, -_SPREAD * spread + _LEAST) if len(a) else 0.0
    high = max(a.max(), _SPREAD * spread + np.log(others)) + _MOST
    x = np.arange(low, high + _STEP, _STEP)
    below, density, with_logit, with_square = _of_one(x, v)
    with np.errstate(divide="ignore", under="ignore"):
        logs = np.log(below)
        power = {lost: np.exp((others - lost) * logs) if others >= lost else np.zeros_like(x) for lost in (0, 1, 2)}
        e = np.exp(np.minimum(a[:, None] - x, 300.0))  # (A, X): e^(a−x); exp of minus that is zero
        cut = np.exp(-e)
        own = e * cut
    weighted = others * with_logit * power[1]  # of the others' Σ p ω, but for A(x)
    largest = cut * (others * density * power[1]) + own * power[0]
    logit = cut * weighted + a[:, None] * own * power[0]
    pairs = others * with_square * power[1] + others * (others - 1) * with_logit**2 * power[2]
    square = cut * pairs + 2 * a[:, None] * own * weighted + (a**2)[:, None] * e * own * power[0]
    gamma = np.euler_gamma
    own_weight, of_others = _STEP * (own @ power[0]), _STEP * (cut @ weighted)
    largest_mean = _STEP * (largest @ x)
    lse = largest_mean - gamma
    lse_square = _STEP * (largest @ x**2) - 2 * gamma * lse - gamma**2 - np.pi**2 / 6
    lse_logit = _STEP * (logit @ (x - gamma))
    entropy = lse - of_others - a * own_weight
    entropy_square = lse_square - 2 * lse_logit + _STEP * square.sum(-1)
    return own_weight, entropy.clip(min=0), entropy_square.clip(min=0), of_others / v


def _of_one(x: Array, v: float) -> tuple[Array, Array, Array, Array]:
    """Of one other logit ω ~ N(0, v): E of G, g, ωg and ω²e^(ω−x)g at x, G and g the Gumbel law's at x − ω."""
    spread = np.sqrt(v)
    if spread < 1:  # the normal's nodes
        t = np.arange(-_SPREAD, _SPREAD + _STEP, _STEP)
        weight = np.exp(-0.5 * t**2)
        omega, weight = spread * t, weight / weight.sum()
        e = np.exp(omega[:, None] - x)
        below = np.exp(-e)
        density = e * below
        return (
            weight @ below, weight @ density, (weight * omega) @ density, (weight * omega**2) @ (e * density),
        )  # fmt: skip
    y = np.arange(_LEAST, _MOST + _STEP, _STEP)  # the Gumbel law's
    gumbel = np.exp(-y - np.exp(-y)) * _STEP
    omega = x - y[:, None]
    normal = np.exp(-0.5 * (omega / spread) ** 2) / (spread * np.sqrt(2 * np.pi))
    return (
        gumbel @ ndtr(omega / spread), gumbel @ normal, gumbel @ (omega * normal),
        (gumbel * np.exp(-y)) @ (omega**2 * normal),
    )  # fmt: skip
