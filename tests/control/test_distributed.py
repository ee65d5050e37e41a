"""LocAteR under DDP, FSDP2 and tensor parallelism: the same update as on one process, with real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed_worker import CASES, build, observed, train

from locater import scan

WORKER = Path(__file__).parent / "distributed_worker.py"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def saved_by_two_ranks(worker, target):
    """What a worker saves, once it has run on two ranks."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, worker, target], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(target, weights_only=True)


@pytest.mark.bitwise  # beside processes that are not shaken, and Adam makes much of rounding
def test_two_ranks_make_the_same_update_as_one_process(tmp_path):
    saved = saved_by_two_ranks(WORKER, tmp_path / "trained.pt")
    assert max(saved["ddp", "decoder", "lengths"]["apart"].values()) == 0
    for case in CASES:
        layout, family, how = case
        if how == "lengths":
            continue
        alone = build(family).double()
        reg = train(alone, how=how)
        found, measured = (list(values.values()) for values in (saved[case]["measured"], reg.measure()))
        assert found == pytest.approx(measured, rel=1e-6, nan_ok=how == "spoilt"), (
            case
        )  # DDP puts "module." before the names
        moved = 0.0
        fresh = build(family).double().state_dict()
        for name, value in alone.state_dict().items():
            found, where = saved[case]["model"][name], f"{case} {name}"
            torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-6, msg=lambda m, w=where: f"{w}: {m}")
            moved = max(moved, (value - fresh[name]).abs().max().item())
        assert moved > 1e-2  # training did something
        table = scan(alone, fold_norm=True)[["scale", "trace"]].to_numpy()
        for found in saved[case]["scans"]:  # of sharded weights every rank scans the whole
            np.testing.assert_allclose(found, table, rtol=1e-5, atol=1e-5)
        if layout == "tensor":
            assert_rows_are_those_of_one_process(saved[case]["rows"], observed(alone))


def assert_rows_are_those_of_one_process(ranks, expected):
    """Each rank observes its own heads, numbered as in the whole model."""
    assert [{row["head"] for row in rows} for rows in ranks] == [{0, 1}, {2, 3}]
    found = {(row["module"], row["head"]): row for rows in ranks for row in rows}
    assert found.keys() == {(row["module"], row["head"]) for row in expected}
    for row in expected:
        for name in ("entropy", "entropy_share", "max_logit", "logsumexp", "queries"):
            assert found[row["module"], row["head"]][name] == pytest.approx(row[name], rel=1e-6), name
