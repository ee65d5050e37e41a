"""Settings that have to be numbers."""

from __future__ import annotations

import math

from locater.errors import LocaterError


def checked_number(name: str, value: float) -> float:
    return _checked(name, value, -math.inf, "a finite number")


def checked_strength(name: str, value: float) -> float:
    """One that a penalty may have."""
    return _checked(name, value, 0.0, "a finite number that is not negative")


def checked_positive(name: str, value: float) -> float:
    return _checked(name, value, math.nextafter(0.0, 1.0), "a positive, finite number")


def checked_count(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LocaterError(f"{name} must be a positive whole number, got {value!r:.80}")
    return value


def _checked(name: str, value: float, least: float, what: str) -> float:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not least <= value or not abs(value) < math.inf:
        raise LocaterError(f"{name} must be {what}, got {value!r:.80}")
    return float(value)
