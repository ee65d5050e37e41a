"""What rotary positions can make of a query-key matrix, over all turns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rotations import all_rotations, largest_product, pairs_of

from locater.models import Rope

ROPES = {
    "halves": (Rope(torch.ones(3)), 6),
    "interleaved": (Rope(torch.ones(3), interleaved=True), 6),
    "a part of the head": (Rope(torch.ones(2)), 7),
    "an interleaved part": (Rope(torch.ones(2), interleaved=True), 7),
}


def grams(width, seed=0):
    random = torch.Generator().manual_seed(seed)
    factors = torch.randn(2, 5, width, 9, generator=random, dtype=torch.float64)
    return factors @ factors.mT


@pytest.mark.parametrize("kind", ROPES)
def test_the_mean_over_rotations_is_that_of_rotations(kind):
    rope, width = ROPES[kind]
    gram = grams(width)[0]
    turns = all_rotations(rope, torch.eye(width, dtype=torch.float64))[:, None]
    torch.testing.assert_close(rope.mean_gram(gram), (turns @ gram @ turns.mT).mean(0))


@pytest.mark.parametrize("kind", ROPES)
@given(st.integers(0, 1000), st.lists(st.floats(0, 2 * math.pi), min_size=3, max_size=3))
def test_no_turn_makes_a_scale_larger_than_the_largest(kind, seed, angles):
    rope, width = ROPES[kind]
    gram_q, gram_k = grams(width, seed)
    angles = torch.tensor(angles[: rope.pairs], dtype=torch.float64)
    turn = replace(rope, frequencies=angles).rotate_rows(torch.eye(width, dtype=torch.float64), 1.0)
    most = rope.largest_product(gram_q, gram_k)
    assert ((gram_q * (turn @ gram_k @ turn.mT)).sum((-2, -1)) <= most * (1 + 1e-12)).all()
    torch.testing.assert_close(most, largest_product(rope, gram_q, gram_k))


@pytest.mark.parametrize("kind", ["halves", "interleaved"])
def test_what_all_tokens_have_in_common_can_be_turned_to_the_largest(kind):
    """A query and a key that are always the same: turned, they point the same way in every pair."""
    rope, width = ROPES[kind]
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, width, generator=random, dtype=torch.float64)
    angle = [
        math.atan2(q[j], q[i]) - math.atan2(k[j], k[i]) for i, j in pairs_of(rope)
    ]  # fmt: skip
    turned = replace(rope, frequencies=torch.tensor(angle).double()).rotate_rows(k[:, None], 1.0)[:, 0]
    most = rope.largest_product(torch.outer(q, q), torch.outer(k, k))
    assert float(most) == pytest.approx(float((q @ turned) ** 2))
    assert float(most) == pytest.approx(float(sum(q[p].norm() * k[p].norm() for p in pairs_of(rope)) ** 2))
