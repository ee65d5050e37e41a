"""Which keys are masked: every method of `Visibility` against a mask made entry by entry."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locater.hooks import Visibility, visible


def is_masked(visibility, b, h, i, j):
    """The definition, for one sequence, head, query and key."""
    distance = j - (i + visibility.shape[3] - visibility.shape[2])
    by_distance = (visibility.causal and distance > 0) or abs(distance) >= (visibility.window or math.inf)
    by_key = visibility.key_mask is not None and not visibility.key_mask[b, j]
    if visibility.bias is None:
        return by_distance or by_key
    bias = visibility.bias.expand(visibility.shape)[b, h, i, j].item()
    return by_distance or by_key or (not bias if visibility.bias.dtype == torch.bool else bias < -1e38)


def dense(visibility):
    b, h, tq, tk = visibility.shape
    entries = [
        [[[is_masked(visibility, a, c, i, j) for j in range(tk)] for i in range(tq)] for c in range(h)]
        for a in range(b)
    ]
    return torch.tensor(entries)


@st.composite
def visibilities(draw):
    b, h, tk = (draw(st.integers(1, most)) for most in (2, 2, 9))
    causal, window = draw(st.booleans()), draw(st.none() | st.integers(1, 12))
    # positions, which causal and window need, are of queries that are no more than the keys
    tq = draw(st.integers(1, tk if causal or window else 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    key_mask = torch.rand(b, tk, generator=generator) < 0.7 if draw(st.booleans()) else None
    bias, kind = None, draw(st.sampled_from(["none", "boolean", "lowest", "infinite"]))
    if kind != "none":
        repeated = [n if draw(st.booleans()) else 1 for n in (b, h, tq)]
        bias = torch.rand(*repeated, tk, generator=generator) < 0.7
        if kind != "boolean":
            lowest = -math.inf if kind == "infinite" else torch.finfo(torch.float32).min
            bias = torch.randn(bias.shape, generator=generator).masked_fill(~bias, lowest)
    return Visibility((b, h, tq, tk), torch.device("cpu"), causal, window, key_mask, bias)


@given(visibilities())
def test_the_number_of_unmasked_keys_is_that_of_the_definition(visibility):
    count = visibility.unmasked_keys().expand(visibility.shape[:3])
    assert torch.equal(count, (~dense(visibility)).sum(-1))


@given(visibilities(), st.data())
def test_a_block_of_logits_is_minus_infinity_where_a_key_is_masked_and_has_its_bias_elsewhere(visibility, data):
    b, h, tq, tk = visibility.shape
    rows, columns = (slices(data.draw, size) for size in (tq, tk))
    expected = torch.zeros(visibility.shape)
    if visibility.bias is not None and visibility.bias.dtype != torch.bool:
        expected = expected + visibility.bias
    expected = expected.masked_fill(dense(visibility), -math.inf)[:, :, rows, columns]
    found = torch.zeros(b, h, rows.stop - rows.start, columns.stop - columns.start)
    assert torch.equal(visibility.apply_(found, rows, columns), expected)


@given(visibilities(), st.data())
def test_what_lies_outside_the_range_of_a_block_is_masked_and_what_is_no_edge_is_near_enough(visibility, data):
    _, _, tq, tk = visibility.shape
    by_distance = Visibility((1, 1, tq, tk), visibility.device, visibility.causal, visibility.window)
    masked = dense(by_distance)[0, 0]
    rows, columns = (slices(data.draw, size) for size in (tq, tk))
    near = by_distance.columns(rows, columns)
    outside = [j for j in range(columns.start, columns.stop) if not near.start <= j < near.stop]
    assert masked[rows, outside].all()
    edges = [j for edge in by_distance.edges(rows, near) for j in range(edge.start, edge.stop)]
    whole = [j for j in range(near.start, near.stop) if j not in edges]
    assert not masked[rows, whole].any()
    queries = by_distance.rows(columns)
    assert masked[[i for i in range(tq) if not queries.start <= i < queries.stop], columns].all()


def slices(draw, size):
    start = draw(st.integers(0, size - 1))
    return slice(start, draw(st.integers(start + 1, size)))


@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.bfloat16).min])
def test_infinity_and_the_lowest_number_mask_and_nan_does_not(lowest):
    mask = torch.tensor([0.0, -1e4, lowest, math.nan], dtype=torch.bfloat16)
    assert visible(mask).tolist() == [True, True, False, True]
