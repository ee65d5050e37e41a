"""LocAteR under DDP and FSDP2: the same update as on one process, with real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_worker import build, train

WORKER = Path(__file__).parent / "distributed_worker.py"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize(
    ("layout", "family", "how"),
    [
        ("ddp", "llama", "attach"),
        ("ddp", "gpt2", "penalty"),
        ("fsdp2", "llama", "attach"),
        ("fsdp2", "gpt2", "attach"),  # fused, stored transposed
        ("fsdp2", "llama", "penalty"),
    ],
)
def test_two_ranks_make_the_same_update_as_one_process(layout, family, how, tmp_path):
    target = tmp_path / "trained.pt"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}",
        str(WORKER), layout, family, how, str(target),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = torch.load(target, weights_only=True)
    alone = build(family).double()
    reg = train(alone, how=how)
    assert saved["penalty"] == pytest.approx(reg.measure()["penalty"], rel=1e-6)
    moved = 0.0
    fresh = build(family).double().state_dict()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(saved["model"][name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        moved = max(moved, (value - fresh[name]).abs().max().item())
    assert moved > 1e-2  # training did something
