"""Training by its records: curves, ρ over training, the final spectra, where members ended.

Legend: E members, N recorded steps, L layers, H heads, T token positions, K eigenvalues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from locater.errors import LocaterError
from locater.lab.config import Member
from locater.pages.report._numbers import Array, array, averaged, centres, chosen, number, packed, rounded, short

# what one array may take of the page, in numbers, at full detail
_MAPS = 700_000
_STEPS = 600
_COLUMNS = 240
_POSITIONS = 256
_EIGENVALUES = 200_000


@dataclass(frozen=True)
class Line:
    """A member and its records in the order of their steps."""

    name: str
    member: Member | None
    records: list[dict[str, Any]]


def training(lines: Sequence[Line], detail: float, remarks: Sequence[str]) -> dict[str, Any]:
    """The part of a section that all kinds of runs share, with the remarks and what was thinned as its notes."""
    notes = list(remarks)
    steps = np.array(sorted({record["step"] for line in lines for record in line.records}))
    kept = chosen(len(steps), max(20, int(_STEPS * detail)))
    if len(kept) < len(steps):
        notes.append(f"curves show {len(kept)} of {len(steps)} recorded steps")
    unusable: dict[str, int] = {}
    labels, by_strength = _labels(lines)
    members = [
        {
            "name": short(line.name),
            "label": label,
            "kappa": line.member.kappa_2 if line.member else None,
            "known": by_strength,
            "seed": line.member.seed if line.member else None,
            "reading": line.member.reading if line.member else "",
            "target": line.member.target if line.member and line.member.mean_strength else None,
        }
        for line, label in zip(lines, labels, strict=True)
    ]
    curves = {name: _curve(lines, steps, name, unusable)[:, kept] for name in _CURVES}
    section = {
        "members": members,
        "steps": steps[kept].tolist(),
        "curves": {name: packed(values, floats=True) for name, values in curves.items()},
        "last": _last(lines, labels),
        "rho": _rho(lines, steps, detail, notes, unusable),
        "spectra": _spectra(lines, detail, notes),
    }
    notes += [
        f"{count_of(count, 'record')} {'has' if count == 1 else 'have'} no {name} that can be read"
        for name, count in unusable.items()
    ]
    return section | {"notes": notes}


def _values(record: Mapping[str, Any], name: str, dimensions: int, unusable: dict[str, int]) -> Array | None:
    """A record's array, or None where there is none; counts those that are something else."""
    value = record.get(name)
    if value is None:
        return None
    try:
        made = array(value, dimensions, name)
    except LocaterError:
        unusable[name] = unusable.get(name, 0) + 1
        return None
    return made if made.size else None


_CURVES: dict[str, Callable[[Array], Array]] = {
    "perplexity": lambda values: values.reshape(1),
    "scale": lambda values: _by_layer(values),
    "entropy": lambda values: _by_layer(values),
    "trace": lambda values: _by_layer(values),
}


def _by_layer(values: Array) -> Array:
    """Means over heads: of all layers together, then of each if there are several. (L, H) → (1 + L) or (1)."""
    with np.errstate(invalid="ignore"):
        layers = values.mean(1)
    return np.array([layers.mean(), *(layers if len(layers) > 1 else [])])


def _curve(lines: Sequence[Line], steps: Any, name: str, unusable: dict[str, int]) -> Array:
    """(E, N, parts), NaN where a member has no record."""
    dimensions = 0 if name == "perplexity" else 2
    column_of = {int(step): column for column, step in enumerate(steps)}
    found = [
        (row, column_of[record["step"]], _CURVES[name](values))
        for row, line in enumerate(lines)
        for record in line.records
        if (values := _values(record, name, dimensions, unusable)) is not None
    ]
    parts = max((len(values) for _, _, values in found), default=1)
    made = np.full((len(lines), len(steps), parts), np.nan)
    for row, column, values in found:
        made[row, column, : len(values)] = values
    return made


