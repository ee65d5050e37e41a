"""Numbers from files, whatever stands there, and numbers into the page: few digits, or packed."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from locater.errors import LocaterError

Array = NDArray[np.float64]

_MISSING = -32768


def number(value: Any) -> float:
    """A finite number as it stands; NaN for whatever else is there."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan


def short(value: Any, most: int = 300) -> str:
    """A name from a file, of a length that a page can hold."""
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def read_facts(content: Mapping[str, Any]) -> list[list[str]]:
    """How much of a text was read, where a file says so."""
    sequences, left_out, length = (number(content.get(name)) for name in ("sequences", "left_out", "length"))
    whole = f" of {sequences + left_out:,.0f}" if left_out > 0 else ""
    told = sequences == sequences and length == length
    return [["read", f"{sequences:,.0f}{whole} sequences of {length:,.0f} tokens"]] if told else []


def array(value: Any, dimensions: int, what: str) -> Array:
    """Nested lists as an array; NaN for null and for what is not finite."""
    try:
        with np.errstate(all="ignore"):
            made = np.asarray(value, dtype=float)
    except (TypeError, ValueError, OverflowError) as error:
        raise LocaterError(f"{what} is not a table of numbers") from error
    if made.ndim != dimensions:
        raise LocaterError(f"{what} must have {dimensions} dimensions, it has {made.ndim}")
    return np.where(np.isfinite(made), made, np.nan)


def rounded(values: Any, digits: int = 5) -> Any:
    """Lists with so many significant digits, and None for NaN."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [rounded(value, digits) for value in values]
    if not math.isfinite(values):
        return None
    short = float(f"{values:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def packed(values: Array, *, floats: bool = False) -> dict[str, Any]:
    """An array as base64 of little-endian numbers, a third of what digits take.

    Sixteen bits each, with a step of 1/32767 of the largest, are more than a picture shows; `floats` (32 bits) are for
    values that span decades.
    """
    made = np.asarray(values, dtype=float)
    if floats:
        with np.errstate(over="ignore"):
            raw = made.astype("<f4")
        return {"shape": list(made.shape), "f4": base64.b64encode(raw.tobytes()).decode()}
    known = np.isfinite(made)
    largest = float(np.abs(made[known]).max()) if known.any() else 0.0
    step = largest / 32767 or 1.0
    whole = np.where(known, np.rint(np.where(known, made, 0.0) / step), _MISSING).astype("<i2")
    return {
        "shape": list(made.shape),
        "step": float(f"{step:.9g}"),
        "i2": base64.b64encode(whole.tobytes()).decode(),
    }


def chosen(count: int, most: int) -> NDArray[np.int64]:
    """At most `most` of `count` indices, evenly spread, the first and the last among them."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, max(2, most)).round().astype(np.int64))


def averaged(values: Array, most: int) -> tuple[Array, int]:
    """The last axis in stretches of equal size, at most `most` of them, each replaced by its mean; and that size."""
    count = values.shape[-1]
    size = -(-count // max(1, most))
    if size <= 1:
        return values, 1
    filled = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -count % size)], constant_values=np.nan)
    parts = filled.reshape(*values.shape[:-1], -1, size)
    known = np.isfinite(parts)
    amount = known.sum(-1)
    total = np.where(known, parts, 0.0).sum(-1)
    return np.where(amount > 0, total / np.maximum(amount, 1), np.nan), size


def centres(count: int, size: int) -> list[float]:
    """Positions from 1 in stretches of `size`: where each has its middle."""
    return [start + (min(start + size - 1, count) - start) / 2 for start in range(1, count + 1, size)]
