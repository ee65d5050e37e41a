"""Rivals under DDP and FSDP2, separate and fused layouts: the same training as on one process, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from rivals_worker import CASES, train
from test_distributed import free_port


def test_two_ranks_train_as_one_process_does(tmp_path):
    """Each rank sees half of the batch; QK-clip's largest logit is that of the whole."""
    worker, target = Path(__file__).parent / "rivals_worker.py", tmp_path / "trained.pt"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}",
        str(worker), str(target),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = torch.load(target, weights_only=True)
    for layout, family, method in CASES:
        alone, without = train(family, method), train(family, None)
        for name, value in alone.items():
            where = f"{layout} {family} {method} {name}"
            torch.testing.assert_close(
                saved[layout, family, method][name], value, rtol=1e-6, atol=1e-6, msg=lambda m, w=where: f"{w}: {m}"
            )
        assert max((value - without[name]).abs().max() for name, value in alone.items()) > 1e-3, method