def _last(lines: Sequence[Line], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Where each member ended, as columns of a table."""
    columns: dict[str, list[Any]] = {"member": list(labels)}
    broken: list[Any] = []
    for line in lines:
        last = line.records[-1] if line.records else {}
        perplexities = [value for record in line.records if (value := number(record.get("perplexity"))) == value]
        row = {
            "updates": number(last.get("step")),
            "perplexity": number(last.get("perplexity")),
            "best perplexity": min(perplexities, default=np.nan),
            "tr W": _reduced(last, "trace", np.mean),
            "scale": _reduced(last, "scale", np.mean),
            "entropy": _reduced(last, "entropy", np.mean),
            "max logit": _reduced(last, "max_logit", np.max),
            "rank residual": _reduced(last, "rank_residual", lambda values: values.reshape(-1)[-1]),
        }
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
        broken.append(max((number(record.get("broke_at")) for record in line.records), default=np.nan))
    if any(step == step for step in broken):
        columns["broke at"] = broken
    return [column(name, values) for name, values in columns.items()]


def _reduced(record: Mapping[str, Any], name: str, reduce: Callable[[Array], Any]) -> float:
    try:
        values = np.asarray(record.get(name), dtype=float)
        return float(reduce(values)) if values.size else np.nan
    except (TypeError, ValueError, OverflowError):
        return np.nan


def column(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """A column of a table: numbers if all that is there are numbers, else words."""
    there = [value for value in values if value is not None]
    if there and all(isinstance(value, int | float) and not isinstance(value, bool) for value in there):
        return {"name": short(name), "numbers": [rounded(number(value), 6) for value in values]}
    return {"name": short(name), "words": [short(value) for value in values]}


def _rho(
    lines: Sequence[Line], steps: Any, detail: float, notes: list[str], unusable: dict[str, int]
) -> dict[str, Any] | None:
    """ρ over training: mean over heads, and each head where there are several and room for them."""
    maps = {
        (row, record["step"]): values
        for row, line in enumerate(lines)
        for record in line.records
        if (values := _values(record, "rho", 3, unusable)) is not None
    }
    if not maps:
        return None
    shape = next(iter(maps.values())).shape  # (L, H, T)
    with_rho = [step for step in steps.tolist() if any((row, step) in maps for row in range(len(lines)))]
    columns = [with_rho[i] for i in chosen(len(with_rho), max(12, int(_COLUMNS * detail)))]
    made = np.full((len(lines), len(columns), *shape), np.nan)
    for row in range(len(lines)):
        for column, step in enumerate(columns):
            values = maps.get((row, step))
            if values is not None and values.shape == shape:
                made[row, column] = values
    values, size = averaged(made, max(16, int(_POSITIONS * detail)))
    mean = values.mean((2, 3))[:, :, None]  # (E, N, 1, T)
    heads, names = mean, ["mean over heads"]
    several = shape[0] * shape[1] > 1
    if several and values.size + mean.size <= _MAPS * detail:
        heads = np.concatenate([mean, values.reshape(*values.shape[:2], -1, values.shape[-1])], axis=2)
        names += [f"layer {layer}, head {head}" for layer in range(shape[0]) for head in range(shape[1])]
    elif several:
        notes.append("ρ of single heads is left out of the map for want of room; their mean is shown")
    if len(columns) < len(with_rho):
        notes.append(f"ρ is shown at {len(columns)} of {len(with_rho)} recorded steps")
    if size > 1:
        notes.append(f"ρ is averaged over stretches of {size} token positions")
    low, high = _colours(heads)
    return {
        "steps": columns,
        "positions": centres(shape[2], size),
        "parts": names,
        "values": packed(np.moveaxis(heads, 2, 1)),  # (E, parts, N, T)
        "range": rounded([low, high]),
    }


def _colours(values: Array) -> tuple[float, float]:
    """Where nearly all of ρ lies, but 0.3 wide at least: a narrower scale makes patterns of sampling errors."""
    seen = values[np.isfinite(values)]
    low, high = (float(each) for each in np.quantile(seen, (0.005, 0.995))) if len(seen) else (0.0, 1.0)
    low = max(0.0, min(low - max(0.0, 0.3 - (high - low)) / 2, 0.7))
    return low, max(high, low + 0.3)


def _spectra(lines: Sequence[Line], detail: float, notes: list[str]) -> dict[str, Any] | None:
    """Eigenvalues of W_QK in the last record that has them."""
    found: dict[int, tuple[int, Array]] = {}
    for row, line in enumerate(lines):
        for record in reversed(line.records):
            values = _values(record, "eigenvalues", 4, {})
            if values is not None and values.shape[-1] == 2:
                found[row] = record["step"], values
                break
    if not found:
        return None
    shape = next(iter(found.values()))[1].shape  # (L, H, K, 2)
    made = np.full((len(lines), *shape), np.nan)
    for row, (_, values) in found.items():
        if values.shape == shape:
            made[row] = values
    room = int(_EIGENVALUES * detail) // max(1, len(lines) * shape[0] * shape[1])
    kept = chosen(shape[2], max(8, room))
    if len(kept) < shape[2]:
        notes.append(f"spectra show {len(kept)} of the {shape[2]} eigenvalues of a head")
    parts = [f"layer {layer}, head {head}" for layer in range(shape[0]) for head in range(shape[1])]
    return {
        "parts": parts,
        "steps": [found[row][0] if row in found else None for row in range(len(lines))],
        "values": packed(made[:, :, :, kept].reshape(len(lines), len(parts), -1, 2)),
    }


def _labels(lines: Sequence[Line]) -> tuple[list[str], bool]:
    """Strength and seed where no two members share them, else names; and whether it is the former."""
    made = []
    for line in lines:
        if line.member is not None:
            strength = "no LocAteR" if line.member.kappa_2 is None else f"κ₂ = {line.member.kappa_2:g}"
            reading = "" if line.member.reading == "figures" else f", {line.member.reading}"
            made.append(f"{strength}{reading}, seed {line.member.seed}")
    if len(set(made)) == len(lines):
        return made, True
    return [short(line.name) for line in lines], False


def count_of(amount: int, what: str) -> str:
    return f"{amount} {what}{'' if amount == 1 else 's'}"
