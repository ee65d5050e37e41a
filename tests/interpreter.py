"""Where Triton's kernels are tested: on a GPU, else in Triton's interpreter.

The interpreter is chosen when a kernel is defined. Where there is no GPU, `define_kernels` (called before any test is
collected) defines ours for it; the package still leaves tensors on a CPU to PyTorch, except in tests marked `runs`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import metadata

import pytest
import torch


def _has_interpreter() -> bool:
    """From 3.7 on: what 3.6 does to use an array as an index, NumPy now refuses."""
    if importlib.util.find_spec("triton") is None:
        return False
    return tuple(map(int, metadata.version("triton").split(".")[:2])) >= (3, 7)


ON_GPU = torch.cuda.is_available()
INTERPRETED = not ON_GPU and _has_interpreter()
DEVICE = "cuda" if ON_GPU else "cpu"

runs = pytest.mark.usefixtures("kernels")
on_gpu = pytest.mark.gpu  # too large for Triton's interpreter


def define_kernels() -> None:
    if not INTERPRETED:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import locater.control._kernels
        import locater.control._step_kernels
        import locater.lab.engine._norm
        import locater.measure._kernels
        from locater import _triton  # noqa: F401
    finally:
        del os.environ["TRITON_INTERPRET"]  # which processes that tests start must not inherit
    locater._triton.INTERPRETED = False


@pytest.fixture
def kernels(monkeypatch):
    """Kernels run where `DEVICE` is."""
    if not ON_GPU and not INTERPRETED:
        pytest.skip("needs a GPU, or the interpreter of Triton 3.7 or newer: pip install 'triton>=3.7'")
    monkeypatch.setattr("locater._triton.INTERPRETED", INTERPRETED)
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


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
