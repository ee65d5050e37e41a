"""One attention layer with given weights on Gaussian tokens: the law of its output."""

from __future__ import annotations

import numpy as np
import pytest

from locater import LocaterError, TokenProcess
from locater.theory import AttentionLayer

T, D = 8, 6


def processes():
    root = np.random.default_rng(7).normal(size=(T, T))
    return {
        "any": TokenProcess(root @ root.T / T),
        "walk": TokenProcess.random_walk(T),
        "autoregressive": TokenProcess.autoregressive(T, 0.8),
        "independent": TokenProcess.independent(T),
    }


def layer(heads, causal=True, seed=0):
    """Asymmetric W_QK, values and outputs of heads narrower than the tokens where there are several."""
    rng, width = np.random.default_rng(seed), D if heads == 1 else 2
    w_q, w_k, w_v, w_o = rng.normal(size=(4, heads, width, D))
    return AttentionLayer(0.8 * w_q, 0.8 * w_k, w_v, np.swapaxes(w_o, -1, -2), causal=causal)


def anisotropic(seed=1):
    root = 0.5 * np.random.default_rng(seed).normal(size=(D, D))
    return root @ root.T


def means(kind, seed=2):
    if kind == "zero":
        return np.zeros((T, D))
    one = 0.7 * np.random.default_rng(seed).normal(size=(T, D))
    return np.tile(one[0], (T, 1)) if kind == "common" else one


SETTINGS = [
    (process, heads, mean) for process in processes() for heads, mean in
    ((1, "zero"), (1, "by position"), (3, "common"), (3, "by position"))
]  # fmt: skip


@pytest.mark.parametrize(("process", "heads", "mean"), SETTINGS)
def test_the_mean_output_of_one_layer_is_that_of_sequences_drawn_whole(process, heads, mean):
    """16 settings, 10⁵ sequences each: E o, and E o yᵀ, which is not 0 without means either."""
    tokens, one, sigma, m = processes()[process], layer(heads), anisotropic(), means(mean)
    law = one.law(tokens, covariance=sigma, mean=m)
    query = tokens.tokens - 1
    drawn = [(one.outputs(y + m)[:, query], y[:, query]) for y in tokens.sample_batches(100_000, covariance=sigma)]
    o, y = (np.concatenate(part) for part in zip(*drawn, strict=True))
    for predicted, error, values in (
        (law.mean, law.mean_error, o),
        (law.cross, law.cross_error, o[:, :, None] * y[:, None]),
    ):
        z = (predicted - values.mean(0)) / np.hypot(error, values.std(0) / np.sqrt(len(o)))
        assert np.abs(z).max() < 5  # standard errors of both, over at most 42 numbers
    if mean != "zero":  # that it could have been wrong: 20 times what it may be off by
        assert np.abs(law.mean).max() > 20 * law.mean_error.max()


@pytest.mark.parametrize("causal", [True, False])
def test_given_the_query_the_output_turns_by_alpha_and_beta(causal):
    """The other tokens drawn given one query, in the middle, by conditioning the whole sequence."""
    tokens, one, sigma, m = processes()["any"], layer(2, causal), anisotropic(), means("by position")
    query, state = 4, np.random.default_rng(5).normal(size=D)
    predicted, error = one.given_query(state, tokens, covariance=sigma, mean=m, query=query)
    k = tokens.position_covariance
    u, c = k[:, query] / k[query, query], k - np.outer(k[:, query], k[query]) / k[query, query]
    y = TokenProcess(c).sample(40_000, covariance=sigma, seed=3) + np.outer(u, state - m[query])
    o = one.outputs(y + m)[:, query]
    assert (np.abs(predicted - o.mean(0)) < 5 * np.hypot(error, o.std(0) / np.sqrt(len(o)))).all()


def test_without_queries_both_closures_are_exact():
    """Attention is uniform then, the output linear in the tokens: A K Aᵀ, and normal."""
    one, tokens = layer(1), processes()["autoregressive"]
    flat = AttentionLayer(0 * one.w_q, one.w_k, one.w_v, one.w_o)
    closed = flat.closure(tokens, covariance=anisotropic(), samples=40_000)
    average = np.tri(T) / np.arange(1, T + 1)[:, None]
    expected = average @ tokens.position_covariance @ average.T
    ratio = closed.position_covariance / expected
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=0.05)  # the smallest variance of 40,000 samples is good to 1%
    assert closed.separable_error < 0.02
    assert abs(closed.excess_kurtosis) < 0.1
    several = layer(3).closure(processes()["any"], covariance=anisotropic(), mean=means("by position"), samples=40_000)
    assert several.separable_error > 0.1  # heads turn tokens that differ by position in ways of their own


