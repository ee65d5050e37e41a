"""A sweep, a run, a bare file of metrics, and the tables that sweep and claims write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from locater.errors import LocaterError
from locater.lab.claims import Claim, claims
from locater.lab.runs.records import Run, read_run
from locater.pages.report._find import Found, metrics_lines
from locater.pages.report._numbers import number, short
from locater.pages.report._training import Line, column, count_of, training

Noise = Mapping[str, float] | None


def sweep_section(noise: Noise, found: Found) -> Callable[[float], dict[str, Any]]:
    """Reads and judges once; what it gives makes the section in any detail."""
    runs = [read_run(folder) for folder in found.content]
    notes = list(found.notes)
    lines: list[Line] = []
    for run in runs:
        rows, damage = metrics_lines(run.folder)
        notes += damage
        by_name: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_name.setdefault(str(row.get("member")), []).append(row)
        several = len(runs) > 1 and _repeated(runs)
        for member in run.members:
            if not isinstance(member.kappa_2, int | float | None) or member.kappa_2 != member.kappa_2:
                raise LocaterError(f"kappa_2 of {short(member.name)} in {run.folder / 'run.json'} is not a number")
            name = f"{run.folder.name}/{member.name}" if several else member.name
            lines.append(Line(name, member, _in_order(by_name.get(member.name, []))))
    if not any(line.records for line in lines):
        why = f" ({notes[0]})" if notes else ""
        raise LocaterError(f"{found.path} holds no records yet; let the run go on{why}")
    lines.sort(key=_place)
    head = {
        "kind": "sweep",
        "title": short(runs[0].about.get("preset") or found.path.resolve().name),
        "source": str(found.path),
        "facts": _facts(runs, lines),
        **(_judged(found, noise) if len(lines) > 1 else {"claims": None}),
    }
    return lambda detail: head | training(lines, detail, notes)


def metrics_section(found: Found, detail: float) -> dict[str, Any]:
    """Records without a run.json: what the members are is not known, only their names."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in found.content:
        by_name.setdefault(row["member"], []).append(row)
    notes = [*found.notes, "metrics without their run.json: strengths and seeds are not known, claims are not judged"]
    lines = [Line(name, None, _in_order(rows)) for name, rows in by_name.items()]
    facts = [["members", str(len(lines))]]
    head = {"kind": "sweep", "title": found.path.name, "source": str(found.path), "facts": facts, "claims": None}
    return head | training(lines, detail, notes)


def summary_section(found: Found, _: float) -> dict[str, Any]:
    """The table `locater sweep --json` and `locater train --json` write."""
    rows = found.content["members"]
    names = list(dict.fromkeys(short(key) for row in rows for key in row))
    columns = [column(name, [row.get(name) for row in rows]) for name in names]
    folder = short(found.content["folder"])
    notes = [*found.notes, f"only where members ended; the folder {folder} has their records"]
    head = {"kind": "table", "title": Path(folder).name or folder, "source": str(found.path), "facts": []}
    return {**head, "notes": notes, "columns": columns}


def claims_section(found: Found, _: float) -> dict[str, Any]:
    """What `locater claims --json` writes."""
    rows = [_claim_row(*(row.get(name) for name in _CLAIM)) for row in found.content["claims"]]
    runs = found.content["runs"]
    folders = [short(each) for each in (runs if isinstance(runs, list) else [runs])]
    title = f"claims: {' and '.join(Path(each).name or each for each in folders)}"
    head = {"kind": "claims", "title": title, "source": str(found.path), "facts": []}
    return {**head, "notes": list(found.notes), "claims": rows}


_CLAIM = ("statement", "where", "measured", "verdict")


def _claim_row(*cells: Any) -> dict[str, str]:
    return {name: short(cell, 2000) for name, cell in zip(_CLAIM, cells, strict=True)}


def _judged(found: Found, noise: Noise) -> dict[str, Any]:
    try:
        made: list[Claim] = claims(found.path, noise=noise)
    except (LookupError, TypeError, ValueError) as error:  # records of another shape, among them a LocaterError
        return {"claims": None, "claims_note": f"the paper's claims cannot be judged here: {error}"}
    one_seed = noise is None and any(claim.evidence.get("seeds") == 1 for claim in made)
    note = {"claims_note": "one seed: differences between strengths need --seeds-from DIR, a sweep of several"}
    rows = [_claim_row(each.statement, each.where, each.measured, each.verdict) for each in made]
    return {"claims": rows, **(note if one_seed else {})}


# ---------------------------------------------------------------------- members


def _repeated(runs: Sequence[Run]) -> bool:
    names = [member.name for run in runs for member in run.members]
    return len(set(names)) < len(names)


def _in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By step; of a step recorded twice, the later line."""
    by_step = {
        row["step"]: row for row in rows if isinstance(row.get("step"), int) and not isinstance(row["step"], bool)
    }
    return [by_step[step] for step in sorted(by_step)]


def _place(line: Line) -> tuple[str, float, int]:
    member = line.member
    assert member is not None
    reading = "" if member.kappa_2 is None else member.reading.replace("figures", "")
    return reading, -1.0 if member.kappa_2 is None else member.kappa_2, member.seed


def _facts(runs: Sequence[Run], lines: Sequence[Line]) -> list[list[str]]:
    config, about = runs[0].config, runs[0].about
    model = config.model
    strengths = {line.member.kappa_2 for line in lines if line.member}
    seeds = {line.member.seed for line in lines if line.member}
    last = max(line.records[-1]["step"] for line in lines if line.records)
    norm = "" if model.norm == "post" else f", {model.norm}-norm"
    rotary = ", rotary positions" if model.positions == "rotary" else ""
    facts = [
        [
            "model",
            f"d = {model.width}, {count_of(model.layers, 'layer')}, {count_of(model.heads, 'head')}{norm}{rotary}",
        ],
        ["text", f"{short(about.get('text') or config.data or 'embedded corpus')}, T = {model.tokens}"],
        ["members", f"{len(lines)} ({count_of(len(strengths), 'strength')}, {count_of(len(seeds), 'seed')})"],
        ["updates", f"{last:,}" if last >= config.steps else f"{last:,} of {config.steps:,}"],
        ["batch", f"{config.batch} × {model.tokens} tokens, {config.precision}"],
    ]
    if about.get("hardware"):
        seconds = sum(number(run.about.get("seconds")) for run in runs)
        facts.append(["trained on", short(about["hardware"]) + (f", {seconds:,.0f} s" if seconds == seconds else "")])
    return facts
