"""At infinite length: what `depth_law` tends to, and what softmax of very many normal logits does."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from locater import LocaterError
from locater.theory import RandomAttention, RandomLinear, RandomMLP, RandomTransformer, depth_law, long_limit

WIDTH, START = 256, 0.2


def encoder(layers, share, tokens, norm="post"):
    """One head as wide as the model, ReLU, weights of variance 0.2/D; logits of variance share · 2 ln T."""
    std = (2 * share * math.log(tokens)) ** 0.25 / math.sqrt(WIDTH)
    small, one = RandomLinear(WIDTH, math.sqrt(0.2 / WIDTH), 0.02), RandomLinear(WIDTH, WIDTH**-0.5)
    looks = RandomLinear(WIDTH, std)
    attention = RandomAttention(1, 1, WIDTH, looks, looks, small, one, WIDTH**-0.5, causal=False)
    return RandomTransformer(layers, attention, RandomMLP(small, small, "relu"), norm=norm)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize(("beta", "off"), [(0.5, 0.01), (1.5, 0.1), (3.0, 0.04), (6.0, 0.02)])
def test_long_sequences_come_near_the_limit(beta, off, norm):
    """Through ten layers; farthest away where the limit has its transition, at β = 1.58 for this start: what finite
    length changes there is of the order of 1/ln T, 0.16."""
    share, tokens = beta**2 / 2, 512
    model = encoder(10, share, tokens, norm)
    limit = long_limit(model, START, share)
    law = depth_law(model, (1 - START) * np.eye(tokens) + START)
    assert np.abs(law.cosine - limit.cosine).max() < off


@pytest.mark.parametrize("beta", [0.5, 6.0])
def test_longer_ones_are_nearer(beta):
    share, errors = beta**2 / 2, []
    for tokens in (16, 64, 512):
        model = encoder(8, share, tokens)
        law = depth_law(model, (1 - START) * np.eye(tokens) + START, draws=max(1, 512 // tokens))
        errors.append(np.abs(law.cosine - long_limit(model, START, share).cosine).max())
    assert errors[0] > errors[1] > errors[2]


def test_the_transition_is_where_their_critical_beta_is():
    for cosine in (0.0, 0.3, 0.8):
        critical = (2 / (1 - cosine)) ** 0.5
        below, above = (
            long_limit(encoder(1, (f * critical) ** 2 / 2, 2), cosine, (f * critical) ** 2 / 2) for f in (0.99, 1.01)
        )
        assert below.entropy_share[0] == pytest.approx(1 - 0.99**2)
        assert above.entropy_share[0] == 0
        plain = long_limit(encoder(1, 0.0, 2), cosine, 0.0)
        assert below.cosine[1] == plain.cosine[1] > above.cosine[1]


def test_far_beyond_it_every_token_gets_one_token():
    """Then attention's output is as unlike as what it is made of."""
    share = 1e12
    model = replace(encoder(5, share, 2), mlp=None, norm="pre")
    value = replace(model.attention.value, bias_std=0.0)
    found = long_limit(replace(model, attention=replace(model.attention, value=value)), 0.4, share)
    np.testing.assert_allclose(found.cosine, 0.4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((1.0, 1.0), "cosine must be from 0 to below 1"), ((0.1, -1.0), "share must not be negative")],
)
def test_numbers_that_are_none_are_refused(arguments, words):
    with pytest.raises(LocaterError, match=words):
        long_limit(encoder(2, 1.0, 8), *arguments)


@pytest.mark.parametrize("more", [{"window": 4}, {"qk_norm_eps": 1e-6}, {"softcap": 50.0}, {"rotary": (1.0, 0.1)}])
def test_attention_that_the_limit_does_not_hold_for_is_refused(more):
    model = encoder(2, 1.0, 8)
    with pytest.raises(LocaterError, match="without a window, QK-norm, soft cap or rotary positions"):
        long_limit(replace(model, attention=replace(model.attention, **more)), 0.2, 1.0)
