"""What claims are judged by: signs of differences, trends, minima, ranks, bends, stripes. Functions of arrays only."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Array",
    "broken_line",
    "mean_interval",
    "minimum",
    "phases",
    "rank_correlations",
    "relative_change",
    "sign_of_difference",
    "stripes",
    "trend",
]

Array: TypeAlias = NDArray[np.float64]

CONFIDENCE = 0.95  # of an interval over seeds
MATERIAL = 0.1  # of the whole change: a smaller step back does not break a trend
PHASES_REMOVE = 0.75  # of a straight line's squared residuals, by breaking it
PHASES_STAY = 1.25  # factor by which a bend may move when only a part of training is seen


# ---------------------------------------------------------------------- strengths, compared by seed


def mean_interval(values: Array) -> tuple[Array, Array]:
    """The mean of values (seeds, …) over seeds and half the width of its 95% interval, Student's: infinite for one."""
    from scipy.stats import t

    seeds = len(values)
    with np.errstate(invalid="ignore"):
        mean = np.asarray(values.mean(0))
        if seeds == 1:
            return mean, np.full_like(mean, np.inf)
        return mean, t.ppf((1 + CONFIDENCE) / 2, seeds - 1) * values.std(0, ddof=1) / np.sqrt(seeds)


def sign_of_difference(weaker: Array, stronger: Array, noise: float | None) -> NDArray[np.int64]:
    """+1 where `stronger` (seeds, …) is higher, −1 where lower, 0 where the seeds leave it open.

    Several seeds: the interval of their relative changes, paired by seed, excludes 0. A single one: its relative change
    exceeds `noise`; None is not known, and leaves everything open.
    """
    mean, half = mean_interval(relative_change(weaker, stronger))
    if len(weaker) == 1 and noise is not None:
        half = np.full_like(half, noise)
    return np.where(np.isfinite(mean) & (np.abs(mean) > half), np.sign(mean), 0).astype(np.int64)


def relative_change(weaker: Array, stronger: Array) -> Array:
    """Of quantities that are positive."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(stronger / weaker - 1)


class Trend(NamedTuple):
    """Of values along strengths, the weakest first."""

    means: Array  # (strengths,) over seeds
    steps: list[int]  # sign of the difference between neighbours
    material: NDArray[np.bool_]  # which of these are a tenth of the whole change, or more
    ends: int  # sign of the difference between the first and the last
    change: Array  # (seeds,) from the first to the last, relative

    def goes_back(self, sign: int) -> bool:
        """Whether a material step is against `sign`."""
        return any(step == -sign and large for step, large in zip(self.steps, self.material, strict=True))


def trend(values: Array, noise: float | None) -> Trend:
    """Of values (strengths, seeds)."""
    means, ends = values.mean(1), (values[0], values[-1])
    with np.errstate(invalid="ignore"):
        material = np.abs(np.diff(means)) > MATERIAL * np.abs(means[-1] - means[0])
    steps = [int(sign_of_difference(a, b, noise)) for a, b in pairwise(values)]
    return Trend(means, steps, material, int(sign_of_difference(*ends, noise)), relative_change(*ends))


class Minimum(NamedTuple):
    means: Array  # (strengths,) over seeds
    at: int  # index of the lowest of these
    below_first: bool  # whether it differs from the first
    rises_at: int | None  # the first index after it that differs from it


def minimum(values: Array, noise: float | None) -> Minimum:
    """Of values (strengths, seeds)."""
    means = values.mean(1)
    low = int(np.where(np.isfinite(means), means, np.inf).argmin())
    higher = (k for k in range(low + 1, len(values)) if sign_of_difference(values[low], values[k], noise) > 0)
    return Minimum(means, low, bool(sign_of_difference(values[0], values[low], noise) < 0), next(higher, None))


def rank_correlations(x: Array, y: Array) -> Array:
    """Spearman's, row by row; NaN for a row that is constant or not finite."""
    from scipy.stats import rankdata

    def correlation(a: Array, b: Array) -> float:
        if not (np.isfinite(a).all() and np.isfinite(b).all()) or np.ptp(a) == 0 or np.ptp(b) == 0:
            return np.nan
        return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])

    return np.array([correlation(a, b) for a, b in zip(x, y, strict=True)])


# ---------------------------------------------------------------------- phases of training


class Phases(NamedTuple):
    share: float  # of the series that have two
    bend: float  # the median step of their bends
    bend_first_half: float  # likewise, seen in the first half of training only
    bend_later: float  # and without the first tenth
    removed: float  # the median share of a straight line's squared residuals that a bend removes