def drawn_outputs(one, tokens, sigma, m, count=100_000):
    return np.concatenate([one.outputs(y + m) for y in tokens.sample_batches(count, covariance=sigma)])


@pytest.mark.parametrize(("process", "heads", "mean"), SETTINGS)
def test_the_covariance_of_two_outputs_is_that_of_sequences_drawn_whole(process, heads, mean):
    """16 settings, 10⁵ sequences each; one query with itself, two neighbours, two at a distance."""
    tokens, one, sigma, m = processes()[process], layer(heads), anisotropic(), means(mean)
    o = drawn_outputs(one, tokens, sigma, m)
    o -= o.mean(0)
    for i, j in ((T - 1, T - 1), (T - 1, T - 2), (2, T - 1)):
        predicted, error = one.output_covariance(tokens, (i, j), covariance=sigma, mean=m)
        products = o[:, i, :, None] * o[:, j, None]
        z = (predicted - products.mean(0)) / np.hypot(error, products.std(0) / np.sqrt(len(o)))
        assert np.abs(z).max() < 5  # standard errors of both, over 36 numbers
        if i == j:  # that it could have been wrong
            assert np.abs(predicted).max() > 20 * error.max()


def test_queries_that_see_later_tokens_too_obey_the_same_law():
    tokens, one, sigma, m = processes()["any"], layer(3, causal=False), anisotropic(), means("by position")
    o = drawn_outputs(one, tokens, sigma, m)
    o -= o.mean(0)
    predicted, error = one.output_covariance(tokens, (1, 5), covariance=sigma, mean=m)
    products = o[:, 1, :, None] * o[:, 5, None]
    assert (np.abs(predicted - products.mean(0)) < 5 * np.hypot(error, products.std(0) / np.sqrt(len(o)))).all()


def test_without_queries_the_covariance_is_that_of_averages_exactly():
    """Uniform attention is linear in the tokens: nothing is left to sample but the two tokens at the queries."""
    one, tokens, sigma = layer(2), processes()["any"], anisotropic()
    flat = AttentionLayer(0 * one.w_q, one.w_k, one.w_v, one.w_o)
    average = np.tri(T) / np.arange(1, T + 1)[:, None]
    k = average @ tokens.position_covariance @ average.T
    through = sum(w_o @ w_v for w_o, w_v in zip(one.w_o, one.w_v, strict=True))
    for i, j in ((7, 7), (3, 6)):
        found, error = flat.output_covariance(tokens, (i, j), covariance=sigma)
        assert (np.abs(found - k[i, j] * through @ sigma @ through.T) < 5 * error + 1e-12).all()


def test_the_covariance_of_j_and_i_is_the_transpose_of_that_of_i_and_j():
    one, tokens = layer(2), processes()["walk"]
    there, back = (one.output_covariance(tokens, pair, seed=3)[0] for pair in ((6, 2), (2, -2)))
    np.testing.assert_allclose(there, back.T, atol=1e-12)


def test_tokens_that_are_one_and_the_same_have_one_output():
    """K is singular: whatever softmax weighs, every output is W_O W_V x."""
    one, sigma = layer(2), anisotropic()
    same = TokenProcess(np.ones((T, T)))
    through = sum(w_o @ w_v for w_o, w_v in zip(one.w_o, one.w_v, strict=True))
    found, error = one.output_covariance(same, (2, 6), covariance=sigma)
    assert (np.abs(found - through @ sigma @ through.T) < 5 * error + 1e-12).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: layer(1).law(processes()["walk"], mean=np.zeros(3)), "mean must be (6,) or (8, 6)"),
        (lambda: layer(1).law(processes()["walk"], covariance=-np.eye(6)), "positive semidefinite"),
        (lambda: AttentionLayer(*np.zeros((4, 2, 3, 5))), "w_o must be (2, 5, 3)"),
        (lambda: layer(1).output_covariance(processes()["walk"], (1, 8)), "must be a position from -8 to 7, got 8"),
        (lambda: layer(1).output_covariance(processes()["walk"], (1,)), "queries must be two positions, got (1,)"),
        (lambda: layer(1).output_covariance(processes()["walk"], 3), "queries must be two positions, got 3"),
        (lambda: layer(1).closure(processes()["walk"], covariance=np.zeros((6, 6))), "the outputs do not vary"),
        (lambda: layer(1).closure(processes()["walk"], skip=np.nan), "skip must be finite"),
        (lambda: layer(1).outputs(np.zeros((5, 6))), "x must be sequences (N, T, 6), got shape (5, 6)"),
        (lambda: AttentionLayer(*np.zeros((4, 0, 3, 3))), "at least one head"),
    ],
)
def test_what_is_no_layer_or_no_tokens_is_refused_in_one_sentence(call, words):
    with pytest.raises(LocaterError) as refused:
        call()
    assert words in str(refused.value)
