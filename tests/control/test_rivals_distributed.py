"""Rivals under DDP and FSDP2, separate and fused layouts: the same training as on one process, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rivals_worker import CASES, train
from test_distributed import saved_by_two_ranks


@pytest.mark.bitwise  # beside processes that are not shaken, and Adam makes much of rounding
def test_two_ranks_train_as_one_process_does(tmp_path, full):
    """Each rank sees half of the batch; QK-clip's largest logit is that of the whole."""
    if not full:
        pytest.skip("a sixth of a minute: LOCATER_FULL=1, or make test-full")
    saved = saved_by_two_ranks(Path(__file__).parent / "rivals_worker.py", tmp_path / "trained.pt")
    for layout, family, method in CASES:
        alone, without = (train("alone", family, each) for each in (method, None))
        for name, value in alone.items():
            where = f"{layout} {family} {method} {name}"
            torch.testing.assert_close(
                saved[layout, family, method][name], value, rtol=1e-6, atol=1e-6, msg=lambda m, w=where: f"{w}: {m}"
            )
        assert max((value - without[name]).abs().max() for name, value in alone.items()) > 1e-3, method
