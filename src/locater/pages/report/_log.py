"""A log of attention in training: entropy, largest logit and rank of each module over steps, alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from locater.measure.alarms import Alarms
from locater.pages.report._find import Found
from locater.pages.report._measurement import alarm_rows
from locater.pages.report._numbers import Array, array, chosen, number, packed, short
from locater.pages.report._scan import modules_of

_HEADS = ("entropy_share", "max_logit")
_STEPS = 400
_NUMBERS = 400_000  # of each quantity, steps × modules × heads, at full detail


def log_section(found: Found, detail: float) -> dict[str, Any]:
    rows = found.content
    notes = list(found.notes)
    modules, index_of = modules_of(rows)
    steps = sorted({row["step"] for row in rows})
    by_cell = {(row["step"], index_of[short(row["module"])]): row for row in rows}
    heads = max((len(row[name]) for row in rows for name in _HEADS if isinstance(row.get(name), list)), default=1)
    most = max(16, min(int(_STEPS * detail), int(_NUMBERS * detail / (len(modules) * heads))))
    kept = [steps[i] for i in chosen(len(steps), most)]
    if len(kept) < len(steps):
        notes.append(f"{len(kept)} of {len(steps)} logged steps are shown; alarms look at all of them")
    made = {
        name: _of_heads(by_cell, kept, len(modules), heads, name, str(found.path)) for name in _HEADS
    }  # (modules, heads, N)
    residual = np.full((len(modules), len(kept)), np.nan)
    for column, step in enumerate(kept):
        for index in range(len(modules)):
            residual[index, column] = number(by_cell.get((step, index), {}).get("rank_residual"))
    return {
        "kind": "log",
        "title": found.path.name,
        "source": str(found.path),
        "facts": [
            ["modules", f"{len(modules)}, up to {heads} heads each"],
            ["steps", f"{len(steps)} logged, {steps[0]:,} to {steps[-1]:,}"],
        ],
        "notes": notes,
        "modules": modules,
        "steps": kept,
        "heads": {name: packed(values, floats=True) for name, values in made.items()},
        "rank_residual": packed(residual, floats=True),
        "alarms": _alarms(rows, notes),
    }


def _of_heads(
    by_cell: Mapping[tuple[int, int], Any], steps: Sequence[int], modules: int, heads: int, name: str, path: str
) -> Array:
    made = np.full((modules, heads, len(steps)), np.nan)
    for column, step in enumerate(steps):
        for index in range(modules):
            value = by_cell.get((step, index), {}).get(name)
            if value is not None:
                values = array(value, 1, f"{name} of step {step} in {path}")
                made[index, : len(values), column] = values
    return made


def _alarms(rows: Sequence[Mapping[str, Any]], notes: list[str]) -> list[dict[str, Any]] | None:
    """Those that `locater.measure` raised, or would have, while the log was written."""
    alarms = Alarms()
    try:
        alarms.recall(rows)
    except (TypeError, ValueError) as error:  # lines of an older log, or damaged ones
        notes.append(f"no alarms: {short(error)}")
        return None
    return alarm_rows([asdict(alarm) for alarm in alarms.raised])
