"""The largest logit alone is that of all statistics."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locater.measure import attention_statistics, max_logits


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 20), st.integers(0, 9), st.booleans())
def test_it_is_the_largest_over_all_unmasked_pairs(batch, groups, per_group, tokens, more, causal):
    torch.manual_seed(tokens)
    q, k = torch.randn(batch, groups * per_group, tokens, 4), torch.randn(batch, groups, tokens + more, 4)
    found = max_logits(q, k, causal=causal, scale=0.7)
    assert found.shape == (batch, groups * per_group)
    assert torch.equal(found, attention_statistics(q, k, causal=causal, scale=0.7).max_logit.amax(2))
    s = 0.7 * q @ k.repeat_interleave(per_group, 1).mT
    if causal:
        s = s.masked_fill(torch.ones(tokens, tokens + more, dtype=torch.bool).triu(1 + more), -torch.inf)
    assert found.tolist() == [pytest.approx(row, rel=1e-5, abs=1e-6) for row in s.amax((2, 3)).tolist()]
