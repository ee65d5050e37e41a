"""A scan: layer × head maps, a table, the eigenvalues of each head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from locater.errors import LocaterError
from locater.models import Scan
from locater.models.unread import in_words
from locater.pages.report._find import Found
from locater.pages.report._numbers import chosen, number, packed, rounded, short

_COLUMNS = (
    "trace", "scale", "xi", "eta", "r", "spectral_norm", "effective_rank", "symmetric_share", "trace_square",
    "rho_first", "rho_middle", "rho_last", "attention_entropy",
)  # fmt: skip
_EIGENVALUES = 400_000  # in one page, at full detail


def scan_section(found: Found, detail: float) -> dict[str, Any]:
    try:
        scan = Scan.from_json(found.content)
    except LocaterError as error:
        raise LocaterError(f"cannot show {found.path}: {error}") from error
    table, rows = scan.table, found.content["heads"]
    modules, index_of = modules_of(rows)
    notes = list(found.notes)
    if scan.unread:
        notes.append(short("; ".join(in_words(scan.unread))))
    if not table["attention_regime"].any():
        notes.append("no attention regime in this file: scan again with this version")
    return {
        "kind": "scan",
        "title": short(scan.title) or found.path.name,
        "source": str(found.path),
        "facts": _facts(scan, len(modules)),
        "notes": notes,
        "modules": modules,
        "grid": grid_of(rows, index_of, found.path),
        "columns": {name: rounded(table[name].to_numpy(dtype=float)) for name in _COLUMNS},
        "tokens": scan.tokens,
        "regime": _words(table["regime"]),
        "attention_regime": _words(table["attention_regime"]),
        "eigenvalues": _eigenvalues(scan, modules, detail, notes),
    }


def _words(column: Iterable[str]) -> dict[str, Any]:
    """A column of few different words: the words, and the index of each row's, None where it has none."""
    words = [short(name) for name in column]
    names = sorted(set(words) - {""})
    return {"names": names, "rows": [names.index(word) if word else None for word in words]}


def modules_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The attention modules in their order, each with a short label, and the index of each name."""
    first: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        first.setdefault(short(row.get("module")), row)
    several = len({short(row.get("kind")) for row in first.values()}) > 1
    modules = []
    for name, row in first.items():
        layer = number(row.get("layer"))
        label = f"{layer:.0f}" if layer == layer else name
        modules.append({"name": name, "label": f"{short(row.get('kind'))} {label}" if several else label})
    labels = [module["label"] for module in modules]
    if len(set(labels)) < len(labels):  # rows of a map need names that differ
        for module in modules:
            module["label"] = module["name"]
    return modules, {name: index for index, name in enumerate(first)}


def grid_of(rows: Sequence[Mapping[str, Any]], index_of: Mapping[str, int], path: Path) -> dict[str, list[int]]:
    """Where each row stands on a layer × head map."""
    heads = []
    for index, row in enumerate(rows):
        head = row.get("head")
        if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < 10_000:
            raise LocaterError(
                f"cannot show {path}: head of its row {index + 1} must be a number from 0, got {head!r:.60}"
            )
        heads.append(head)
    return {"module": [index_of[short(row.get("module"))] for row in rows], "head": heads}


def _facts(scan: Scan, modules: int) -> list[list[str]]:
    table = scan.table
    facts = [["heads", f"{len(table):,} in {modules} attention modules"]]
    widths = table[["d_model", "d_head"]].drop_duplicates().to_numpy()
    if len(widths) == 1:
        facts.append(["widths", "d_model {:,}, d_head {}".format(*widths[0])])
    for label, name in (("softmax", "attention_regime"), ("shape of ρ", "regime")):
        counts = sorted(
            ((count, short(word)) for word, count in table[name].value_counts().items() if word), reverse=True
        )
        if counts:
            facts.append([label, ", ".join(f"{count} {word}" for count, word in counts)])
    if table["rope"].any():
        one = scan.average_offsets is None
        facts.append(["RoPE", f"offset {scan.offset:g}" if one else f"averaged over {scan.average_offsets} offsets"])
    facts.append(["norm", "folded in" if scan.fold_norm else "not folded in"])
    return facts


def _eigenvalues(scan: Scan, modules: Sequence[Mapping[str, Any]], detail: float, notes: list[str]) -> list[Any] | None:
    """By module (heads, eigenvalues, 2), packed; None for the page where a file has none."""
    if not scan.eigenvalues:
        notes.append("no eigenvalues in this file: scan again with --json of this version to see clouds")
        return None
    most = max(8, int(_EIGENVALUES * detail / len(scan.table)))
    clouds = {short(name): values for name, values in scan.eigenvalues.items()}
    made = [packed(_largest_first(clouds[module["name"]], most)) for module in modules]
    longest = max(values.shape[1] for values in clouds.values())
    if longest > most:
        notes.append(f"clouds show {most} of the {longest} eigenvalues of a head")
    return made


def _largest_first(cloud: Any, most: int) -> Any:
    """At most so many of each head, over the whole range of sizes. (heads, K) complex → (heads, most, 2)"""
    order = np.argsort(-np.nan_to_num(np.abs(cloud)), axis=1, kind="stable")
    kept = np.take_along_axis(cloud, order[:, chosen(cloud.shape[1], most)], axis=1)
    return np.stack([kept.real, kept.imag], axis=-1)
