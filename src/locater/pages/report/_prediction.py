"""ρ of given spectra, predicted and simulated, as the demo writes it."""

from __future__ import annotations

from typing import Any

from locater.errors import LocaterError
from locater.pages.report._find import Found
from locater.pages.report._numbers import array, number, packed, rounded, short

_METHODS = ("exact", "asymptotic", "printed", "simulated")
_MOST = 24


def prediction_section(found: Found, _: float) -> dict[str, Any]:
    rows = found.content["spectra"]
    notes = list(found.notes)
    if len(rows) > _MOST:
        notes.append(f"the first {_MOST} of {len(rows)} spectra are shown")
    made = []
    for index, row in enumerate(rows[:_MOST]):
        curves = row.get("rho")
        if not isinstance(curves, dict):
            raise LocaterError(f"cannot show {found.path}: its spectrum {index + 1} has no ρ")
        gaps = row.get("largest_gap")
        made.append(
            {
                "mean": rounded(number(row.get("mean"))),
                "std": rounded(number(row.get("std"))),
                "regime": short(row.get("regime")),
                "rho": {
                    name: packed(array(curves[name], 1, f"ρ of spectrum {index + 1} in {found.path}"))
                    for name in _METHODS
                    if name in curves
                },
                "gap": {name: rounded(number(gaps.get(name)), 3) for name in _METHODS[:3]}
                if isinstance(gaps, dict)
                else {},
            }
        )
    return {
        "kind": "prediction",
        "title": "predicted and simulated",
        "source": str(found.path),
        "facts": [],
        "notes": notes,
        "spectra": made,
    }
