"""Softmax of a Gaussian query and Gaussian keys: agrees with brute force, and with the law of K ⊗ Σ tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from locater import QK, LocaterError, TokenProcess
from locater.theory import attention, attention_from_gaussian, attention_regime


def made_up(seed=0, width=5, keys=7, heads=()):
    """Means and covariances of a query and keys that depend on it, all positions different."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(*heads, width, width)) / np.sqrt(width)
    s_q = root @ np.swapaxes(root, -1, -2)
    slope = rng.normal(size=(*heads, keys, width, width)) * rng.uniform(0, 0.8, size=(*heads, keys, 1, 1))
    noise = rng.normal(size=(*heads, keys, width, width)) / np.sqrt(width)
    rest = noise @ np.swapaxes(noise, -1, -2)
    s_k = np.swapaxes(slope, -1, -2) @ s_q[..., None, :, :] @ slope + rest
    mean_q, mean_k = rng.normal(size=(*heads, width)), rng.normal(size=(*heads, keys, width))
    return (mean_q, mean_k, s_q, s_k, s_q[..., None, :, :] @ slope), (slope, rest)


def brute_force(given, slope, rest, temperature, count=100_000):
    """Every key drawn: entropies and weights (keys, count)."""
    mean_q, mean_k, s_q, _, _ = given
    rng = np.random.default_rng(99)
    q = rng.multivariate_normal(mean_q, s_q, size=count)
    logits = []
    for m, b, r in zip(mean_k, slope, rest, strict=True):
        key = m + (q - mean_q) @ b + rng.multivariate_normal(np.zeros(len(m)), r, size=count)
        logits.append((q * key).sum(1) / temperature)
    weights = np.exp(logits - np.max(logits, 0))
    weights /= weights.sum(0)
    return -(weights * np.log(np.maximum(weights, 1e-300))).sum(0), weights


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_it_agrees_with_every_key_drawn(temperature):
    given, (slope, rest) = made_up()
    law = attention_from_gaussian(*given, temperature=temperature)
    entropy, weights = brute_force(given, slope, rest, temperature)
    count = len(entropy)
    # five standard errors of the two estimates together
    assert abs(law.entropy - entropy.mean()) < 5 * np.hypot(law.entropy_error, entropy.std() / np.sqrt(count))
    errors = np.hypot(law.weights_error, weights.std(1) / np.sqrt(count))
    assert (np.abs(law.weights - weights.mean(1)) < 5 * errors).all()
    largest = weights.max(0)
    error = np.hypot(law.largest_weight_error, largest.std() / np.sqrt(count))
    assert abs(law.largest_weight - largest.mean()) < 5 * error
    assert law.entropy_std == pytest.approx(entropy.std(), rel=0.03)  # of 16,384 samples: 1 / √32,768 is 0.6%
    assert law.weights.sum() == pytest.approx(1)
    assert law.alpha is law.signal is law.signal_error is None
    assert (law.tokens, law.query, law.process) == (7, 6, "general")
    assert attention_regime(law).name


def test_for_independent_tokens_of_one_covariance_it_is_the_law_of_k_and_sigma():
    rng = np.random.default_rng(3)
    tokens, width, dim = 9, 6, 12
    root = rng.normal(size=(dim, dim)) / np.sqrt(dim)
    sigma = root @ root.T
    w_q, w_k = rng.normal(size=(2, width, dim))
    qk = QK(torch.from_numpy(w_q), torch.from_numpy(w_k))
    expected = attention(qk, TokenProcess.independent(tokens), 3.0, covariance=sigma, samples=512)
    cross = np.zeros((tokens, width, width))
    cross[-1] = w_q @ sigma @ w_k.T  # the query's own key is of the same token
    s_k = np.broadcast_to(w_k @ sigma @ w_k.T, cross.shape)
    zeros = np.zeros((tokens, width))
    found = attention_from_gaussian(zeros[0], zeros, w_q @ sigma @ w_q.T, s_k, cross, temperature=3.0)
    assert abs(found.entropy - expected.entropy) < 5 * np.hypot(found.entropy_error, expected.entropy_error)
    error = np.hypot(found.weights_error, expected.weights_error)
    assert (np.abs(found.weights - expected.weights) < 5 * error).all()


