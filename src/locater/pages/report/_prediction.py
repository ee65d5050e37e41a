"""Softmax attention and ρ of given spectra, predicted and simulated, as the demo writes them."""

from __future__ import annotations

from typing import Any

from locater.errors import LocaterError
from locater.pages.report._find import Found
from locater.pages.report._numbers import array, number, packed, rounded, short
from locater.theory import ATTENTION_REGIMES

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
                "softmax": _softmax(row.get("softmax"), f"spectrum {index + 1} in {found.path}"),
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


def _softmax(given: Any, where: str) -> dict[str, Any] | None:
    """Weights and entropy; None for files of the first versions, which have ρ alone."""
    if not isinstance(given, dict) or not isinstance(given.get("weights"), dict):
        return None
    weights, entropy = given["weights"], given.get("entropy")
    known = entropy if isinstance(entropy, dict) else {}
    return {
        "regime": ATTENTION_REGIMES.get(name := short(given.get("regime")), name),
        "weights": {
            name: packed(array(weights[name], 1, f"softmax weights of {where}"), floats=True)
            for name in ("exact", "simulated")
            if name in weights
        },
        "entropy": {name: rounded(number(known.get(name)), 4) for name in ("exact", "simulated")},
    }
