"""A measurement: maps of entropy and largest logit, entropy and ρ by position, both against predictions, alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from locater.errors import LocaterError
from locater.pages.report._find import Found
from locater.pages.report._numbers import Array, array, averaged, centres, number, packed, read_facts, rounded, short
from locater.pages.report._scan import grid_of, modules_of
from locater.pages.report._softmax import softmax_predicted

LAWS = ("general", "separable", "walk")
_COLUMNS = ("entropy", "entropy_share", "max_logit", "logsumexp")
_TOKENS = ("rank_residual", "effective_rank", "mean_cosine")
_NUMBERS = 400_000  # ρ and entropy by position, each, in one page at full detail
_POSITIONS = 256
_BINS = 40


def measurement_section(found: Found, detail: float) -> dict[str, Any]:
    content = found.content
    rows = content["heads"]
    model = short(content.get("model")) or found.path.name
    modules, index_of = modules_of(rows)
    notes = list(found.notes)
    most = max(16, min(int(_POSITIONS * detail), int(_NUMBERS * detail / len(rows))))
    names = [module["name"] for module in modules]
    columns = {name: [number(row.get(name)) for row in rows] for name in _COLUMNS if any(name in row for row in rows)}
    return {
        "kind": "measurement",
        "title": "/".join(Path(model).parts[-2:]) or model,
        "source": str(found.path),
        "facts": _facts(content, rows, modules),
        "notes": notes,
        "modules": modules,
        "grid": grid_of(rows, index_of, found.path),
        "columns": {name: rounded(values) for name, values in columns.items()},
        "layers": _layers(content.get("layers"), index_of),
        "entropy": _by_position(
            content.get("entropy_by_position"), names, "entropy_by_position", found.path, most, notes
        ),
        "rho": _by_position(content.get("rho"), names, "rho", found.path, most, notes),
        "softmax": softmax_predicted(content, names, found.path, most),
        "predicted": _predicted(content.get("predicted"), names, found.path, most, notes),
        "alarms": alarm_rows(content.get("alarms")),
    }


def _facts(content: Mapping[str, Any], rows: Sequence[Any], modules: Sequence[Any]) -> list[list[str]]:
    facts = [["heads", f"{len(rows):,} in {len(modules)} attention modules"], *read_facts(content)]
    query = number(content.get("query"))
    if query == query and query != -1:
        facts.append(["ρ is of", f"the token {-query:.0f} from the end, the last of the text"])
    return facts


def _layers(rows: Any, index_of: Mapping[str, int]) -> dict[str, Any] | None:
    """Of the tokens that enter each module, in the order of the modules."""
    if not isinstance(rows, list):
        return None
    made: dict[str, Any] = {name: [None] * len(index_of) for name in _TOKENS}
    for row in rows:
        index = index_of.get(short(row.get("module"))) if isinstance(row, Mapping) else None
        for name in _TOKENS if index is not None else ():
            made[name][index] = rounded(number(row.get(name)))
    return made


def _by_position(
    value: Any, modules: Sequence[str], what: str, path: Path, most: int, notes: list[str]
) -> dict[str, Any] | None:
    """By module (heads, stretches of positions), packed."""
    if not isinstance(value, Mapping):
        return None
    made: list[Any] = []
    sizes, longest = {1}, 1
    for name in modules:
        if value.get(name) is None:
            made.append(None)
            continue
        values = array(value[name], 2, f"{what} of {name} in {path}")
        values_shown, size = averaged(values, most)
        sizes.add(size)
        longest = max(longest, values.shape[1])
        made.append(packed(values_shown))
    if max(sizes) > 1:
        notes.append(f"{'ρ' if what == 'rho' else 'entropy'} by position is averaged over stretches of {max(sizes)}")
    return {"positions": centres(longest, max(sizes)), "modules": made}


def _predicted(value: Any, modules: Sequence[str], path: Path, most: int, notes: list[str]) -> dict[str, Any] | None:
    """ρ measured and by each law, by module; and all heads and positions counted on a grid of measured × predicted."""
    if not isinstance(value, Mapping) or not value:
        return None
    counts = {law: np.zeros((_BINS, _BINS)) for law in LAWS}
    made: list[Any] = []
    longest, stretch, sequences = 1, 1, 0.0
    for name in modules:
        one = value.get(name)
        if not isinstance(one, Mapping):
            made.append(None)
            continue
        what = f"predicted ρ of {name} in {path}"
        measured = array(one.get("measured"), 2, what)
        laws = {law: array(one[law], 2, what) for law in LAWS if one.get(law) is not None}
        if any(values.shape != measured.shape for values in laws.values()):
            raise LocaterError(f"{what} and what was measured differ in shape")
        for law, values in laws.items():
            counts[law] += _counted(measured, values)
        longest, sequences = max(longest, measured.shape[1]), max(sequences, number(one.get("sequences")))
        shown = {}
        for law, values in {"measured": measured, **laws}.items():
            thin, stretch = averaged(values, most)
            shown[law] = packed(thin)
        errors = one.get("errors")
        known = errors if isinstance(errors, Mapping) else {}
        shown["errors"] = {law: rounded(number(known.get(law)), 4) for law in LAWS}
        shown["sampling"] = rounded(number(one.get("sampling_error")), 4)
        made.append(shown)
    if stretch > 1:
        notes.append(f"predicted ρ is averaged over stretches of {stretch} positions")
    return {
        "positions": centres(longest, stretch),
        "modules": made,
        "laws": [law for law in LAWS if counts[law].any()],
        "counts": {law: counts[law].astype(int).tolist() for law in LAWS if counts[law].any()},
        "sequences": int(sequences) if sequences == sequences else 0,
    }


def _counted(measured: Array, predicted: Array) -> Array:
    """Pairs on a grid over [0, 1]², rows by measured, columns by predicted."""
    known = np.isfinite(measured) & np.isfinite(predicted)
    bins = [np.clip((values[known] * _BINS).astype(int), 0, _BINS - 1) for values in (measured, predicted)]
    made = np.zeros((_BINS, _BINS))
    np.add.at(made, (bins[0], bins[1]), 1)
    return made


def alarm_rows(value: Any) -> list[dict[str, Any]] | None:
    """Alarms as they stand in a file or come from `locater.measure.alarms`; None where nothing looked for them."""
    if not isinstance(value, list):
        return None
    rows = [each for each in value if isinstance(each, Mapping)]
    names = ("step", "kind", "module", "head", "reason")
    return [{name: _cell(row.get(name)) for name in names} for row in rows]


def _cell(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return rounded(number(value), 9)
    return None if value is None else short(value, 2000)
