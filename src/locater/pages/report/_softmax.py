"""Softmax attention of a measurement, predicted against measured: entropy of every head, weights by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locater.errors import LocaterError
from locater.pages.report._numbers import array, averaged, centres, number, packed, rounded

LAWS = ("general", "separable", "three-number")


def softmax_predicted(content: Mapping[str, Any], modules: Sequence[str], path: Path, most: int) -> Any:
    """Of the first query that was predicted, by module; None where a file has no such predictions."""
    value = content.get("predicted")
    found = {name: _first(value.get(name)) for name in modules} if isinstance(value, Mapping) else {}
    if not any(found.values()):
        return None
    made: list[Any] = []
    laws: set[str] = set()
    stretch, longest, query = 1, 1, 0
    for name in modules:
        one = found[name]
        if one is None:
            made.append(None)
            continue
        what = f"predicted attention of {name} in {path}"
        entropy, weights = _tables(one, "entropy", 1, what), _tables(one, "weights", 2, what)
        heads, keys = weights["measured"].shape
        if any(each.shape != (heads, keys) for each in weights.values()) or any(
            each.shape != (heads,) for each in entropy.values()
        ):
            raise LocaterError(f"{what} and what was measured differ in shape")
        thin = {law: averaged(each, most) for law, each in weights.items()}
        stretch, longest, laws = thin["measured"][1], max(longest, keys), laws | (entropy.keys() & weights.keys())
        position = number(one.get("query"))
        query = int(position) if position == position else 0
        made.append(
            {
                "entropy": {law: rounded(each) for law, each in entropy.items()},
                "weights": {law: packed(each, floats=True) for law, (each, _) in thin.items()},
            }
        )
    return {
        "positions": centres(longest, stretch),
        "query": query + 1,
        "laws": [law for law in LAWS if law in laws],
        "modules": made,
        "agreement": _agreement(content.get("entropy_agreement")),
    }


def _first(one: Any) -> Mapping[str, Any] | None:
    queries = one.get("attention") if isinstance(one, Mapping) else None
    first = queries[0] if isinstance(queries, list) and queries else None
    return first if isinstance(first, Mapping) else None


def _tables(one: Mapping[str, Any], name: str, dimensions: int, what: str) -> dict[str, Any]:
    value = one.get(name)
    if not isinstance(value, Mapping) or value.get("measured") is None:
        raise LocaterError(f"{what} has no measured {name}")
    return {law: array(value[law], dimensions, what) for law in ("measured", *LAWS) if value.get(law) is not None}


def _agreement(value: Any) -> list[dict[str, Any]]:
    rows = (
        [row for row in value if isinstance(row, Mapping) and row.get("law") in LAWS] if isinstance(value, list) else []
    )
    names = ("median", "percentile_90", "rank_correlation", "floor")
    return [{"law": row["law"], **{name: rounded(number(row.get(name)), 3) for name in names}} for row in rows]
