"""The statistics claims are judged by, on arrays whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr, ttest_1samp

from locater.lab.claims.statistics import (
    broken_line,
    mean_interval,
    minimum,
    rank_correlations,
    sign_of_difference,
    stripes,
    trend,
)


def test_the_bent_line_is_the_best_of_all_least_squares_fits():
    rng = np.random.default_rng(0)
    steps = np.arange(1, 31) * 500
    series = np.stack([rng.normal(size=30).cumsum(), np.abs(steps - 6000.0), 3.0 - 2e-4 * steps])
    bend, removed = broken_line(steps, series)

    def residual(columns, y):
        design = np.stack(columns, axis=-1)
        return ((y - design @ np.linalg.lstsq(design, y, rcond=None)[0]) ** 2).sum()

    line = [np.ones(30), steps / 15_000]
    for y, b, r in zip(series[:2], bend, removed, strict=False):
        best = min((residual([*line, np.maximum(steps - at, 0) / 15_000], y), at) for at in steps[2:-2])
        assert b == best[1]
        assert r == pytest.approx(1 - best[0] / residual(line, y), abs=1e-9)
    assert bend[1] == 6000
    assert removed[2] == 0  # a straight line leaves nothing to remove


def counted(rho, blocks, records=20, seed=0):
    """ρ as counted in the same blocks at every record: (records, 1, T)."""
    shares = (np.random.default_rng(seed).random((blocks, len(rho))) < rho).mean(0)
    return np.arange(records), np.broadcast_to(shares, (records, 1, len(rho)))


def test_sampling_and_slopes_are_no_stripes():
    smooth = 0.5 + np.linspace(-0.3, 0.2, 64) - 0.2 * np.linspace(-1, 1, 64) ** 2
    smooth[-1] = 0.99  # the query's own position does not count
    chances = []
    for seed in range(40):
        steps, rho = counted(smooth, 256, seed=seed)
        found = stripes(steps, rho, 256)
        chances.append(found.chance)
        assert found.contrast < 0.02
        np.testing.assert_allclose(found.spread, found.sampling, rtol=0.35)  # four standard errors of a χ² with 60
    # 40 uniform numbers: mean within four standard errors of ½
    assert abs(np.mean(chances) - 0.5) < 4 * np.sqrt(1 / 12 / 40)


def test_contrast_is_the_standard_deviation_of_the_stripes_whatever_the_number_of_blocks():
    bumps = 0.1 * np.sign(np.random.default_rng(1).normal(size=64))
    bumps -= bumps.mean()
    for blocks in (32, 256, 4096):
        found = [stripes(*counted(0.5 + bumps, blocks, seed=seed), blocks).contrast for seed in range(20)]
        # 3 of 63 degrees of freedom went with the parabola
        assert np.mean(found) == pytest.approx(0.1, rel=0.08)


def test_flicker_is_no_stripe():
    steps = np.arange(200)
    rho = 0.5 + 0.1 * np.random.default_rng(2).normal(size=(200, 1, 64))
    found = stripes(steps, np.clip(rho, 0, 1), 256)
    assert found.spread.mean() > 0.08
    assert found.contrast < 0.01


def test_stripes_of_different_heads_do_not_cancel():
    bumps = 0.1 * np.sign(np.random.default_rng(1).normal(size=64))
    steps, one = counted(0.5 + bumps, 4096)
    _, other = counted(0.5 - bumps, 4096, seed=1)
    single, both = stripes(steps, one, 4096), stripes(steps, np.concatenate([one, other], axis=1), 4096)
    assert both.contrast == pytest.approx(single.contrast, rel=0.05)


def test_certain_stripes_are_stripes():
    steps, rho = counted(np.tile([0.0, 1.0], 32), 256)
    found = stripes(steps, rho, 256)
    assert found.contrast == pytest.approx(0.5, rel=0.05)
    assert found.chance == 0


def test_rank_correlations_are_spearmans():
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 6, size=(5, 12)).astype(float), rng.normal(size=(5, 12))
    np.testing.assert_allclose(rank_correlations(x, y), [spearmanr(*rows).statistic for rows in zip(x, y, strict=True)])


def test_a_constant_or_infinite_series_has_no_rank_correlation():
    rising = np.arange(4.0)
    x, y = np.stack([np.ones(4), rising, rising]), np.stack([rising, [0, 1, np.nan, 3], -rising])
    np.testing.assert_array_equal(rank_correlations(x, y), [np.nan, np.nan, -1])


@pytest.mark.parametrize(
    ("stronger", "sign"),
    [
        ((1.1, 1.1, 1.15), 1),
        ((0.9, 0.85, 0.9), -1),
        ((1.1, 1.1, 1.2), 0),  # the seeds agree, but t is 4.0, below 4.3
        ((1.1, 0.9, 1.2), 0),  # they disagree
        ((1.1, 1.15), 0),  # two seeds need t above 12.7: this is 5
        ((1.1, 1.105), 1),
        ((1.1, np.nan, 1.1), 0),
        ((1.1, np.inf, 1.1), 0),
    ],
)
def test_strengths_differ_where_the_interval_over_seeds_excludes_zero(stronger, sign):
    assert sign_of_difference(np.ones(len(stronger)), np.array(stronger), None) == sign


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_an_interval_over_seeds_is_student_s(seeds):
    values = np.random.default_rng(seeds).normal(size=(seeds, 4))
    mean, half = mean_interval(values)
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose([mean - half, mean + half], [low, high])
    np.testing.assert_array_equal(mean_interval(values[:1])[1], np.inf)  # one seed says nothing of the spread


def test_a_change_is_paired_by_seed():
    weaker, change = np.array([100.0, 200.0, 400.0]), np.array([0.98, 0.981, 0.979])  # seeds differ by far more
    assert sign_of_difference(weaker, weaker * change, None) == -1


def test_one_seed_differs_by_more_than_the_noise_or_not_at_all():
    weaker, stronger = np.full((1, 3), 2.0), np.array([[2.3, 2.1, 1.7]])
    np.testing.assert_array_equal(sign_of_difference(weaker, stronger, 0.1), [1, 0, -1])
    np.testing.assert_array_equal(sign_of_difference(weaker, stronger, None), [0, 0, 0])


def test_a_trend_goes_back_where_a_material_step_does():
    jitter = np.array([0.0, 1e-4])
    values = np.array([1.0, 2.0, 1.5, 3.0])[:, None] + jitter
    found = trend(values, None)
    assert (found.steps, found.ends) == ([1, -1, 1], 1)
    assert found.goes_back(1)
    np.testing.assert_allclose(found.change, 2, rtol=1e-3)
    small = trend(np.array([1.0, 2.0, 1.9, 3.0])[:, None] + jitter, None)  # a twentieth of the whole change
    assert small.steps == [1, -1, 1]
    assert not small.goes_back(1)


def test_a_minimum_is_the_lowest_finite_mean_and_where_the_values_rise_from_it():
    values = np.array([[3.0, 3.1], [2.0, 2.1], [2.2, 1.95], [2.5, 2.7], [np.nan, 1.0]])  # (strength, seed)
    found = minimum(values, None)
    assert (found.at, found.below_first, found.rises_at) == (1, True, 3)
    assert minimum(values[:2], None).rises_at is None
