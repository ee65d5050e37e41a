"""The exact distribution of a quadratic form in Gaussian variables.

Every signal propagation probability in this package is the probability that such a form lies in
an interval, so this file is where "exact" is earned.

    y = Σ_j ( a_j g_j² + 2 b_j g_j ) + c,        g_j independent standard normals

has the cumulant generating function

    K(s) = c s + Σ_j [ −½ log w_j + 2 b_j² s² / w_j ],        w_j = 1 − 2 a_j s,

analytic off the real rays s ≥ 1/(2 max a) and s ≤ 1/(2 min a), and for x off the atoms of y

    P(y > x) = 1/(2πi) ∫ exp(K(s) − s x) ds / s

along any path from −i∞ to +i∞ that crosses the real axis between 0 and the right-hand ray;
crossing between the left-hand ray and 0 gives −P(y < x) instead.

Method. The path crosses at the minimum of K(s) − s x − log|s|, which keeps its distance from the
pole and from the rays, and then opens as a hyperbola with asymptotes at 67.5° to the real axis,
towards the side where exp(−s x) decays:

    s(τ) = p + A (±cos ψ (cosh τ − 1) + i sin ψ sinh τ).

On it nothing oscillates for long, and |s| grows like e^τ, so that even the slow algebraic tail
|s|^(−n/2) of a form with n = 1 or 2 variables falls exponentially in τ. The trapezoidal rule
therefore converges geometrically in the number of nodes, for every number of variables and every
ratio of x to the scale of y.

Error control. The nodes are doubled until two successive sums differ by less than TOLERANCE and
by less than 1e-6 of the sum itself, after a doubling that changed it by less than 1e-2: since each
doubling squares the relative error, the returned sum is better than that, and sums that agree by
chance on the way do not pass. A form that has not settled after MAX_NODES raises an error; none is
returned unsettled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from locater.errors import LocaterError

__all__ = ["QuadraticForm"]

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]

TOLERANCE = 1e-9
MAX_NODES = 8192
_FIRST_NODES = 4
_ANGLE = 3 * np.pi / 8  # ψ; a Gaussian factor exp(2 b² s²) decays only beyond 45°
_CUTOFF = np.log(1e-14)  # where the integrand is dropped
_TAU_MAX = 90.0  # the slowest tail, e^(−τ/2) of a single variable, is at 3e-20 there
_FAR = 200.0  # standard deviations; by Chernoff's bound at s = 1/(4 max a) less than e^(−70) lies beyond
_NEGLIGIBLE = 1e-14  # of the largest weight: a smaller one is a rounding error of an exact zero
_CHUNK = 1 << 14  # weights worked on at once: their complex factors at a dozen nodes stay in cache


@dataclass(frozen=True)
class QuadraticForm:
    """y = Σ_j (weights_j g_j² + 2 linear_j g_j) + constant, for independent standard normal g.

    `weights` is (..., n). `linear` (..., n) and `constant` (...) default to zero. Leading
    dimensions are independent forms.
    """

    weights: Array
    linear: Array | None = None
    constant: Array | float = 0.0

    def mean(self) -> Array:
        return np.asarray(self.weights.sum(-1) + self.constant)

    def variance(self) -> Array:
        variance = 2 * (self.weights**2).sum(-1)
        if self.linear is not None:
            variance = variance + 4 * (self.linear**2).sum(-1)
        return np.asarray(variance)

    def interval_probability(self, low: float, high: float) -> Array:
        """P(low ≤ y ≤ high), to an absolute error of 1e-9."""
        shape, n = self.weights.shape[:-1], self.weights.shape[-1]
        a = self.weights.reshape(-1, n).T
        b2 = None if self.linear is None else np.broadcast_to(self.linear**2, self.weights.shape).reshape(-1, n).T
        c = np.broadcast_to(np.asarray(self.constant, dtype=np.float64), shape).reshape(-1)
        rows = max(1, _CHUNK // max(1, n))
        inside = np.empty(len(c))
        for start in range(0, len(c), rows):
            part = slice(start, start + rows)
            inside[part] = _interval(a[:, part], None if b2 is None else b2[:, part], low - c[part], high - c[part])
        return inside.reshape(shape)


def _interval(a: Array, b2: Array | None, low: Array, high: Array) -> Array:
    """P(low ≤ y ≤ high) for forms (n, rows) without a constant; the ends may differ by row."""
    a = np.where(np.abs(a) > _NEGLIGIBLE * np.abs(a).max(0, initial=0.0), a, 0.0)
    spread = np.sqrt(2 * (a**2).sum(0) + (0.0 if b2 is None else 4 * b2.sum(0)))
    inside = ((low <= 0) & (high >= 0)).astype(np.float64)  # where y is a constant, this is all
    rows = np.flatnonzero(spread > 0)
    if len(rows) == 0:
        return inside
    unit = spread[rows]  # so that every number below is of order one
    a = a[:, rows] / unit
    b2 = None if b2 is None else b2[:, rows] / unit**2
    used = (a != 0).any(1) if b2 is None else ((a != 0) | (b2 != 0)).any(1)
    a, b2 = a[used], None if b2 is None else b2[used]
    inside[rows] = np.clip(_below(a, b2, high[rows] / unit) - _below(a, b2, low[rows] / unit), 0.0, 1.0)
    return inside


def _below(a: Array, b2: Array | None, x: Array) -> Array:
    """P(y < x) for forms of unit variance, from the tail that does not hold the mean."""
    upper = x >= a.sum(0)
    side = np.where(upper, 1.0, -1.0)
    a, x = a * side, x * side  # mirrored, so that every row asks for P(y > x) with x above the mean
    # A form without positive weights or free linear terms ends at the top of its completed squares.
    endless = (a > 0).any(0)
    top = np.zeros_like(x)
    if b2 is not None:
        endless |= ((a == 0) & (b2 > 0)).any(0)
        top = -np.where(a == 0, 0.0, b2 / np.where(a == 0, 1.0, a)).sum(0)
    rows = np.flatnonzero((endless | (x < top)) & (x < a.sum(0) + _FAR))
    tail = np.zeros_like(x)
    if len(rows):
        tail[rows] = _upper_tail(a[:, rows], None if b2 is None else b2[:, rows], x[rows])
    return np.where(upper, 1 - tail, tail)


def _upper_tail(a: Array, b2: Array | None, x: Array) -> Array:
    """P(y > x) for rows with mean ≤ x, by the hyperbola of the module's docstring."""
    path = _Contour.through(a, b2, x)
    tail = np.zeros(len(x))
    live = np.arange(len(x))
    nodes = _FIRST_NODES
    total = path.half_sum(nodes, odd_only=False)
    change = np.full(len(x), np.inf)
    while nodes < MAX_NODES:
        nodes *= 2
        before, refined = change, 0.5 * total + path.half_sum(nodes, odd_only=True)
        change, size = np.abs(refined - total), np.abs(refined) + 0.1 * TOLERANCE
        done = (change < TOLERANCE) & (change < 1e-6 * size) & (before < 1e-2 * size)
        tail[live[done]] = refined[done]
        if done.all():
            return tail
        path, live = path.rows(np.flatnonzero(~done)), live[~done]
        total, change = refined[~done], change[~done]
    raise LocaterError(
        f"the exact law did not settle within {MAX_NODES} nodes for {len(live)} of {len(x)} forms; "
        "their weights span too many orders of magnitude: use the gaussian method for them"
    )


