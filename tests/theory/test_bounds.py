"""The bounds of Section 5: their right forms on every matrix, their printed forms on a counterexample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize

from locater import LocaterError, TokenProcess
from locater.theory import (
    attention_entropy,
    eigenvalue_variance,
    entropy_lower_bound,
    entropy_nu,
    rank_bound,
    scale_bound,
    softmax,
    trace_bound,
)

entries = st.floats(-10, 10, allow_nan=False, allow_subnormal=False)
sides = st.integers(1, 6)


@st.composite
def matrix_and_covariance(draw):
    d = draw(sides)
    w = draw(arrays(np.float64, (d, d), elements=entries))
    r = draw(arrays(np.float64, (d, d), elements=entries))
    return w, r @ r.T + 0.01 * np.eye(d)


@given(arrays(np.float64, sides, elements=entries))
def test_bound_5_holds_for_every_real_spectrum(w):
    assert trace_bound(w).holds()


@given(matrix_and_covariance())
def test_bound_7_holds_in_both_right_forms_for_every_matrix(pair):
    assert rank_bound(*pair, "frobenius").holds()
    assert rank_bound(*pair, "spectral").holds()


def test_printed_bound_7_fails_for_the_identity_at_both_ends():
    chain = rank_bound(np.eye(9), np.eye(9), "printed")
    first, spectral, frobenius, induced = chain.values
    assert first == pytest.approx(3)  # |tr W|/√d = 9/3
    assert spectral == pytest.approx(1)
    assert frobenius > induced  # 3 against 1
    assert not chain.holds()


def test_the_trace_maximiser_has_the_smallest_induced_one_norm_not_the_largest():
    """Section 5 argues that a larger |tr W| at fixed tr W² raises ‖W_QK‖₁; with Σ = I it does not determine it."""
    rng = np.random.default_rng(0)
    d = 128
    identity = np.eye(d) / np.sqrt(d)
    a = rng.standard_normal((d, d))
    traceless = a + a.T - np.trace(a + a.T) / d * np.eye(d)
    traceless /= np.linalg.norm(traceless)
    assert np.trace(identity @ identity) == pytest.approx(np.trace(traceless @ traceless))
    assert np.linalg.norm(identity, 1) == pytest.approx(0.0884, abs=1e-4)
    assert np.linalg.norm(traceless, 1) > 10 * np.linalg.norm(identity, 1)
    signs = np.diag(np.resize([1.0, -1.0], d)) / np.sqrt(d)  # trace 0, and no larger a norm than the maximiser's
    assert np.trace(signs) == 0
    assert np.trace(signs @ signs) == pytest.approx(np.trace(identity @ identity))
    assert np.linalg.norm(signs, 1) == pytest.approx(np.linalg.norm(identity, 1))


@given(matrix_and_covariance())
def test_bound_10_holds_in_both_right_forms_for_every_matrix(pair):
    # Σ⁻¹ is inverted numerically: its condition number may reach 1e5
    assert scale_bound(*pair, "trace").holds(1e-7)
    assert scale_bound(*pair, "spectral").holds(1e-7)


def test_printed_bound_10_fails_for_an_indefinite_and_for_an_asymmetric_matrix():
    indefinite = scale_bound(np.diag([1.0, -1.0]), np.eye(2), "printed")
    assert indefinite.values[0] == pytest.approx(1)
    assert indefinite.values[1] == 0  # ‖W‖₂ = 1 > |tr W| = 0
    asymmetric = scale_bound([[1.0, 2.0], [-2.0, 1.0]], np.eye(2), "printed")
    assert not asymmetric.holds()  # tr W² = −6 has no root


@given(arrays(np.float64, sides, elements=entries))
def test_equation_8_is_the_variance_of_a_real_spectrum(w):
    got = eigenvalue_variance(w.sum(), (w**2).sum(), len(w))
    assert got == pytest.approx(w.var(), abs=1e-10 * (1 + (w**2).sum()))


def test_equation_8_with_the_scale_overestimates_an_asymmetric_spectrum():
    w = np.array([[1.0, 5.0], [0.0, 1.0]])  # both eigenvalues 1
    assert eigenvalue_variance(np.trace(w), np.trace(w @ w), 2) == 0
    assert eigenvalue_variance(np.trace(w), np.trace(w.T @ w), 2) == 12.5


def entropy(logits):
    return float(attention_entropy(softmax(logits)))


@pytest.mark.parametrize("tokens", [2, 5, 64])
@pytest.mark.parametrize("nu", [0.1, 1.0, 4.0, 9.0])
def test_bound_9_is_attained_and_no_search_over_logits_goes_below_it(tokens, nu):
    bound = float(entropy_lower_bound(nu, tokens))
    one_up = np.full(tokens, -nu / np.sqrt(tokens * (tokens - 1)))
    one_up[0] = nu * np.sqrt((tokens - 1) / tokens)
    assert np.linalg.norm(one_up) == pytest.approx(nu)
    assert entropy(one_up) == pytest.approx(bound, abs=1e-10)
    rng = np.random.default_rng(0)
    for _ in range(6):
        start = rng.standard_normal(tokens)

        def objective(u):
            return entropy(nu * u / np.linalg.norm(u))

        found = minimize(objective, start, method="L-BFGS-B", options={"maxiter": 300})
        assert found.fun >= bound - 1e-8


@given(arrays(np.float64, st.integers(2, 40), elements=st.floats(-20, 20)))
def test_bound_9_holds_for_all_logits(logits):
    nu = np.linalg.norm(logits)
    assert entropy(logits) >= entropy_lower_bound(nu, len(logits)) - 1e-9


def test_bound_9_starts_at_ln_t_and_falls_while_the_printed_one_rises_above_it():
    nu = np.linspace(0, 30, 3001)
    right = entropy_lower_bound(nu, 64)
    assert right[0] == pytest.approx(np.log(64))
    assert (np.diff(right) < 0).all()
    assert entropy_lower_bound(4.0, 64) == pytest.approx(2.8785, abs=1e-4)
    assert entropy_lower_bound(4.0, 64, "printed") > 16 > np.log(64)


def test_mending_only_the_exponent_of_equation_9_gives_no_bound():
    nu, T = 4.0, 64
    mended = np.log(1 + T * np.exp(-nu)) + nu * np.exp(-nu) / (1 / T + np.exp(-nu))
    assert mended > entropy_lower_bound(nu, T) + 0.05  # which logits attain


@pytest.mark.parametrize("gain", [1e-4, 1e-2, 1.0])
def test_the_bound_at_the_tokens_own_nu_is_below_every_measured_entropy(gain):
    rng = np.random.default_rng(1)
    x = TokenProcess.random_walk(12).sample(1, 6, seed=0)[0]
    w = gain * rng.standard_normal((6, 6))
    attention = softmax(x @ w @ x.T / 2.0)
    assert attention_entropy(attention).min() >= entropy_lower_bound(entropy_nu(x, w, 2.0), 12) - 1e-12
    # without λ, as the paper has it, ν is another number
    assert entropy_nu(x, w, 2.0) == pytest.approx(entropy_nu(x, w, 1.0) / 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: entropy_lower_bound(-1.0, 8), "nu must not be negative"),
        (lambda: entropy_lower_bound(1.0, 1), "tokens must be"),
        (lambda: entropy_lower_bound(1.0, 8, "zhay"), "form must be one of zhai, printed"),
        (lambda: rank_bound(np.ones((2, 3)), np.eye(2)), "square matrix"),
        (lambda: rank_bound(np.eye(2), np.zeros((2, 2))), "must not be zero"),
        (lambda: scale_bound(np.eye(2), np.diag([1.0, 0.0])), "invertible"),
        (lambda: entropy_nu(np.zeros(3), np.eye(3), 1.0), r"\(T, d\)"),
        (lambda: entropy_nu(np.zeros((4, 3)), np.eye(2), 1.0), "3 × 3 to match"),
        (lambda: trace_bound([]), "non-empty"),
    ],
)
def test_bad_arguments_are_refused(call, says):
    with pytest.raises(LocaterError, match=says):
        call()


def test_bound_10_knows_nothing_of_the_size_of_the_tokens():
    for size in (1e-165, 1.0, 1e120):
        chain = scale_bound(np.eye(3), size * np.eye(3))
        assert chain.values == pytest.approx((3.0, 3.0))


def test_bound_5_is_of_one_matrix():
    with pytest.raises(LocaterError, match=r"those of one W, \(d,\), got shape \(2, 3\)"):
        trace_bound(np.ones((2, 3)))
