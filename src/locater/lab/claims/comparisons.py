"""The comparisons that were planned for a sweep, made with its numbers: effects on perplexity, paired by seed.

An effect is the relative change of the last perplexity from the reference to the condition, its mean over seeds with
Student's 95% interval. If that contains 0, no effect is seen; a member that broke, or a seed alone, leaves it open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from locater.errors import LocaterError
from locater.io import nulled
from locater.lab.cause import Comparison, condition_of
from locater.lab.claims.series import Folders
from locater.lab.claims.statistics import Array, mean_interval, relative_change, sign_of_difference
from locater.lab.config import FREE_TO_COMPARE
from locater.lab.runs.records import Run, read_metrics, read_runs

__all__ = ["ConditionSummary", "Effect", "Effects", "effects", "effects_markdown", "has_comparisons"]

_QUANTITIES = ("perplexity", "entropy", "scale", "trace")


@dataclass(frozen=True)
class ConditionSummary:
    """Where the members of a condition ended: means over seeds, layers and heads."""

    condition: str
    seeds: int
    perplexity: float
    entropy: float
    scale: float
    trace: float


@dataclass(frozen=True)
class Effect:
    """Of a condition on perplexity, against its reference; relative."""

    name: str
    condition: str
    reference: str
    seeds: int
    change: float
    half_width: float  # of its 95% interval over seeds
    verdict: str  # lower, higher, no effect seen, cannot tell

    @property
    def measured(self) -> str:
        """In percent."""
        if not np.isfinite(self.change):
            return "broke"
        half = f" ± {100 * self.half_width:.2f}" if np.isfinite(self.half_width) else ", one seed"
        return f"{100 * self.change:+.2f}%".replace("-", "−") + half


@dataclass(frozen=True)
class Effects:
    step: int  # the last one that all members have recorded
    steps: int
    conditions: list[ConditionSummary]
    effects: list[Effect]

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = nulled(asdict(self))
        return value


def has_comparisons(folders: Folders) -> bool:
    """Whether the sweep in these folders, or in one of them, was begun with comparisons planned."""
    return any("comparisons" in run.about for run in _runs(folders))


def effects(folders: Folders) -> Effects:
    """All that was planned, in its order; folders that differ in nothing but their seeds are one sweep."""
    runs = _runs(folders)
    planned = _planned(runs)
    ends: dict[tuple[str, int], dict[str, float]] = {}
    metrics = [(run, read_metrics(run.folder)) for run in runs]
    shared = set.intersection(*(set(steps) for _, table in metrics for _, steps in table.groupby("member")["step"]))
    if not shared:
        raise LocaterError("the members of this sweep have no recorded step in common; let it go on")
    step = max(shared)
    for run, table in metrics:
        last = table[table["step"] == step].set_index("member")
        for member in run.members:
            key = condition_of(member), member.seed
            if key in ends:
                raise LocaterError(f"{run.folder} holds {member.name} once more; give each seed once")
            if member.name in last.index:
                row = last.loc[member.name]
                # weights stay where a member broke, and what they give says nothing of its condition
                broke = bool(np.isfinite(row.get("broke_at", np.nan)))
                means = {name: float(np.mean(np.asarray(row[name], dtype=float))) for name in _QUANTITIES}
                ends[key] = dict.fromkeys(_QUANTITIES, np.nan) if broke else means
    planned_seeds = {seed for run in runs for seed in run.about.get("planned_seeds", [])}
    enough = len({seed for _, seed in ends}) >= len(planned_seeds)  # others do, for a repetition
    whole = all(step >= run.config.steps for run in runs) and enough
    return Effects(step, runs[0].config.steps, _summaries(ends), [_effect(each, ends, whole) for each in planned])


def _summaries(ends: dict[tuple[str, int], dict[str, float]]) -> list[ConditionSummary]:
    made = []
    for condition in dict.fromkeys(name for name, _ in ends):
        rows = [values for (name, _), values in ends.items() if name == condition]
        means = {name: float(np.mean([row[name] for row in rows])) for name in _QUANTITIES}
        made.append(ConditionSummary(condition, len(rows), **means))
    return made


def _effect(planned: Comparison, ends: dict[tuple[str, int], dict[str, float]], whole: bool) -> Effect:
    of = {name: {seed for each, seed in ends if each == name} for name in (planned.condition, planned.reference)}
    seeds = sorted(of[planned.condition] & of[planned.reference])
    if not seeds:
        return Effect(**asdict(planned), seeds=0, change=np.nan, half_width=np.nan, verdict="cannot tell")
    reference, condition = (
        np.array([ends[name, seed]["perplexity"] for seed in seeds]) for name in (planned.reference, planned.condition)
    )
    mean, half = (float(each) for each in mean_interval(relative_change(reference, condition)))
    return Effect(
        **asdict(planned), seeds=len(seeds), change=mean, half_width=half, verdict=_verdict(reference, condition, whole)
    )


def _verdict(reference: Array, condition: Array, whole: bool) -> str:
    if not whole or len(reference) < 2 or not np.isfinite([reference, condition]).all():
        return "cannot tell"
    return {-1: "lower", 0: "no effect seen", 1: "higher"}[int(sign_of_difference(reference, condition, None))]


def effects_markdown(folders: Folders) -> str:
    """Two tables for a page: the effects, and where the conditions ended."""
    found = effects(folders)
    lines = ["| comparison | condition | against | perplexity | verdict |", "|---|---|---|---|---|"]
    most = max(each.seeds for each in found.effects)
    for each in found.effects:
        fewer = f" ({each.seeds} of {most} seeds)" if each.seeds < most else ""
        cells = each.name, f"`{each.condition}`", f"`{each.reference}`", each.measured, each.verdict + fewer
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| condition | perplexity | entropy | scale | trace |", "|---|---|---|---|---|"]
    for one in found.conditions:
        trace = f"{round(one.trace, 2) + 0.0:.2f}".replace("-", "−")  # −0 is 0
        numbers = f"{one.perplexity:.2f}", f"{one.entropy:.2f}", f"{one.scale:.1f}", trace
        lines.append(f"| `{one.condition}` | " + " | ".join(numbers) + " |")
    return "\n".join(lines) + "\n"


def _runs(folders: Folders) -> list[Run]:
    parts: Sequence[str | Path] = [folders] if isinstance(folders, str | Path) else folders
    return [run for folder in parts for run in read_runs(folder)]


def _planned(runs: Sequence[Run]) -> list[Comparison]:
    first = runs[0]
    for run in runs:
        if run.about.get("comparisons") != first.about.get("comparisons"):
            raise LocaterError(f"{first.folder} and {run.folder} were begun with different planned comparisons")
        texts = first.about.get("corpus"), run.about.get("corpus")
        if not run.config.same_but((*FREE_TO_COMPARE, "data"), first.config) or texts[0] != texts[1]:
            raise LocaterError(f"{first.folder} and {run.folder} differ in more than their members")
    _check_conditions(runs)
    planned = first.about.get("comparisons")
    if not isinstance(planned, list) or not planned:
        raise LocaterError(f"no comparisons were planned for the sweep in {first.folder}")
    return [Comparison.from_json(each) for each in planned]


def _check_conditions(runs: Sequence[Run]) -> None:
    """That a condition is the same with every seed."""
    known: dict[str, tuple[Run, dict[str, Any]]] = {}
    for run in runs:
        for member in run.members:
            own = member.intervention
            held = {} if own is None else own.to_json()
            for name in held.keys() & {"entropy_of", "noise_of"}:  # a member of the same seed
                held[name] = held[name].removesuffix(f"-s{member.seed}")
            settings = asdict(replace(member, name="any", seed=0, intervention=None)) | {"intervention": held}
            earlier, expected = known.setdefault(condition_of(member), (run, settings))
            if settings != expected:
                apart = next(name for name, value in settings.items() if value != expected[name])
                raise LocaterError(
                    f"{earlier.folder} and {run.folder} differ in the {apart} of {condition_of(member)}; folders are "
                    "one sweep only if they differ in nothing but their seeds"
                )
