"""Where Triton's kernels are tested: on a GPU, else in Triton's interpreter.

The interpreter has to be chosen before Triton is imported, so it takes a process of its own. Where there is no GPU, the
first test of a file starts that process with `passes_in_the_interpreter(__file__)`, and the file's tests that need
kernels run there.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"

runs = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="runs in the process of the first test")
runs_elsewhere = pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the tests below run here")
on_gpu = pytest.mark.skipif(not ON_GPU, reason="too large for the interpreter")


def passes_in_the_interpreter(file):
    """Asserts that all tests of a file do."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, env=environment | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def imported_without_triton(monkeypatch, *modules):
    """The modules as they are where there is no Triton, each imported anew and seen by those after it."""
    monkeypatch.setitem(sys.modules, "triton", None)
    made = []
    for module in modules:
        spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
        made.append(importlib.util.module_from_spec(spec))
        monkeypatch.setitem(sys.modules, spec.name, made[-1])
        spec.loader.exec_module(made[-1])
    return made