@dataclass(frozen=True)
class _Contour:
    """The hyperbolas of a batch of rows; see the module's docstring."""

    a: Array  # (n, rows): the variables first, so that products over them run along memory
    b2: Array | None  # (n, rows), squares of the linear terms
    x: Array  # (rows,)
    crossing: Array  # p, where the path meets the real axis
    scale: Array  # A
    opening: Array  # +1 to the right, −1 to the left
    end: Array  # the τ beyond which the integrand is below the cutoff

    @classmethod
    def through(cls, a: Array, b2: Array | None, x: Array) -> _Contour:
        """The path for P(y > x), from its crossing outwards."""
        p, curvature = _crossing(a, b2, x)
        path = cls(a, b2, x, p, 2 / np.sqrt(curvature), np.where(x >= 0, 1.0, -1.0), np.zeros_like(x))
        return path._ended_where_monotone() if b2 is None else path._opened_to_the_lower_side()

    def rows(self, chosen: NDArray[np.intp]) -> _Contour:
        b2 = None if self.b2 is None else self.b2[:, chosen]
        vectors = (self.x, self.crossing, self.scale, self.opening, self.end)
        return _Contour(self.a[:, chosen], b2, *(vector[chosen] for vector in vectors))

    def points(self, tau: Array) -> tuple[Complex, Complex]:
        """s and ds/dτ at τ (nodes, rows)."""
        cos, sin = np.cos(_ANGLE) * self.opening, np.sin(_ANGLE)
        cosh, sinh = np.cosh(tau), np.sinh(tau)
        s = self.crossing + self.scale * (cos * (cosh - 1) + 1j * sin * sinh)
        return s, self.scale * (cos * sinh + 1j * sin * cosh)

    def half_sum(self, nodes: int, *, odd_only: bool) -> Array:
        """The trapezoidal sum over τ ≥ 0; the lower half of the path is its conjugate."""
        k = np.arange(1, nodes, 2) if odd_only else np.arange(nodes + 1)
        step = self.end / nodes
        s, ds = self.points(k[:, None] * step)
        value = (np.exp(self._cumulant(s) - s * self.x) * ds / s).imag
        if not odd_only:
            value[0] *= 0.5
        return np.asarray(step / np.pi * value.sum(0))

    def log_modulus(self, tau: Array) -> Array:
        """log |exp(K(s) − s x) (ds/dτ) / s| at τ (nodes, rows)."""
        s, ds = self.points(tau)
        w2 = (1 - 2 * self.a[:, None] * s.real) ** 2 + (2 * self.a[:, None] * s.imag) ** 2
        with np.errstate(over="ignore"):  # an infinite product is as negligible as it looks
            value = -0.25 * np.log(_grouped_product(w2, group=8)).sum(0)
        value += np.log(np.abs(ds / s)) - s.real * self.x
        if self.b2 is not None:
            value += self._shift(s).real
        return np.asarray(value)

    def _cumulant(self, s: Complex) -> Complex:
        """K(s) without the constant, at s (nodes, rows)."""
        w = 1 - (2 * self.a)[:, None] * s
        # Each log w_j is on its principal branch, as s never meets a ray. Products are cheaper than
        # logs, and the log of a product is the sum of the logs while the angles cannot add up to π
        # (and the squared modulus does not overflow).
        extreme = np.stack([1 - 2 * self.a.max(0) * s, 1 - 2 * self.a.min(0) * s])
        widest = max(float(np.abs(np.angle(extreme)).max()), 0.1)
        largest = max(float(np.log10(np.abs(extreme)).max()), 1.0)
        half = len(w) // 2
        if len(w) % 2 == 0 and (self.a[:half] * self.a[: half - 1 : -1] <= 0).all():
            w = w[:half] * w[: half - 1 : -1]  # weights of opposite sign turn w in opposite directions
        product = _grouped_product(w, group=int(min(16, 3.14 / widest, 70 / largest)))
        log_modulus = 0.5 * np.log(product.real**2 + product.imag**2).sum(0)
        k = -0.5 * (log_modulus + 1j * np.arctan2(product.imag, product.real).sum(0))
        return np.asarray(k if self.b2 is None else k + self._shift(s))

    def _shift(self, s: Complex) -> Complex:
        """The part of K(s) due to the linear terms."""
        assert self.b2 is not None
        return np.asarray(2 * s**2 * (self.b2[:, None] / (1 - (2 * self.a)[:, None] * s)).sum(0))

    def _ended_where_monotone(self) -> _Contour:
        """Ends the path, at most 6% late, where the integrand has fallen below the cutoff."""
        low, high = np.full_like(self.x, 0.1), np.full_like(self.x, _TAU_MAX)
        for _ in range(7):
            middle = np.sqrt(low * high)
            negligible = self.log_modulus(middle[None])[0] < _CUTOFF
            low, high = np.where(negligible, low, middle), np.where(negligible, middle, high)
        return replace(self, end=high)

    def _opened_to_the_lower_side(self) -> _Contour:
        """Opens and ends the path where linear terms may make the decaying side change with |s|.

        Each side is followed up to the first τ at which the integrand is negligible (beyond it the
        path may turn any way it likes); the side whose highest point is lower wins.
        """
        tau = np.geomspace(0.2, _TAU_MAX, 48)[:, None] * np.ones_like(self.x)
        highest, ends = [], []
        for side in (1.0, -1.0):
            height = replace(self, opening=np.full_like(self.x, side)).log_modulus(tau)
            first = np.where((height < _CUTOFF).any(0), (height < _CUTOFF).argmax(0), len(tau) - 1)
            before = np.arange(len(tau))[:, None] <= first
            highest.append(np.where(before, height, -np.inf).max(0))
            ends.append(tau[first, np.arange(len(first))])
        right = (highest[0] < highest[1]) | ((highest[0] == highest[1]) & (ends[0] < ends[1]))
        return replace(self, opening=np.where(right, 1.0, -1.0), end=np.where(right, *ends))


