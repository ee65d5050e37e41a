"""The kernel that writes a bounded step, with every layout that weights are stored in.

Without a GPU it runs in Triton's interpreter, as `interpreter` says.
"""

from __future__ import annotations

import pytest
import torch
from layouts import fused, rows, transposed, unaligned

from interpreter import DEVICE, runs
from locater.control._mix_kernel import mix_

pytest.importorskip("triton")


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [rows, fused, transposed, unaligned])
def test_heads_are_mixed_with_what_they_were_and_the_others_stay_as_they_are(layout, dtype):
    torch.manual_seed(0)
    query, key, of_query, of_key = layout(3, 2, 5, 19, dtype=dtype, device=DEVICE)
    stored = {id(x): x.clone() for x in (query, key)}
    for view in (of_query(query, key), of_key(query, key)):
        g, r, _, _ = view.shape
        old, before = torch.randn_like(view), view.clone()
        new, was = torch.rand(g, r, device=DEVICE), torch.rand(g, r, device=DEVICE)
        new[0], was[0] = 1.0, 0.0
        view[0, 0, 0, 0] = old[0, 0, 0, 1] = torch.nan  # of a head that is not touched
        assert mix_(view, old, new, was)
        expected = new[..., None, None] * before.float() + was[..., None, None] * old.float()
        torch.testing.assert_close(view[1:], expected[1:].to(dtype))
        assert torch.equal(view[0].flatten()[1:], before[0].flatten()[1:])
    assert any(not torch.equal(x, stored[id(x)]) for x in (query, key))


@runs
def test_one_factor_for_all_query_heads_of_a_key_is_enough():
    w, old = torch.randn(2, 3, 4, 6, device=DEVICE), torch.randn(2, 3, 4, 6, device=DEVICE)
    new, was = torch.rand(2, 1, device=DEVICE), torch.rand(2, 1, device=DEVICE)
    expected = new[..., None, None] * w + was[..., None, None] * old
    assert mix_(w, old, new, was)
    torch.testing.assert_close(w, expected)


def test_where_kernels_do_not_run_nothing_is_done():
    w = torch.ones(1, 1, 2, 2, dtype=torch.float64)
    assert not mix_(w, w, torch.zeros(1, 1), torch.zeros(1, 1))
    assert (w == 1).all()
