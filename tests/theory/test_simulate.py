"""Fig. 5's experiment against the paper's recipe, multiplied out, and against the exact law."""

from __future__ import annotations

import numpy as np
import pytest

from locater import LocaterError, TokenProcess, rho
from locater.theory import attention_entropy, simulate, softmax
from locater.theory.simulate import _Draws


def recipe(mean, std, *, dim, tokens, walks, matrices, sigma, seed):
    """The paper's recipe as it reads: sample B, form W_QK, sample walks, multiply out."""
    rng = np.random.default_rng(seed)
    root = np.linalg.cholesky(sigma)
    shares, entropies = [], []
    for _ in range(matrices):
        b = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
        w_qk = b @ np.diag(rng.normal(mean, std, dim)) @ b.T
        x = np.cumsum(rng.standard_normal((walks, tokens, dim)) @ root.T, axis=1)
        logits = x @ w_qk @ x.swapaxes(1, 2) / np.sqrt(dim)
        omega = logits[:, -1]
        z = (omega - omega.mean(1, keepdims=True)) / tokens + 1 / tokens
        shares.append(((z >= 0) & (z <= 1)).mean(0))
        entropies.append(attention_entropy(softmax(logits)).mean())
    return np.array(shares), np.array(entropies)


@pytest.mark.parametrize("covariance", ["isotropic", "anisotropic"])
@pytest.mark.parametrize(("mean", "std"), [(0.2, 0.05), (-0.1, 0.2), (0.0, 0.5)])
def test_the_shortcut_has_the_statistics_of_the_recipe(covariance, mean, std):
    size = {"dim": 16, "tokens": 10, "walks": 405, "matrices": 60}
    rng = np.random.default_rng(3)
    r = rng.uniform(-2.5, 2.5, (16, 16))
    sigma = np.eye(16) if covariance == "isotropic" else r.T @ r / 16
    quick = simulate([mean], [std], covariance=sigma, seed=1, **size)
    shares, entropies = recipe(mean, std, sigma=sigma, seed=2, **size)
    for a, b in ((quick.rho[0, 0], shares), (quick.entropy[0, 0][:, None], entropies[:, None])):
        # matrices are the independent units on both sides
        error = np.sqrt((a.var(0, ddof=1) + b.var(0, ddof=1)) / len(a)) + 1e-3
        assert (np.abs(a.mean(0) - b.mean(0)) < 4 * error).all()


@pytest.mark.parametrize("covariance", ["isotropic", "anisotropic"])
def test_simulated_shares_scatter_around_the_exact_law_by_their_sampling_error(covariance):
    got = simulate([-0.2, 0.1], [0.05, 0.3], dim=24, tokens=12, walks=500, matrices=8, covariance=covariance)
    exact = rho(got.eigenvalues, TokenProcess.random_walk(12), got.temperature)
    assert got.rho.shape == exact.shape == (2, 2, 8, 12)
    error = np.sqrt(exact * (1 - exact) / 500)
    assert (np.abs(got.rho - exact) < 5 * error + 0.01).all()
    usual = np.abs(got.rho - exact)[error > 0.01] / error[error > 0.01]
    assert 0.6 < np.sqrt((usual**2).mean()) < 1.4  # neither more nor less scatter than sampling has


def test_any_process_can_be_simulated():
    process = TokenProcess.autoregressive(9, 0.8)
    got = simulate([0.3], [0.1], dim=12, walks=2000, matrices=3, process=process)
    exact = rho(got.eigenvalues, process, got.temperature)
    assert np.abs(got.rho - exact).max() < 5 * np.sqrt(0.25 / 2000)


def test_a_wider_spectrum_lowers_entropy_at_a_positive_mean_and_raises_it_at_a_negative_one():
    """A2's second line has the first half only; Fig. 5's setting, Σ = I."""
    got = simulate([-0.3, 0.3], [0.0, 0.3], matrices=60)
    change = got.entropy[:, 1] - got.entropy[:, 0]  # (means, matrices), of the same walks
    mean, error = change.mean(-1), change.std(-1, ddof=1) / np.sqrt(60)
    np.testing.assert_array_less(np.abs(mean - [0.054, -0.301]), 4 * error)  # measured with 480 matrices
    assert mean[0] > 4 * error[0]
    assert mean[1] < -4 * error[1]


def test_the_spectrum_of_w_qk_is_no_proxy_for_w_under_an_anisotropic_covariance():
    """Σ = RᵀR/d has eigenvalues of mean and std 25/12 (Marchenko and Pastur): 0.3·I does not stay concentrated."""
    w = simulate([0.3], [0.0], covariance="anisotropic", walks=1, matrices=1).eigenvalues
    assert w.mean() == pytest.approx(0.3 * 25 / 12, rel=0.05)
    assert w.std() == pytest.approx(0.3 * 25 / 12, rel=0.1)


def test_seeds_decide():
    small = {"dim": 4, "tokens": 5, "walks": 20, "matrices": 2}
    a, b, c = (simulate([0.1], [0.2], seed=seed, **small) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a.rho, b.rho)
    np.testing.assert_array_equal(a.entropy, b.entropy)
    assert not np.array_equal(a.entropy, c.entropy)


def test_the_torch_path_gives_the_same_numbers_as_numpy():
    """The same code runs on "cuda": here on torch's CPU, named as a device of its own."""
    walk = TokenProcess.random_walk(7)
    for root in (None, np.diag([1.0, 2.0, 0.5])):
        draws = _Draws.sample(walk, root, 3, 30, 2, np.random.default_rng(0))
        w = 0.2 + 0.3 * draws.spread
        expected = draws.statistics(w, 2.0)
        moved = draws.on("cpu:0")
        assert type(moved.query).__module__ == "torch"
        got = moved.statistics(0.2 + 0.3 * moved.spread, 2.0)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a.numpy(), b, rtol=1e-6)  # its shares are in float32


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"means": [], "stds": [1.0]}, "must not be empty"),
        ({"means": [0.0], "stds": [-1.0]}, "stds not negative"),
        ({"means": [np.nan], "stds": [1.0]}, "means must be finite"),
        ({"means": [0.0], "stds": [1.0], "covariance": "isotropik"}, "isotropic, anisotropic"),
        ({"means": [0.0], "stds": [1.0], "covariance": np.eye(3), "dim": 4}, "4 × 4 to match"),
        ({"means": [0.0], "stds": [1.0], "tokens": 1}, "tokens must be"),
        ({"means": [0.0], "stds": [1.0], "temperature": 0.0}, "temperature"),
        ({"means": [0.0], "stds": [1.0], "walks": 0}, "walks must be"),
        ({"means": [0.0], "stds": [1.0], "dim": 2, "walks": 2, "device": "abacus"}, "device 'abacus' cannot be used"),
    ],
)
def test_bad_arguments_are_refused(arguments, says):
    with pytest.raises(LocaterError, match=says):
        simulate(**arguments)
