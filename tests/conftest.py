"""What all tests share: how wide to look, and hypothesis' profile for it."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# some virtual machines advertise AMX and kill the process that uses it, as products of bfloat16 numbers do
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

FULL = bool(os.environ.get("LOCATER_FULL"))

settings.register_profile(
    "locater",
    max_examples=1000 if FULL else 60,
    deadline=None,
    derandomize=not FULL,  # the quick run is the same everywhere; the wide one keeps looking
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("locater")


@pytest.fixture
def full() -> bool:
    """Whether this is `make test-full`."""
    return FULL
