"""Strengths of one sweep, compared by the seeds that were trained with both.

When two of them differ is said in `claims`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from locater.errors import LocaterError
from locater.lab.claims.series import Array, Sweep, read_sweep

__all__ = [
    "Noise",
    "UndecidedError",
    "comparable",
    "kappa_name",
    "noise_for",
    "paired",
    "relative",
    "seed_spread",
    "summaries",
    "told_apart",
]

Noise: TypeAlias = Mapping[str, float] | float | None
"""The relative spread between seeds, of each quantity or of all."""


class UndecidedError(Exception):
    """Why a sweep cannot tell whether a claim holds."""


def seed_spread(folder: str | Path) -> dict[str, float]:
    """How far a relative difference between two strengths varies from seed to seed, at most: `noise` for one seed."""
    sweep = comparable(read_sweep(folder))
    spreads: dict[str, float] = {}
    for name, values in summaries(sweep).items():
        ranges = []
        for weaker, stronger in pairwise(sweep.kappas):
            seeds = sorted(sweep.of(weaker).keys() & sweep.of(stronger).keys())
            if len(seeds) > 1:
                pair = np.array([[values[sweep.of(kappa)[seed]] for seed in seeds] for kappa in (weaker, stronger)])
                ranges.append(float(np.ptp(relative(pair[0], pair[1]))))
        if not ranges:
            raise LocaterError(f"{folder} has one seed only; the spread between seeds needs two or more")
        spreads[name] = max(ranges)
    return spreads


def comparable(sweep: Sweep) -> Sweep:
    """At the steps every member has recorded."""
    shared = np.all(sweep.recorded, axis=0)
    if not shared.any():
        raise LocaterError("the members of this sweep have no recorded step in common; let it go on")
    return sweep.at(shared)


def summaries(sweep: Sweep) -> dict[str, Array]:
    """One number a member of each quantity that strengths are compared by."""
    perplexity = sweep.values["perplexity"]
    return {
        "scale": sweep.values["scale"][:, -1],
        "entropy": sweep.values["entropy"][:, -1],
        "best perplexity": np.where(np.isnan(perplexity), np.inf, perplexity).min(-1),
        "last perplexity": perplexity[:, -1],
    }


def paired(sweep: Sweep, kappas: Sequence[float | None]) -> tuple[NDArray[np.int64], list[int]]:
    """Indices of members (strength, seed) for the seeds all these strengths have, and those seeds."""
    missing = [kappa_name(kappa) for kappa in kappas if kappa not in sweep.kappas]
    if missing:
        raise UndecidedError(f"not trained: κ₂ = {', '.join(missing)}")
    seeds = sorted(set.intersection(*(set(sweep.of(kappa)) for kappa in kappas)))
    if not seeds:
        raise UndecidedError("the strengths have no seed in common")
    return np.array([[sweep.of(kappa)[seed] for seed in seeds] for kappa in kappas], dtype=np.int64), seeds


def told_apart(weaker: Array, stronger: Array, noise: float | None) -> NDArray[np.int64]:
    """+1 where `stronger` (seeds, …) is higher, −1 where lower, 0 where the seeds do not tell."""
    with np.errstate(invalid="ignore"):
        difference = stronger - weaker
        mean = difference.mean(0)
        if len(difference) > 1:
            one_sign = (np.sign(difference) == np.sign(difference[0])).all(0)
            told = one_sign & (np.abs(mean) > 2 * difference.std(0, ddof=1))
        else:
            told = np.abs(mean) > (np.inf if noise is None else noise * np.abs(weaker[0]))
        return np.where(told & np.isfinite(mean), np.sign(mean), 0).astype(np.int64)


def relative(weaker: Array, stronger: Array) -> Array:
    """By how much of itself `weaker` would have to grow."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(stronger / weaker - 1)


def noise_for(noise: Noise, quantity: str) -> float | None:
    return noise.get(quantity) if isinstance(noise, Mapping) else noise


def kappa_name(kappa: float | None) -> str:
    return "none" if kappa is None else f"{kappa:g}"
