"""A scan: layer × head maps, a table, the eigenvalues of each head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from locater.errors import LocaterError
from locater.pages.report._find import Found
from locater.pages.report._numbers import array, chosen, number, packed, rounded, word

__all__ = ["grid_of", "modules_of", "scan_section"]

_COLUMNS = (
    "trace", "scale", "xi", "eta", "r", "spectral_norm", "effective_rank", "symmetric_share", "trace_square",
    "rho_first", "rho_middle", "rho_last",
)  # fmt: skip
_EIGENVALUES = 400_000  # in one page, at full detail


def scan_section(found: Found, detail: float) -> dict[str, Any]:
    content = found.content
    rows = content["heads"]
    model = word(content.get("model")) or found.path.name
    modules, place = modules_of(rows)
    notes = list(found.notes)
    regimes = sorted({word(row.get("regime")) for row in rows} - {""})
    columns = {name: [number(row.get(name)) for row in rows] for name in _COLUMNS if any(name in row for row in rows)}
    return {
        "kind": "scan",
        "title": "/".join(Path(model).parts[-2:]) or model,
        "source": str(found.path),
        "facts": _facts(content, rows, modules, regimes),
        "notes": notes,
        "modules": modules,
        "grid": grid_of(rows, place, found.path),
        "columns": {name: rounded(values) for name, values in columns.items()},
        "regimes": regimes,
        "regime": [regimes.index(name) if (name := word(row.get("regime"))) in regimes else None for row in rows],
        "eigenvalues": _eigenvalues(content.get("eigenvalues"), modules, len(rows), found.path, detail, notes),
    }


def modules_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The attention modules in their order, each with a short label, and the place of each name."""
    first: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        first.setdefault(word(row.get("module")), row)
    several = len({word(row.get("kind")) for row in first.values()}) > 1
    modules = []
    for name, row in first.items():
        layer = number(row.get("layer"))
        label = f"{layer:.0f}" if layer == layer else name
        modules.append({"name": name, "label": f"{word(row.get('kind'))} {label}" if several else label})
    labels = [module["label"] for module in modules]
    if len(set(labels)) < len(labels):  # rows of a map need names that differ
        for module in modules:
            module["label"] = module["name"]
    return modules, {name: index for index, name in enumerate(first)}


def grid_of(rows: Sequence[Mapping[str, Any]], place: Mapping[str, int], path: Path) -> dict[str, list[int]]:
    """Where each row stands on a layer × head map."""
    heads = []
    for index, row in enumerate(rows):
        head = row.get("head")
        if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < 10_000:
            raise LocaterError(
                f"cannot show {path}: head of its row {index + 1} must be a number from 0, got {head!r:.60}"
            )
        heads.append(head)
    return {"module": [place[word(row.get("module"))] for row in rows], "head": heads}


def _facts(
    content: Mapping[str, Any], rows: Sequence[Any], modules: Sequence[Any], regimes: Sequence[str]
) -> list[list[str]]:
    counts = [(sum(word(row.get("regime")) == name for row in rows), name) for name in regimes]
    facts = [["heads", f"{len(rows):,} in {len(modules)} attention modules"]]
    widths = sorted(
        {
            (int(a), int(b))
            for row in rows
            if (a := number(row.get("d_model"))) == a and (b := number(row.get("d_head"))) == b
        }
    )
    if len(widths) == 1:
        facts.append(["widths", f"d_model {widths[0][0]:,}, d_head {widths[0][1]}"])
    facts.append(["shape of ρ", ", ".join(f"{count} {name}" for count, name in sorted(counts, reverse=True))])
    if any(row.get("rope") for row in rows):
        average, offset = number(content.get("average_offsets")), number(content.get("offset"))
        facts.append(["RoPE", f"averaged over {average:.0f} offsets" if average == average else f"offset {offset:g}"])
    facts.append(["norm", "folded in" if content.get("fold_norm") else "not folded in"])
    return facts


def _eigenvalues(
    value: Any, modules: Sequence[Mapping[str, Any]], heads: int, path: Path, detail: float, notes: list[str]
) -> list[Any] | None:
    """By module (heads, eigenvalues, 2), packed; None for the page where a file has none."""
    if not isinstance(value, Mapping) or not value:
        notes.append("no eigenvalues in this file: scan again with --json of this version to see clouds")
        return None
    most = max(8, int(_EIGENVALUES * detail / max(1, heads)))
    made: list[Any] = []
    thinned = 0
    for module in modules:
        pairs = value.get(module["name"])
        if pairs is None:
            made.append(None)
            continue
        cloud = array(pairs, 3, f"eigenvalues of {module['name']} in {path}")
        if cloud.shape[-1] != 2:
            raise LocaterError(f"eigenvalues of {module['name']} in {path} must be pairs")
        cloud = _upper_first(cloud)
        kept = chosen(cloud.shape[1], most)
        thinned = max(thinned, cloud.shape[1] if len(kept) < cloud.shape[1] else 0)
        made.append(packed(cloud[:, kept]))
    if thinned:
        notes.append(f"clouds show {most} of the {thinned} eigenvalues of a head")
    return made


def _upper_first(cloud: Any) -> Any:
    """Sorted by size, so that thinning keeps the whole range."""
    size = np.hypot(cloud[..., 0], cloud[..., 1])
    return np.take_along_axis(cloud, np.argsort(-np.nan_to_num(size), axis=1, kind="stable")[..., None], axis=1)