def test_a_query_and_keys_that_do_not_vary_have_the_softmax_of_their_means():
    rng = np.random.default_rng(4)
    q, k, none = rng.normal(size=4), rng.normal(size=(5, 4)), np.zeros((5, 4, 4))
    law = attention_from_gaussian(q, k, none[0], none, none, temperature=2.0, samples=32)
    weights = np.exp(k @ q / 2)
    np.testing.assert_allclose(law.weights, weights / weights.sum(), rtol=1e-12)
    assert law.entropy_error == pytest.approx(0, abs=1e-12)


def test_heads_broadcast_and_each_is_what_it_is_alone():
    given, _ = made_up(seed=5, heads=(2, 3))
    shared = (given[0], given[1], given[2], given[3] + 20 * np.eye(5), given[4])  # room for any query's share
    keys = (shared[1][:, :1], shared[3][:, :1])  # one key head for three query heads
    law = attention_from_gaussian(shared[0], keys[0], shared[2], keys[1], shared[4], temperature=2.0, samples=512)
    assert law.weights.shape == (2, 3, 7)
    assert law.entropy.shape == law.entropy_error.shape == (2, 3)
    one = [shared[0][1, 2], keys[0][1, 0], shared[2][1, 2], keys[1][1, 0], shared[4][1, 2]]
    alone = attention_from_gaussian(*one, temperature=2.0, samples=512)
    np.testing.assert_allclose(law[1, 2].weights, alone.weights, rtol=1e-12)


def test_the_place_of_the_query_is_named_and_changes_nothing():
    given, _ = made_up()
    first, last = (attention_from_gaussian(*given, temperature=2.0, samples=64, query=at) for at in (2, -1))
    assert (first.query, last.query) == (2, 6)
    assert (first.weights == last.weights).all()


def changed(index, value):
    given, _ = made_up()
    return [value if at == index else each for at, each in enumerate(given)]


@pytest.mark.parametrize(
    ("given", "more", "told"),
    [
        (changed(0, np.zeros(4)), {}, "of one width K, got"),
        (changed(1, np.zeros(5)), {}, "of one width K, got"),
        (changed(1, np.full((7, 5), np.nan)), {}, "key_mean must be finite"),
        (changed(2, np.eye(4)), {}, "query_covariance must end in 5 × 5"),
        (changed(2, np.diag([1.0, 1, 1, 1, -1])), {}, "query_covariance must be positive semidefinite"),
        (changed(2, np.diag([1.0, 1, 1, 1, 0])), {}, "the joint covariance of the query and key 0"),
        (changed(3, np.zeros((6, 5, 5))), {}, "key_covariance must end in 7 × 5 × 5"),
        (changed(3, np.zeros((7, 5, 5))), {}, "the joint covariance of the query and key 0"),
        (changed(3, np.triu(np.ones((7, 5, 5)))), {}, "key_covariance must be symmetric"),
        (changed(4, np.zeros((2, 7, 5, 5))), {"temperature": 0.0}, "temperature must be one positive number"),
        (changed(4, np.zeros((2, 7, 5, 5))), {"samples": 0}, "samples must be a whole number"),
        (changed(4, np.zeros((2, 7, 5, 5))), {"query": 7}, "query must be a position from -7 to 6"),
    ],
)
def test_what_is_no_law_is_refused_in_one_sentence(given, more, told):
    with pytest.raises(LocaterError, match=told) as refused:
        attention_from_gaussian(*given, **{"temperature": 1.0, **more})
    assert "\n" not in str(refused.value)


def test_heads_that_do_not_broadcast_are_refused():
    given, _ = made_up(heads=(2,))
    with pytest.raises(LocaterError, match="do not broadcast"):
        attention_from_gaussian(np.zeros((3, 5)), *given[1:], temperature=1.0)
