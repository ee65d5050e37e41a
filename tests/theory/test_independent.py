"""Independent tokens: quadrature against sampling, the splines of its table, and the Random Energy Model."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import entr, logsumexp

from locater.theory import TokenProcess, attention_from_traces
from locater.theory._independent import expected, expected_of_normal


@pytest.mark.parametrize(("own", "v", "others"), [(0.5, 0.3, 7), (3.0, 2.0, 63), (-4.0, 9.0, 15), (8.0, 0.01, 31)])
def test_quadrature_agrees_with_sampling_given_the_scalars(own, v, others):
    rng = np.random.default_rng(3)
    logits = np.column_stack([np.full(50_000, own), np.sqrt(v) * rng.standard_normal((50_000, others))])
    weights = np.exp(logits - logsumexp(logits, axis=1, keepdims=True))
    entropy = entr(weights).sum(1)
    drawn = np.stack([weights[:, 0], entropy, entropy**2, (weights[:, 1:] * (1 - weights[:, 1:])).sum(1)])
    found = expected_of_normal(own, 0.0, v, others)
    z = (found - drawn.mean(1)) / (drawn.std(1) / np.sqrt(len(logits)) + 1e-12)
    assert np.abs(z).max() < 5


def test_the_table_s_splines_lose_nothing():
    rng = np.random.default_rng(4)
    a, v = rng.normal(2, 3, 40), rng.uniform(0.5, 6, 40)
    table = expected(a, v, 31)
    direct = np.stack([expected_of_normal(x, 0.0, y, 31) for x, y in zip(a, v, strict=True)], 1)
    np.testing.assert_allclose(table, direct, atol=1e-6)


def test_three_numbers_of_independent_tokens_have_no_sampling_error_and_agree_with_sampling():
    law = attention_from_traces(6.0, 2.0, 5.0, TokenProcess.independent(32), 2.0)
    assert float(law.entropy_error) == 0
    assert (law.weights_error == 0).all()
    process = TokenProcess(np.eye(32) + 1e-9 * np.diag(np.arange(32) % 2))  # not seen to be independent
    sampled = attention_from_traces(6.0, 2.0, 5.0, process, 2.0, samples=1 << 17)
    assert float(law.entropy) == pytest.approx(float(sampled.entropy), abs=5 * float(sampled.entropy_error))
    assert float(law.signal) == pytest.approx(float(sampled.signal), abs=5 * float(sampled.signal_error))
    assert float(law.entropy_std) == pytest.approx(float(sampled.entropy_std), rel=0.01)


@pytest.mark.parametrize("b", [0.5, 1.0, 2.0])
def test_the_random_energy_model_s_entropy_is_the_limit_of_many_tokens(b):
    """ln T − b/2 for b well below 2 ln T where the own logit plays no part; the rest shrinks with T."""
    gaps = []
    for tokens in (1 << 8, 1 << 14):
        own, entropy, *_ = expected_of_normal(0.0, 0.0, b, tokens - 1)
        gaps.append(abs(entropy - (np.log(tokens) - b / 2)))
        assert own < 2 / tokens
    assert gaps[1] < 0.02
    assert gaps[1] < gaps[0] / 4


def test_self_attention_takes_over_where_the_own_logit_outweighs_all_others():
    """At a = ln T + b/2 the own token weighs about as much as all others together."""
    own = expected_of_normal(np.log(1 << 14) + 0.5, 0.0, 1.0, (1 << 14) - 1)[0]
    assert own == pytest.approx(0.5, abs=0.01)
