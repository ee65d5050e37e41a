"""An arena's folder: a sweep for each contender, all under the same conditions, and whether each came to its end."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locater.errors import LocaterError
from locater.lab.config import Config, Member
from locater.lab.lock import alone
from locater.lab.records import read_records, read_run

__all__ = ["Entry", "conditions", "difference", "discard_unfinished", "entries_in"]

# what may differ: the first is what is compared, and of the data the text itself is looked at
_FREE = ("method", "data", "checkpoint_every")


@dataclass(frozen=True)
class Entry:
    """A contender that the folder holds, as its sweep.json has planned it."""

    contender: str
    rule: int  # of its method, by which it was trained
    folder: Path
    config: Config
    groups: dict[str, tuple[Member, ...]]

    def conditions(self) -> dict[str, Any]:
        begun = [self.folder / name for name in self.groups if (self.folder / name / "run.json").exists()]
        text = read_run(begun[0]).about.get("corpus") if begun else None
        return conditions(self.config, [m for members in self.groups.values() for m in members], text)

    def records(self) -> dict[str, list[dict[str, Any]]]:
        """By member, each with all records to its end, be that the last step or the one where it broke."""
        found: dict[str, list[dict[str, Any]]] = {}
        for group, members in self.groups.items():
            by_member = _by_member(self.folder / group, members)
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
        try:
            value = json.loads(path.read_text())
            if "contender" not in value:
                continue
            groups = {group["name"]: tuple(Member(**m) for m in group["members"]) for group in value["groups"]}
            config = Config.from_json(value["config"])
            found.append(Entry(value["contender"], value.get("rule", 1), path.parent, config, groups))
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise LocaterError(f"cannot read {path}: {error}") from error
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


def discard_unfinished(entry: Entry) -> None:
    """Removes the records of groups that were cut off, and what checkpoints there are: they are trained anew."""
    for group, members in entry.groups.items():
        folder = entry.folder / group
        if not (folder / "run.json").exists():
            continue
        with alone(folder, uuid.uuid4().hex):  # nobody trains there now, and whoever did has written all there is
            if _missing(entry.config, _by_member(folder, members)):
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
