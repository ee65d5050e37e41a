"""An arena's folder: a sweep for each contender, all under the same conditions, and whether each came to its end."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locater.errors import LocaterError, reason
from locater.io import inside, read_json
from locater.lab.config import Config, Member
from locater.lab.runs.lock import exclusive_lock
from locater.lab.runs.records import read_records, read_run
from locater.lab.runs.sweep import Plan
from locater.lab.runs.train import MAY_CHANGE

__all__ = ["Entry", "check_groups", "conditions", "difference", "discard_unfinished", "entries_in"]

# what may differ: the first is what is compared, and of the data the text itself is looked at
_FREE = ("method", "data", "checkpoint_every")


@dataclass(frozen=True)
class Entry:
    """A contender that the folder holds, as its sweep.json has planned it."""

    contender: str
    rule: int  # of its method, by which it was trained
    folder: Path
    config: Config
    groups: dict[Path, tuple[Member, ...]]  # by the folder of each, which is inside this one

    def conditions(self) -> dict[str, Any]:
        begun = [group for group in self.groups if (group / "run.json").exists()]
        text = read_run(begun[0]).about.get("corpus") if begun else None
        return conditions(self.config, [m for members in self.groups.values() for m in members], text)

    def records(self) -> dict[str, list[dict[str, Any]]]:
        """By member, each with all records to its end, be that the last step or the one where it broke."""
        found: dict[str, list[dict[str, Any]]] = {}
        for group, members in self.groups.items():
            by_member = _by_member(group, members)
            if missing := _missing(self.config, by_member):
                member, step = missing
                raise LocaterError(
                    f"{self.contender} in {self.folder.parent} is not whole: {member} has no record of step {step:,}; "
                    "the command that made it trains the group anew"
                )
            found |= by_member
        return found


def entries_in(folder: Path) -> list[Entry]:
    """The contenders in this folder; sweeps of anything else are passed over."""
    found = []
    for path in sorted(folder.glob("*/sweep.json")):
        value = read_json(path)
        if "contender" not in value:
            continue
        try:
            groups = {
                inside(path.parent, group["name"], path): tuple(Member(**member) for member in group["members"])
                for group in value["groups"]
            }
            config = Config.from_json(value["config"])
            found.append(Entry(str(value["contender"]), value.get("rule", 1), path.parent, config, groups))
        except (ValueError, KeyError, TypeError) as error:
            raise LocaterError(f"cannot read {path}: {reason(error)}") from error
    return found


def conditions(config: Config, members: Sequence[Member], text: str | None) -> dict[str, Any]:
    """What contenders must share to stand in one table; the text is a corpus' fingerprint, None where unknown."""
    value = config.to_json()
    value |= value.pop("model")
    shared = {key: setting for key, setting in value.items() if key not in _FREE}
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
    for group in plan.groups:
        folder = plan.folder / group.name
        if not (folder / "run.json").exists():
            continue
        run, free = read_run(folder), dict.fromkeys(MAY_CHANGE)
        same = run.members == group.members and run.config.to_json() | free == plan.config.to_json() | free
        if not same or not (plan.folder / "sweep.json").exists():
            raise LocaterError(f"{folder} holds a run that is not of this arena; choose another folder for the arena")


def discard_unfinished(plan: Plan) -> None:
    """Removes what there is of groups that were cut off, which are trained anew; `check_groups` comes before."""
    for group in plan.groups:
        folder = plan.folder / group.name
        if not (folder / "run.json").exists():
            continue
        with exclusive_lock(folder):  # nobody trains there now, and whoever did has written all there is
            if _missing(plan.config, _by_member(folder, group.members)):
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
