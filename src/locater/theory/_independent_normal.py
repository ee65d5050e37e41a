"""Softmax over independent tokens whose query's own logit is normal too: `_independent`'s integrals, one of them only.

The own logit a ~ N(m, s²) enters P(largest ≤ x) as one more factor E exp(−e^(a−x)), so that nothing is left to average
over. Expectations under a normal law and a Gumbel law on one lattice are discrete convolutions: a head takes about a
millisecond, which is what a scan of hundreds needs.
"""

from __future__ import annotations

import numpy as np

from locater.theory._checks import Array

_STEP = 0.3  # of the trapezoidal rule, as in `_independent`
_LEAST, _MOST = -4.2, 38.1  # a Gumbel variable is below or above with probability e^−66 and e^−38; whole steps
_SPREAD = 9.0  # a standard normal is beyond with probability 1e-19
_WIDEST = 200.0  # logits with a larger spread are scaled down to it: the entropy falls as 1/spread there


def own_weight_and_entropy(mean: float, variance: float, v: float, others: int) -> tuple[float, float]:
    """Expected: the own logit is N(mean, variance), the `others` are independent N(0, v)."""
    shrink = min(1.0, _WIDEST / max(np.sqrt(variance), np.sqrt(v), 1e-300))
    own, spread = shrink * np.sqrt(variance), shrink * np.sqrt(v)
    beyond = _SPREAD * (spread + own) + np.log(others) + _MOST  # attention is on itself alone, or never
    m = float(np.clip(shrink * mean, -beyond, beyond))
    low = max(m - _SPREAD * own, -_SPREAD * spread) + _LEAST  # the largest is hardly below
    high = max(m + _SPREAD * own, _SPREAD * spread + np.log(others)) + _MOST
    x = np.arange(low, high + _STEP, _STEP)
    below, density, with_logit = _of_one(x, spread)
    own_below, own_density, own_logit = _of_one(x - m, own)
    with np.errstate(divide="ignore", under="ignore"):
        logs = np.log(below)
        rest, all_others = np.exp((others - 1) * logs), np.exp(others * logs)
    weight = _STEP * (own_density @ all_others)
    logit = others * ((with_logit * rest) @ own_below) + (own_logit + m * own_density) @ all_others
    largest = others * density * rest * own_below + own_density * all_others
    # the mean of the largest, about a point near it, so that what cancels is small
    about = float(x[np.argmax(largest)])
    entropy = _STEP * (largest @ (x - about)) + about * _STEP * largest.sum() - np.euler_gamma - _STEP * logit
    return float(np.clip(weight, 0, 1)), shrink * float(np.clip(entropy, 0, np.log(others + 1)))


def _of_one(x: Array, spread: float) -> tuple[Array, Array, Array]:
    """Of one logit ω ~ N(0, spread²): E of G, g and ωg at the lattice x, G and g the Gumbel law's at x − ω."""
    if spread < 1:  # nodes of the normal law
        t = np.arange(-_SPREAD, _SPREAD + _STEP, _STEP)
        weight = np.exp(-0.5 * t**2)
        weight /= weight.sum()
        with np.errstate(over="ignore", under="ignore"):
            e = np.exp(np.minimum(spread * t[:, None] - x, 700.0))
            below = np.exp(-e)
        density = e * below
        return weight @ below, weight @ density, (weight * spread * t) @ density
    from scipy.special import ndtr

    y = np.arange(_LEAST, _MOST + _STEP / 2, _STEP)
    gumbel = _STEP * np.exp(-y - np.exp(-y))
    omega = x[0] - y[-1] + _STEP * np.arange(len(x) + len(y) - 1)  # every x − y
    normal = np.exp(-0.5 * (omega / spread) ** 2) / (spread * np.sqrt(2 * np.pi))
    below, density, with_logit = (
        np.convolve(values, gumbel, "valid") for values in (ndtr(omega / spread), normal, omega * normal)
    )
    return below, density, with_logit
