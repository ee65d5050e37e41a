"""Post-stratification: averages over samples of which one number's law is known exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from locater.theory._checks import Array
from locater.theory.quadratic import QuadraticForm

_BINS = 64


@dataclass(frozen=True)
class Strata:
    """Intervals of a quadratic form a with their exact probabilities."""

    edges: Array
    shares: Array  # one more than edges

    @classmethod
    def none(cls) -> Strata:
        return cls(np.empty(0), np.ones(1))

    @classmethod
    def of(cls, form: QuadraticForm, pilot: Array) -> Strata:
        """Edges at quantiles of `pilot`: where they are does not matter, their probabilities do."""
        bins = min(_BINS, len(pilot) // 2)
        edges = np.unique(np.quantile(pilot, np.arange(1, bins) / bins))
        if not form.variance() > 1e-24 * form.mean() ** 2 or len(edges) < bins - 1:
            return cls.none()
        weights = np.broadcast_to(form.weights, (len(edges), form.weights.shape[-1]))
        linear = None if form.linear is None else np.broadcast_to(form.linear, weights.shape)
        below = QuadraticForm(weights, linear, form.constant - edges).interval_probability(-np.inf, 0.0)
        return cls(edges, np.diff(below, prepend=0.0, append=1.0))

    def estimate(self, values: list[Array], a: list[Array]) -> tuple[Array, Array]:
        """Means and standard errors (S,) of statistics (S, N) in independent batches."""
        where = [np.searchsorted(self.edges, each) for each in a]
        sums, counts = np.zeros((len(values[0]), len(self.shares))), np.zeros(len(self.shares))
        for each, bins in zip(values, where, strict=True):
            member = np.zeros((each.shape[1], len(self.shares)))
            member[np.arange(len(member)), bins] = 1.0
            sums, counts = sums + each @ member, counts + member.sum(0)
        filled = np.flatnonzero(counts)
        nearest = filled[np.abs(np.arange(len(counts))[:, None] - filled).argmin(1)]  # for an interval that none is in
        means = sums[:, nearest] / counts[nearest]  # (S, bins)
        residual = np.stack([each.mean(1) - means @ np.bincount(bins, minlength=len(self.shares)) / len(bins)
                             for each, bins in zip(values, where, strict=True)])  # fmt: skip
        return means @ self.shares, residual.std(0, ddof=1) / np.sqrt(len(residual))
