from __future__ import annotations

import numpy as np
import pytest

from locater import LocaterError, TokenProcess, rho
from locater.theory import REGIMES, focus_limit, regime, regime_map, regime_map_at, spectrum_at

theta = (np.arange(100) + 0.5) / 100


@pytest.mark.parametrize(
    ("r", "name"), [(1.0, "late"), (1.9, "late"), (4.0, "middle"), (50.0, "middle"), (-1.0, "early"), (-4.0, "middle")]
)
def test_the_rule_reads_lemma_2s_limits_as_the_paper_does(r, name):
    assert regime(focus_limit(theta, r)) == name


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (np.full(40, 0.6), "flat"),
        (np.full(40, 0.05), "vanishing"),
        (np.zeros(40), "vanishing"),
        (np.linspace(1.0, 0.6, 40), "flat"),
        (np.linspace(1.0, 0.2, 40), "early"),
        ([1.0, 0.0], "early"),
        ([0.0, 1.0], "late"),
        ([0.0, 1.0, 0.0], "middle"),
        ([1.0, 0.0, 1.0], "flat"),
    ],
)
def test_the_rule_as_stated(values, name):
    assert regime(values) == name


def test_one_token_out_of_line_does_not_change_the_word():
    values = np.full(40, 0.5)
    values[-1] = 0.0  # independent tokens: only the query itself differs
    assert regime(values) == "flat"


def test_a_batch_gives_an_array_of_words():
    names = regime(np.stack([focus_limit(theta, r) for r in (1.0, 4.0, -1.0)]))
    assert names.tolist() == ["late", "middle", "early"]


def test_the_map_has_all_regimes_where_lemma_2_puts_them():
    names = regime_map([-50, 0, 50], [0.001, 0.1, 300.0])
    assert names.tolist() == [
        ["early", "middle", "vanishing"],
        ["flat", "flat", "vanishing"],
        ["late", "middle", "vanishing"],
    ]
    assert set(names.ravel()) == set(REGIMES)


def test_the_map_at_finite_size_uses_the_exact_law_and_knows_the_bound_on_xi():
    walk = TokenProcess.random_walk(40)
    names = regime_map_at([-20, 0, 10], [1e-4, 0.1, 0.5, 1e5], dim=128, process=walk)
    assert names[0].tolist() == [""] * 4  # no 128 real eigenvalues have ξ = −20
    assert names[2].tolist() == ["flat", "late", "middle", "vanishing"]  # η = 1e-4: below r = 2/(T − 1)
    for j, eta in enumerate((1e-4, 0.1, 0.5, 1e5)):
        assert names[1, j] == regime(rho(spectrum_at(0.0, eta, 128), walk, 1.0))


def test_a_single_eigenvalue_has_a_regime_at_xi_plus_and_minus_one_only():
    walk, etas = TokenProcess.random_walk(12), [0.01, 1.0, 30.0]
    names = regime_map_at([-1, -0.5, 0, 0.999, 1], etas, dim=1, process=walk)
    assert names[1:4].tolist() == [[""] * 3] * 3
    for row, sign in ((0, -1), (4, 1)):
        assert names[row].tolist() == [regime(rho([sign * eta], walk, 1.0)) for eta in etas]


@pytest.mark.parametrize("dim", [1, 3, 7, 11])
def test_equal_eigenvalues_have_the_largest_xi_up_to_rounding(dim):
    for w in (0.1, 0.3, -1.7):
        spectrum = np.full(dim, w)
        eta = float(np.sqrt((spectrum**2).sum()))
        np.testing.assert_allclose(spectrum_at(float(spectrum.sum() / eta), eta, dim), spectrum, rtol=1e-5)


@pytest.mark.parametrize(
    ("xi", "eta", "dim"), [(3.0, 0.2, 64), (-8.0, 5.0, 64), (0.0, 1.0, 7), (1.0, 2.0, 1), (-1.0, 2.0, 1)]
)
def test_spectrum_at_has_the_trace_and_scale_asked_for(xi, eta, dim):
    w = spectrum_at(xi, eta, dim)
    assert w.shape == (dim,)
    assert w.sum() == pytest.approx(xi * eta, abs=1e-12)
    assert (w**2).sum() == pytest.approx(eta**2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: regime([0.5]), "at least 2 tokens"),
        (lambda: regime([0.5, 1.5]), "probabilities"),
        (lambda: regime([0.5, np.nan]), "finite"),
        (lambda: spectrum_at(9.0, 1.0, 64), r"within ±√dim = ±8, the bound \(5\), got 9"),
        (lambda: spectrum_at(np.nan, 1.0, 64), "got nan"),
        (lambda: spectrum_at(0.5, 1.0, 1), "1 or −1 for a single eigenvalue, got 0.5"),
        (lambda: regime_map([1.0], [0.0]), "eta must be positive"),
    ],
)
def test_bad_arguments_are_refused(call, says):
    with pytest.raises(LocaterError, match=says):
        call()
