"""The distribution of a Gaussian quadratic form, against everything that is known about it independently."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from locater.theory import QuadraticForm
from locater.theory import quadratic as inside

# What the docstrings promise. The closed forms below are met to about 1e-14.
PROMISED = 1e-9


@pytest.mark.parametrize("n", [1, 2, 3, 10, 300])
@pytest.mark.parametrize("x", [1e-8, 1e-3, 0.5, 3.0, 40.0, 300.0, 1e4])
def test_equal_weights_give_the_chi_squared_law(n, x):
    got = QuadraticForm(np.ones(n)).interval_probability(-1.0, x)
    assert got == pytest.approx(stats.chi2.cdf(x, n), abs=PROMISED)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("noncentrality", [1e-3, 1.0, 50.0, 1e4])
@pytest.mark.parametrize("p", [1e-4, 0.1, 0.5, 0.9, 0.9999])
def test_linear_terms_give_the_noncentral_chi_squared_law(n, noncentrality, p):
    x = stats.ncx2.ppf(p, n, noncentrality)
    shift = np.zeros(n)
    shift[0] = np.sqrt(noncentrality)  # (g + b)² = g² + 2bg + b²
    got = QuadraticForm(np.ones(n), shift, noncentrality).interval_probability(-1.0, x)
    assert got == pytest.approx(stats.ncx2.cdf(x, n, noncentrality), abs=PROMISED)


@pytest.mark.parametrize("high", [1e-9, 1e-4, 0.3, 2.0, 30.0])
def test_two_products_of_normals_give_the_laplace_law(high):
    # g₁g₂ + g₃g₄ has weights ±½ twice each, and density exp(−|y|)/2
    got = QuadraticForm(np.array([-0.5, -0.5, 0.5, 0.5])).interval_probability(-0.7, high)
    assert got == pytest.approx(stats.laplace.cdf(high) - stats.laplace.cdf(-0.7), abs=PROMISED)


@pytest.mark.parametrize("high", [1e-10, 1e-4, 0.1, 2.0, 20.0])
def test_one_product_of_normals_gives_the_bessel_law_across_its_logarithmic_singularity(high):
    got = QuadraticForm(np.array([-0.5, 0.5])).interval_probability(0.0, high)
    density = mpmath.quad(lambda y: mpmath.besselk(0, y) / mpmath.pi, [0, high / 1e3, high / 10, high])
    assert got == pytest.approx(float(density), abs=PROMISED)


def test_linear_terms_alone_give_the_normal_law():
    got = QuadraticForm(np.zeros(3), np.array([0.3, 0.4, 0.0])).interval_probability(-1.0, 2.0)
    assert got == pytest.approx(stats.norm.cdf(2) - stats.norm.cdf(-1), abs=PROMISED)  # 4 (0.3² + 0.4²) = 1


def test_a_weight_that_shrinks_to_zero_leaves_the_normal_law_behind():
    expected = stats.norm.cdf(2) - stats.norm.cdf(-1)
    for weight in (1e-4, 1e-8, 1e-16, -1e-12):
        got = QuadraticForm(np.array([weight]), np.array([0.5])).interval_probability(-1.0, 2.0)
        assert got == pytest.approx(expected, abs=3 * abs(weight) + PROMISED)


@pytest.mark.parametrize(("low", "high", "expected"), [(-1.0, 2.0, 1.0), (0.0, 0.0, 1.0), (0.5, 2.0, 0.0)])
def test_a_form_that_is_zero_is_a_point_mass_in_a_closed_interval(low, high, expected):
    assert QuadraticForm(np.zeros(4)).interval_probability(low, high) == expected


def test_a_form_bounded_on_one_side_has_no_mass_beyond_its_bound():
    form = QuadraticForm(-np.ones(3), np.array([1.0, 0.0, 0.0]), 0.25)  # at most 0.25 + 1
    assert form.interval_probability(1.25, 100.0) == 0
    assert form.interval_probability(-1e6, 1.25) == pytest.approx(1, abs=PROMISED)


forms = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@given(forms, st.integers(1, 12), st.booleans(), st.floats(-8, 0), st.floats(-4, 2))
def test_the_answer_does_not_depend_on_the_path_of_integration(rng, n, shifted, spread, shift):
    """Two hyperbolas of different opening angle share no node; a wrong branch or a slow tail would show."""
    weights = rng.standard_normal((8, n)) * 10 ** rng.uniform(spread, 0, (8, n))
    linear = rng.standard_normal((8, n)) * 10 ** rng.uniform(shift, shift + 1, (8, 1)) if shifted else None
    form = QuadraticForm(weights, linear)
    unit = np.sqrt(form.variance())[:, None]
    form = QuadraticForm(weights / unit, None if linear is None else linear / unit)
    form = QuadraticForm(form.weights, form.linear, -form.mean() + rng.standard_normal(8))
    first = form.interval_probability(0.0, 0.7)
    angle = inside._ANGLE
    try:
        inside._ANGLE = 0.42 * np.pi
        second = form.interval_probability(0.0, 0.7)
    finally:
        inside._ANGLE = angle
    np.testing.assert_allclose(first, second, rtol=0, atol=2 * PROMISED)


@given(forms, st.integers(1, 6), st.booleans())
def test_probabilities_of_adjacent_intervals_add_up(rng, n, shifted):
    form = QuadraticForm(rng.standard_normal(n), rng.standard_normal(n) if shifted else None)
    a, b, c = np.sort(3 * rng.standard_normal(3))
    whole = form.interval_probability(a, c)
    parts = form.interval_probability(a, b) + form.interval_probability(b, c)
    assert whole == pytest.approx(parts, abs=3 * PROMISED)
    assert form.interval_probability(-1e9, 1e9) == pytest.approx(1, abs=PROMISED)


@given(forms, st.integers(1, 6))
def test_the_form_agrees_with_its_own_samples(rng, n):
    weights, linear = rng.standard_normal(n), rng.standard_normal(n)
    form = QuadraticForm(weights, linear, 0.3)
    g = rng.standard_normal((40_000, n))
    y = (weights * g**2 + 2 * linear * g).sum(1) + 0.3
    p = form.interval_probability(-1.0, 2.0)
    assert abs(p - ((y >= -1) & (y <= 2)).mean()) < 5 * np.sqrt(0.25 / len(y))  # 5 standard errors
    assert abs(form.mean() - y.mean()) < 5 * np.sqrt(form.variance() / len(y))


def test_an_integral_that_does_not_settle_is_an_error_not_a_number(monkeypatch):
    from locater import LocaterError

    monkeypatch.setattr(inside, "MAX_NODES", 16)
    with pytest.raises(LocaterError, match="did not settle"):
        QuadraticForm(np.array([1.0, -1.0])).interval_probability(-1.0, 1.0)


def test_no_warning_at_the_ends_of_the_range():
    with np.errstate(all="raise", under="ignore"):
        for size in (1e-12, 1e-6, 1.0, 1e6, 1e12):
            for n in (1, 2, 5, 200):
                w = np.linspace(-size, 2 * size, n)
                assert 0 <= QuadraticForm(w).interval_probability(-1.0, 63.0) <= 1
