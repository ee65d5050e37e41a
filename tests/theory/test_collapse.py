from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import entropy as reference_entropy

from locater import LocaterError, TokenProcess, rho
from locater.theory import (
    attention_entropy,
    moments,
    normal_spectrum,
    rank_over_depth,
    rank_residual,
    regime,
    softmax,
)

matrices = arrays(np.float64, (3, 4, 5), elements=st.floats(-50, 50))


@given(matrices)
def test_attention_entropy_matches_scipy_and_lies_between_0_and_ln_t(omega):
    got = attention_entropy(softmax(omega))
    np.testing.assert_allclose(got, reference_entropy(softmax(omega), axis=-1), atol=1e-12)
    assert ((got >= -1e-12) & (got <= np.log(5) + 1e-12)).all()


def test_attention_entropy_of_one_hot_is_zero_and_of_uniform_ln_t():
    np.testing.assert_allclose(attention_entropy(np.eye(4)), 0)
    np.testing.assert_allclose(attention_entropy(np.full((2, 8), 1 / 8)), np.log(8))


@given(matrices)
def test_rank_residual_is_zero_only_for_identical_tokens_and_ignores_scale(x):
    assert (rank_residual(x) <= 1 + 1e-12).all()
    np.testing.assert_allclose(rank_residual(np.broadcast_to(x[:, :1] + 1, x.shape)), 0, atol=1e-12)
    np.testing.assert_allclose(rank_residual(3 * x), rank_residual(x), atol=1e-12)


@given(matrices)
def test_the_mean_token_is_the_best_rank_one_constant(x):
    """No other 1zᵀ is nearer, so the residual is the distance to the set, as Dong et al. define it."""
    rng = np.random.default_rng(0)
    best = np.linalg.norm(x - x.mean(1, keepdims=True), axis=(1, 2))
    for _ in range(5):
        other = x.mean(1, keepdims=True) + rng.standard_normal((3, 1, 5))
        assert (np.linalg.norm(x - other, axis=(1, 2)) >= best - 1e-9).all()


def test_without_skips_the_rank_is_lost_and_with_them_slowly():
    walk = TokenProcess.random_walk(20)
    w = normal_spectrum(0.1, 0.1, 32)
    plain, skip = rank_over_depth(w, walk, layers=8), rank_over_depth(w, walk, layers=8, skip=True)
    assert plain.residual[0] == pytest.approx(skip.residual[0])
    assert plain.residual[3] < 1e-4 * plain.residual[0]
    assert skip.residual[3] > 0.05 * skip.residual[0]
    assert plain.entropy.shape == (8,)
    assert plain.residual.shape == (9,)


def test_at_fixed_scale_a_larger_mean_slows_the_loss_of_rank_and_lowers_the_entropy():
    """Half of A2 stands (though not by its argument); the other half does not come with it."""
    walk = TokenProcess.random_walk(40)
    profiles = [
        rank_over_depth(normal_spectrum(share * 0.3, np.sqrt(1 - share**2) * 0.3, 128), walk, layers=2)
        for share in (0.0, 0.5, 1.0)
    ]
    residuals = [profile.residual[2] for profile in profiles]
    entropies = [profile.entropy[0] for profile in profiles]
    assert residuals == sorted(residuals)
    assert entropies == sorted(entropies, reverse=True)


def attention_of_the_last_query(eigenvalues, process, count, seed=0):
    """Softmax's weights in simulated sequences, (count, T), at λ = √d."""
    x = process.sample(count, len(eigenvalues), seed=seed)
    return softmax(np.einsum("btd,bd->bt", x, x[:, -1] * eigenvalues) / np.sqrt(len(eigenvalues)))


def test_beyond_r_2_softmax_of_a_walk_has_collapsed_onto_the_last_tokens():
    """Where ρ has a band in the middle of the sequence, r = tr W/λ = 3.4."""
    walk, w = TokenProcess.random_walk(40), normal_spectrum(0.3, 0.1, 128)
    band = np.flatnonzero(rho(w, walk, np.sqrt(128)) > 0.5)
    assert (band + 1).tolist() == list(range(21, 33))
    weights = attention_of_the_last_query(w, walk, 500)
    assert weights.mean(0)[band].sum() < 1e-4
    assert weights.mean(0)[-3:].sum() > 0.99
    assert attention_entropy(weights).mean() == pytest.approx(0.27, abs=0.05)  # four standard errors; ln 40 is 3.69


def test_the_threshold_of_rho_is_2_for_the_walk_and_t_for_independent_tokens():
    """E z_T = 1 at r = (T − 1)/c_T; and softmax of independent tokens is at the query itself long before."""
    tokens, d = 64, 128
    walk, independent = TokenProcess.random_walk(tokens), TokenProcess.independent(tokens)
    for process, threshold in ((walk, 2.0), (independent, float(tokens))):
        assert (tokens - 1) / process.query_covariance[-1] == pytest.approx(threshold)
        assert moments(np.full(d, threshold / d), process, 1.0).mean[-1] == pytest.approx(1)
    w = np.full(d, 8 / np.sqrt(d))  # r = 8
    assert regime(rho(w, independent, np.sqrt(d))) == "flat"
    assert regime(rho(w, walk, np.sqrt(d))) == "middle"
    assert attention_of_the_last_query(w, independent, 300)[:, -1].mean() > 0.9


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: attention_entropy([[0.5, 0.6]]), "sum to one"),
        (lambda: attention_entropy([[1.5, -0.5]]), "non-negative"),
        (lambda: rank_residual([1.0, 2.0]), r"\(..., T, d\)"),
        (lambda: rank_over_depth([0.1], TokenProcess.random_walk(4), layers=0), "layers must be"),
    ],
)
def test_bad_arguments_are_refused(call, says):
    with pytest.raises(LocaterError, match=says):
        call()
