"""The package's types, checked as `make types` does; beside the other tests, since it keeps one core busy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_mypy_finds_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
