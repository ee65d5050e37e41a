"""An arena's folder: a sweep for each contender, all under the same conditions, and whether each came to its end."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locater.errors import LocaterError
from locater.io import read_json
from locater.lab.config import FREE_IN_ARENA, FREE_TO_RESUME, Config, Member
from locater.lab.runs.lock import exclusive_lock
from locater.lab.runs.records import read_records, read_run
from locater.lab.runs.sweep import Plan

__all__ = ["Entry", "check_groups", "conditions", "difference", "discard", "discard_unfinished", "entries_in"]


@dataclass(frozen=True)
class Entry:
    """A contender that the folder holds, as its sweep.json has planned it."""

    plan: Plan

    @property
    def contender(self) -> str:
        return str(self.plan.about["contender"])

    @property
    def version(self) -> object:
        """Of its method's formula, by which it was trained."""
        return self.plan.about.get("rule", 1)

    @property
    def members(self) -> list[Member]:
        return [member for group in self.plan.groups for member in group.members]

    def conditions(self) -> dict[str, Any]:
        text = next((read_run(folder).about.get("corpus") for folder, _ in self.plan.begun()), None)
        return conditions(self.plan.config, self.members, text)

    @property
    def is_finished(self) -> bool:
        """Whether every model has all its records."""
        found = ((self.plan.folder / group.name, group.members) for group in self.plan.groups)
        return all(_missing(self.plan.config, _by_member(*each)) is None for each in found)

    def records(self) -> dict[str, list[dict[str, Any]]]:
        """By member, each with all records to its end, be that the last step or the one where it broke."""
        found: dict[str, list[dict[str, Any]]] = {}
        for group in self.plan.groups:
            by_member = _by_member(self.plan.folder / group.name, group.members)
            if missing := _missing(self.plan.config, by_member):
                arena, (member, step) = self.plan.folder.parent, missing
                raise LocaterError(
                    f"{self.contender} in {arena} is not whole: {member} has no record of step {step:,}; "
                    "the command that made it trains the group anew"
                )
            found |= by_member
        return found


def entries_in(folder: Path) -> list[Entry]:
    """The contenders in this folder; sweeps of anything else are passed over."""
    found = []
    for path in sorted(folder.glob("*/sweep.json")):
        value = read_json(path)
        if "contender" in value:
            found.append(Entry(Plan.from_json(value, path)))
    return found


def conditions(config: Config, members: Sequence[Member], text: str | None) -> dict[str, Any]:
    """What contenders must share to stand in one table; the text is a corpus' fingerprint, None where unknown."""
    shared = config.without(FREE_IN_ARENA)
    shared |= shared.pop("model")
    rates, seeds = (sorted({getattr(m, name) for m in members}) for name in ("learning_rate", "seed"))
    return shared | {"learning rates": rates, "seeds": seeds, "text": text}


def difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first condition that differs, and its two values."""
    for name, value in one.items():
        unknown = name == "text" and None in (value, other[name])
        if value != other[name] and not unknown:
            return name, value, other[name]
    return None


def check_groups(plan: Plan) -> None:
    """That the folders a plan is about to train in hold nothing, or the plan's own groups; changes nothing."""
    for folder, group in plan.begun():
        run = read_run(folder)
        same = run.members == group.members and run.config.same_but(FREE_TO_RESUME, plan.config)
        if not same or not (plan.folder / "sweep.json").exists():
            raise LocaterError(f"{folder} holds a run that is not of this arena; choose another folder for the arena")


def discard_unfinished(plan: Plan) -> None:
    """Removes what there is of groups that were cut off, which are trained anew; `check_groups` comes before."""
    for folder, group in plan.begun():
        with exclusive_lock(folder):  # nobody trains there now, and whoever did has written all there is
            if _missing(plan.config, _by_member(folder, group.members)):
                _remove_run(folder)


def discard(plan: Plan) -> None:
    """Removes all that was trained by a plan, and the plan; `check_groups` comes before."""
    for folder, _ in plan.begun():
        with exclusive_lock(folder):
            _remove_run(folder)
    (plan.folder / "sweep.json").unlink()


def _remove_run(folder: Path) -> None:
    # the metrics first: without run.json they would be taken for another run's
    for name in ("metrics.jsonl", "metrics.jsonl.gz", "run.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _by_member(folder: Path, members: Sequence[Member]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {member.name: [] for member in members}
    for record in read_records(folder):
        if record["member"] in found:
            found[record["member"]].append(record)
    return found


def _missing(config: Config, by_member: dict[str, list[dict[str, Any]]]) -> tuple[str, int] | None:
    """A member and the first step whose record it lacks; after it broke, it needs none."""
    due = [step for step in range(config.steps + 1) if config.records_at(step)]
    for member, records in by_member.items():
        there = {record["step"] for record in records}
        end = min((record["step"] for record in records if "broke_at" in record), default=config.steps)
        for step in due:
            if step <= end and step not in there:
                return member, step
    return None
