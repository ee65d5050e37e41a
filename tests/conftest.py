"""What all tests share: how wide to look, and hypothesis' profile for it."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, settings

# some virtual machines advertise AMX and kill the process that uses it, as products of bfloat16 numbers do
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from interpreter import define_kernels, kernels  # noqa: F401 - a fixture

define_kernels()

FULL = bool(os.environ.get("LOCATER_FULL"))

settings.register_profile(
    "locater",
    max_examples=1000 if FULL else 60,
    deadline=None,
    derandomize=not FULL,  # the quick run is the same everywhere; the wide one keeps looking
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("locater")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests for a GPU are no skips where there is none: they are left out, and counted as that."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture
def full() -> bool:
    """Whether this is `make test-full`."""
    return FULL


# ---------------------------------------------------------------------- another machine's rounding

SHAKEN = os.environ.get("LOCATER_SHAKEN")  # a seed


def _rounding(item: pytest.Item):
    """While a test runs and is prepared: `shaking.Shaker`, if it is asked for and the test is not of bits."""
    if SHAKEN is None or item.get_closest_marker("bitwise") or item.get_closest_marker("compiled"):
        return nullcontext()
    from shaking import Shaker

    return Shaker(int(SHAKEN))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    with _rounding(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    with _rounding(item):
        return (yield)
