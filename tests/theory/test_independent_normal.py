"""Independent tokens with a normal own logit: one integral in place of a grid of them, hundreds of heads at once."""

from __future__ import annotations

import numpy as np
import pytest

from locater import LocaterError, TokenProcess
from locater.theory import attention_from_traces, attention_regime, independent_regimes
from locater.theory._independent import expected_of_normal
from locater.theory._independent_normal import own_weight_and_entropy


@pytest.mark.parametrize(
    ("mean", "variance", "v", "others"),
    [
        (0.0, 0.0, 0.0, 63),
        (1.0, 2.0, 1.0, 63),
        (5.0, 3.0, 0.01, 39),
        (-4.0, 0.5, 9.0, 39),
        (3.0, 1e-4, 16.0, 1),
        (8.0, 2.0, 4.0, 1023),
        (100.0, 1.0, 1.0, 5),
        (-300.0, 4.0, 2.0, 5),
    ],
)
def test_it_agrees_with_the_average_over_a_grid_of_own_logits(mean, variance, v, others):
    got, expected = own_weight_and_entropy(mean, variance, v, others), expected_of_normal(mean, variance, v, others)
    np.testing.assert_allclose(got, expected[:2], atol=3e-9)  # what steps of 0.3 leave, near e^(−π²/0.3) a token


@pytest.mark.parametrize("spread", [50.0, 1000.0])
def test_it_agrees_with_sampling_where_logits_are_large(spread):
    logits = spread * np.random.default_rng(0).standard_normal((20_000, 20))
    logits[:, 0] += 0.5 * spread
    shifted = logits - logits.max(1, keepdims=True)
    total = np.exp(shifted).sum(1)
    entropy = np.log(total) - (np.exp(shifted) * shifted).sum(1) / total
    own = np.exp(shifted[:, 0]) / total
    got = own_weight_and_entropy(0.5 * spread, spread**2, spread**2, 19)
    for value, sample in zip(got, (own, entropy), strict=True):
        assert abs(value - sample.mean()) < 4 * sample.std() / np.sqrt(len(sample))  # four standard errors


def test_many_heads_at_once_are_the_three_number_law_of_each():
    trace, share = np.array([0.0, 3.0, 20.0, -5.0, 0.0]), np.array([0.0, 0.5, 1.0, -0.2, 1.0])
    scale = np.array([0.01, 2.0, 4.0, 9.0, 60.0])
    names, entropy = independent_regimes(trace, share * scale, scale, 32, 1.5)
    law = attention_from_traces(trace, share * scale, scale, TokenProcess.independent(32), 1.5, samples=1)
    np.testing.assert_allclose(entropy, law.entropy, atol=1e-8)
    regimes = [attention_regime(law[head]) for head in range(5)]
    assert names.tolist() == [f"{regime.name} {regime.side}".strip() for regime in regimes]
    assert {"uniform", "local anywhere", "collapsed itself"} <= set(names.tolist())


def test_numbers_no_matrix_has_are_refused():
    with pytest.raises(LocaterError, match="trace_square must be within ±scale"):
        independent_regimes(1.0, 2.0, 1.0, 8, 1.0)
    with pytest.raises(LocaterError, match="tokens must be a whole number of at least 2, got 1"):
        independent_regimes(1.0, 1.0, 1.0, 1, 1.0)


def test_a_million_tokens_need_no_matrix():
    names, _ = independent_regimes([1.0, 500.0], [1.0, 4.0], [1.0, 9.0], 10**6, 1.0)
    assert names.tolist() == ["uniform", "collapsed itself"]
