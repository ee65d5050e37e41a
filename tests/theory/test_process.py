from __future__ import annotations

import numpy as np
import pytest

from locater import LocaterError, TokenProcess


@pytest.mark.parametrize("tokens", [2, 3, 40])
def test_random_walk_has_the_closed_forms_of_s_c_and_k(tokens):
    walk = TokenProcess.random_walk(tokens)
    i, T = np.arange(1, tokens + 1), tokens
    np.testing.assert_allclose(
        walk.centred_variance, -i + i * (i - 1) / T + (T + 1) * (2 * T + 1) / (6 * T), atol=1e-12
    )
    np.testing.assert_allclose(walk.query_covariance, i - (T + 1) / 2, atol=1e-12)
    assert walk.query_variance == T


def processes():
    rng = np.random.default_rng(0)
    low_rank = rng.standard_normal((6, 2))
    return {
        "random walk": TokenProcess.random_walk(6),
        "autoregressive": TokenProcess.autoregressive(6, 0.7),
        "alternating": TokenProcess.autoregressive(6, -0.5),
        "independent": TokenProcess.independent(6),
        "constant": TokenProcess.autoregressive(6, 1.0),
        "singular": TokenProcess(position_covariance=low_rank @ low_rank.T),
    }


@pytest.mark.parametrize("name", processes())
def test_samples_have_the_covariance_that_is_asked_for(name):
    process = processes()[name]
    rng = np.random.default_rng(1)
    r = rng.standard_normal((3, 3))
    sigma = r @ r.T
    x = process.sample(200_000, covariance=sigma, seed=2)
    estimated = np.einsum("nia,njb->iajb", x, x) / len(x)
    expected = np.einsum("ij,ab->iajb", process.position_covariance, sigma)
    # an entry's standard error is at most √(2 K_ii Σ_aa K_jj Σ_bb / n)
    size = np.sqrt(np.einsum("ii,aa->ia", process.position_covariance, sigma))
    error = np.sqrt(2 / len(x)) * np.einsum("ia,jb->iajb", size, size)
    assert (np.abs(estimated - expected) <= 5 * error + 1e-9).all()


@pytest.mark.parametrize("name", processes())
def test_s_and_c_are_variances_and_covariances_of_centred_tokens(name):
    process = processes()[name]
    x = process.sample(200_000, 1, seed=3)[:, :, 0]
    centred = x - x.mean(1, keepdims=True)
    k = process.query_variance
    assert np.abs((centred**2).mean(0) - process.centred_variance).max() < 0.02 * max(k, 1)
    assert np.abs((centred * x[:, -1:]).mean(0) - process.query_covariance).max() < 0.02 * max(k, 1)


def test_a_seed_gives_the_same_sequences_in_batches_of_any_size():
    walk = TokenProcess.random_walk(5)
    whole = walk.sample(100, 3, seed=7)
    parts = np.concatenate(list(walk.sample_batches(100, 3, seed=7, batch=7)))
    np.testing.assert_array_equal(whole, parts)
    assert not np.array_equal(whole, walk.sample(100, 3, seed=8))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TokenProcess.random_walk(1), "tokens must be a whole number of at least 2, got 1"),
        (lambda: TokenProcess.random_walk(2.5), "got 2.5"),
        (lambda: TokenProcess.autoregressive(4, 1.5), "between -1 and 1, got 1.5"),
        (lambda: TokenProcess.autoregressive(4, float("nan")), "decay must be finite"),
        (lambda: TokenProcess([[1.0]]), "at least 2 tokens"),
        (lambda: TokenProcess([[1.0, 2.0], [0.0, 1.0]]), "symmetric"),
        (lambda: TokenProcess([[1.0, 2.0], [2.0, 1.0]]), "positive semidefinite, its smallest eigenvalue is -1"),
        (lambda: TokenProcess([[1.0, 2.0, 3.0]]), "square"),
        (lambda: TokenProcess([[1.0, np.inf], [np.inf, 1.0]]), "finite, got inf at index 0, 1"),
        (lambda: TokenProcess([["a", "b"], ["c", "d"]]), "real numbers"),
        (lambda: TokenProcess([[1.0], [1.0, 2.0]]), "rectangular"),
        (lambda: TokenProcess.random_walk(4).sample(0, 2), "count must be"),
        (lambda: TokenProcess.random_walk(4).sample(3), "either dim"),
        (lambda: TokenProcess.random_walk(4).sample(3, 2, covariance=np.eye(3)), "either dim"),
        (lambda: TokenProcess.random_walk(4).sample(3, covariance=-np.eye(3)), "positive semidefinite"),
    ],
)
def test_a_process_that_cannot_be_is_refused_with_the_reason(make, says):
    with pytest.raises(LocaterError, match=says):
        make()
