"""Settings that have to be numbers."""

from __future__ import annotations

import math

from locater.errors import LocaterError

__all__ = ["checked_number", "checked_strength"]


def checked_strength(name: str, value: float) -> float:
    """As a float, if it is one that a penalty may have."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise LocaterError(f"{name} must be a finite number that is not negative, got {value!r:.80}")
    return float(value)


def checked_number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
        raise LocaterError(f"{name} must be a finite number, got {value!r:.80}")
    return float(value)