def _grouped_product(factors: NDArray[Any], group: int) -> NDArray[Any]:
    """Products of `group` factors each along the first axis."""
    size = -(-len(factors) // max(1, group))
    product = factors[:size].copy()
    for start in range(size, len(factors), size):
        block = factors[start : start + size]
        product[: len(block)] *= block
    return product


def _crossing(a: Array, b2: Array | None, x: Array) -> tuple[Array, Array]:
    """The minimum of f(s) = K(s) − s x − log s on 0 < s < 1/(2 max a), and f″ there.

    f is strictly convex with barriers at both ends: Newton's method, with a bisection where it
    would leave the interval.
    """
    top = a.max(0)
    end = np.where(top > 0, 0.5 / np.where(top > 0, top, 1.0), np.inf)
    s = np.minimum(1.0, 0.5 * end)
    low, high = np.zeros_like(s), end
    for _ in range(100):
        w = 1 - 2 * a * s
        slope = (a / w).sum(0) - x - 1 / s
        curvature = (2 * (a / w) ** 2).sum(0) + 1 / s**2
        if b2 is not None:
            slope += (4 * b2 * s * (1 - a * s) / w**2).sum(0)
            curvature += (4 * b2 / w**3).sum(0)
        low, high = np.where(slope < 0, s, low), np.where(slope > 0, s, high)
        step = -slope / curvature
        if np.all(np.abs(step) * np.sqrt(curvature) < 0.05):
            break
        new = s + step
        s = np.where((new > low) & (new < high), new, np.where(np.isinf(high), 4 * s, 0.5 * (low + high)))
    return s, curvature
