"""Kills, signals, damaged files and odd arguments: samples of what `make kills` and `make fuzz` do at any length."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux: counts memory in /proc")


def script(name, count):
    """A process without pytest's threads, which may fork."""
    where = os.pathsep.join([str(HERE), str(HERE / "lab"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": where}
    command = [sys.executable, HERE / name, "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
def test_runs_sweeps_and_arenas_go_on_wherever_they_were_killed_and_no_record_is_lost(full):
    count = 600 if full else 24
    assert f"{count} kills and signals" in script("killing.py", count)


@pytest.mark.long
def test_damaged_files_and_odd_arguments_end_in_one_sentence(full):
    count = 2000 if full else 100
    assert f"{count} inputs from seed 0: 0 faults" in script("fuzzing.py", count)