def phases(steps: NDArray[Any], series: Array, near: float) -> Phases:
    """Two phases are a line with one bend near a step, in series (M, N), wherever training is seen from and up to.

    That it stays is what counts. A curve without a time of its own, such as a power law, also follows a bent line far
    better than a straight one; but its bend moves with the beginning and the end of what is seen.
    """
    bend, removed = broken_line(steps, series)
    two = (removed >= PHASES_REMOVE) & (bend >= near / 2) & (bend <= 2 * near)
    seen = [bend]
    for part in (steps <= steps[-1] / 2, steps >= steps[-1] / 10):
        there, _ = broken_line(steps[part], series[:, part])
        two &= np.maximum(bend / there, there / bend) <= PHASES_STAY
        seen.append(there)
    return Phases(float(two.mean()), *(float(np.median(each)) for each in (*seen, removed)))


def broken_line(steps: NDArray[Any], series: Array) -> tuple[Array, Array]:
    """Least squares with a line that bends once, for each row of `series` (M, N).

    Gives the step of the bend, which may lie between records, and the share of the straight line's squared residuals
    that it removes.
    """
    t = np.asarray(steps, dtype=float) / float(steps[-1])
    records = np.arange(len(t))
    bends = np.interp(np.linspace(1, len(t) - 2, 10 * (len(t) - 3) + 1), records, t)  # ten a record, none at the ends
    line = np.broadcast_to(np.stack([np.ones_like(t), t], axis=-1), (len(bends), len(t), 2))
    bent = np.concatenate([line, np.maximum(t - bends[:, None], 0)[..., None]], axis=-1)  # (bends, N, 3)
    y = series - series.mean(-1, keepdims=True)
    whole = (y**2).sum(-1)  # (M,)
    straight = whole - ((y @ np.linalg.qr(line[0])[0]) ** 2).sum(-1)
    broken = whole - ((y @ np.linalg.qr(bent)[0]) ** 2).sum(-1)  # (bends, M)
    best = broken.argmin(0)
    floor = 1e-12 * whole  # below it, rounding; a straight line has nothing to remove
    left = np.maximum(broken.min(0), 0) / np.where(straight > floor, straight, 1)
    return bends[best] * float(steps[-1]), np.where(straight > floor, 1 - left, 0.0)


# ---------------------------------------------------------------------- stripes of ρ


class Stripes(NamedTuple):
    """How far ρ over positions is from a smooth profile, and how far sampling alone would put it."""

    spread: Array  # (N,) standard deviation over positions, at each record
    sampling: Array  # (N,) the one expected of a smooth profile, from the number of blocks
    contrast: float  # of the profile that lasts: √(spread² − sampling²) of the mean over the second half
    chance: float  # of such a contrast without stripes


def stripes(steps: NDArray[Any], rho: Array, blocks: int) -> Stripes:
    """The stripes of Fig. 7 in ρ (records, heads, T), each record counted in the same `blocks` blocks.

    From each profile over positions the best parabola is taken away: a slope or a bulge, which any spectrum gives, is
    no stripe. The query's own position is left out: a token meets itself there, whatever the weights. What remains is
    ρ's `spread`. Counting in n blocks makes one of √(ρ(1−ρ)/(n−1)), `sampling`, out of nothing; and as the blocks are
    the same at every record, chance draws stripes that last as well. So lasting is no evidence, only a spread beyond
    sampling is: `contrast` is that of the mean profile over the second half of training (flicker averages out), less
    sampling (which does not). Heads are averaged after squaring, so that stripes of different heads do not cancel.
    """
    from scipy.stats import chi2

    free = rho[..., :-1]  # (N, heads, T − 1)
    x = np.linspace(-1, 1, free.shape[-1])
    q = np.linalg.qr(np.stack([np.ones_like(x), x, x**2], axis=-1))[0]
    rest = free - free @ q @ q.T
    freedom = max(1, len(x) - 3)
    noise = (free * (1 - free)).mean((1, 2)) / max(1, blocks - 1)  # (N,)
    late = steps >= steps[-1] / 2
    lasting, by_chance = float((rest[late].mean(0) ** 2).sum(-1).mean() / freedom), float(noise[late].mean())
    certain = np.inf if lasting > 1e-12 else 1.0  # where each ρ is 0 or 1, sampling has no part; 1e-12 is rounding
    excess = lasting / by_chance if by_chance > 0 else certain  # 1 if there are no stripes
    together = freedom * rho.shape[1]
    return Stripes(
        spread=np.sqrt((rest**2).sum(-1).mean(-1) / freedom),
        sampling=np.sqrt(noise),
        contrast=float(np.sqrt(np.maximum(0.0, lasting - by_chance))),
        chance=float(chi2.sf(excess * together, together)),
    )
