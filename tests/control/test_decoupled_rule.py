"""The rule of LocAteR beside the optimizer, from moments of logits to factors of weights."""

from __future__ import annotations

import math

import pytest
import torch
from moving import spread_of

from locater.control.rules.decoupled import TOKENS, Decoupled, initial_spread, logit_moments, sampled_positions


@pytest.mark.parametrize("tokens", [2, 64, 65, 200, 4096])
def test_a_sample_is_of_the_whole_sequence(tokens):
    """Near offsets and far ones; with no token twice."""
    found = sampled_positions(tokens)
    assert len(found) == min(tokens, TOKENS)
    assert found[0] == 0
    assert found[-1] == tokens - 1
    assert (found.diff() > 0).all()
    assert (found.diff() == 1).sum() >= min(tokens - 1, 56)
    assert found.diff().max() <= 1 + tokens / 7


def test_the_rule_says_what_the_logits_say():
    """Three moments give the spread after any part of an update, and the change itself."""
    torch.manual_seed(0)
    before, after = torch.randn(2, 5, 3, 7, 7, dtype=torch.float64).unbind(0)
    found = logit_moments(before, after)
    torch.testing.assert_close(found[..., 0].sqrt(), spread_of(before))
    torch.testing.assert_close(found[..., 2].sqrt(), spread_of(after - before))
    for keep in (0.0, 0.3, 1.0):
        both = found[..., 0] + keep * (2 * found[..., 1] + keep * found[..., 2])
        torch.testing.assert_close(both.sqrt(), spread_of(before + keep * (after - before)))


@pytest.mark.parametrize("tokens", [64, 1024, 16_384])
def test_the_default_spread_is_where_softmax_keeps_a_quarter_of_its_entropy(tokens):
    """Of normal, independent logits."""
    normal, independent = torch.Generator().manual_seed(0), 2_000
    logits = Decoupled.spread * torch.randn(independent, tokens, generator=normal)
    sampled = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert 0.24 < float(sampled.mean()) / math.log(tokens) < 0.28


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("acts", [(True, True), (True, False), (False, True), (False, False)])
def test_factors_shrink_logits_to_the_bound(shared, acts):
    moments = torch.tensor([[[25.0, 0.0, 0.0], [4.0, 0.0, 0.0], [100.0, 0.0, 0.0]]])
    keep, q, k = Decoupled(0.1, 2.5).factors(moments, torch.zeros(1, 3), acts=acts, shared_keys=shared)
    assert (keep == 1).all()
    spread = moments[..., 0].sqrt() * q * k
    if any(acts):
        assert (spread <= 2.5 + 1e-6).all()
    else:
        assert (q == 1).all()
        assert (k == 1).all()
    if not (shared and not acts[0]):
        torch.testing.assert_close(q * k, torch.tensor([[0.5, 1.0, 0.25]]) if any(acts) else torch.ones(1, 3))
    released = Decoupled(0.1, 2.5).factors(moments, torch.zeros(1, 3), 1e-9, acts=acts, shared_keys=shared)
    assert all((one == 1).all() for one in released)


@pytest.mark.parametrize("every", [1, 5])
def test_heads_that_started_sharp_are_shrunk_by_no_more_than_updates_may_change_them(every):
    """How sharp they were is known of one batch alone."""
    moments = torch.tensor([[[25.0, 0.0, 0.0], [3.05**2, 0.0, 0.0], [25.0, 0.0, 0.0]]])
    initial = torch.tensor([[3 / 2**0.5, 3 / 2**0.5, 1.0]])
    _, q, k = Decoupled(0.1, 2.5).factors(moments, initial, every=every)
    torch.testing.assert_close(moments[..., 0].sqrt() * q * k, torch.tensor([[5 - every * 0.1, 3.0, 2.5]]))


def test_of_samples_that_are_made_up_only_the_change_counts():
    """Their product is NaN, on all ranks if on one, since so is its mean."""
    moments = torch.tensor([[[100.0, math.nan, 0.04], [100.0, math.nan, 1e-4], [100.0, math.nan, math.inf]]])
    keep, q, k = Decoupled(0.1, 2.5).factors(moments, -torch.ones(1, 3))
    torch.testing.assert_close(keep, torch.tensor([[0.5, 1.0, 0.0]]))
    assert (q * k == 1).all()
    assert (initial_spread(moments, -torch.ones(1, 3)) == -1).all()


@pytest.mark.parametrize(("every", "kept"), [(1, 0.9), (5, 0.5), (10, 0.0), (1000, 0.0)])
def test_acting_on_every_nth_update_takes_back_for_all_n_but_no_more_than_one(every, kept):
    moments = torch.tensor([[[0.0, 0.0, (0.1 / 0.9) ** 2]]])
    assert float(Decoupled(0.1).keep(moments, every=every)) == pytest.approx(kept, abs=1e-6)
