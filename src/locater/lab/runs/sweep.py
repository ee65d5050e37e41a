"""Many members: stacked in groups, the groups one after the other here, or spread over a Ray cluster.

A sweep's folder holds `sweep.json`, the plan, and a run's folder for each group. Starting it again goes on with what is
not finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from locater.errors import LocaterError, reason
from locater.io import inside, json_bytes, read_json, remove_unfinished, writable_folder, write_file
from locater.lab.config import FREE_TO_RESUME, Config, Member
from locater.lab.data import Corpus, load_corpus
from locater.lab.engine.stack import check_sizes
from locater.lab.intervention import check_interventions
from locater.lab.runs.lock import exclusive_lock
from locater.lab.runs.train import Progress, train

__all__ = ["Group", "Plan", "run_plan", "sweep"]

_FILE = "sweep.json"


@dataclass(frozen=True)
class Group:
    """Members that train stacked, in a folder of their own."""

    name: str
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Plan:
    """What a sweep will do, and where."""

    folder: Path
    config: Config
    groups: tuple[Group, ...]
    about: dict[str, Any]

    @classmethod
    def of(
        cls, folder: str | Path, config: Config, members: Sequence[Member], group_size: int, about: dict[str, Any]
    ) -> Plan:
        if group_size < 1:
            raise LocaterError(f"a group needs at least one member, got {group_size}")
        groups = tuple(Group(f"group-{i:02d}", part) for i, part in enumerate(_parts(members, group_size)))
        for group in groups:
            check_interventions(config.model, group.members)
        return cls(Path(folder).absolute(), config, groups, about)

    @classmethod
    def from_json(cls, value: dict[str, Any], path: Path) -> Plan:
        """What was read from the sweep.json at `path`."""
        try:
            config = Config.from_json(value.pop("config"))
            groups = tuple(
                Group(group["name"], tuple(Member.from_json(member) for member in group["members"]))
                for group in value.pop("groups")
            )
            for group in groups:
                inside(path.parent, group.name, path)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LocaterError(f"cannot read {path}: {reason(error)}") from error
        return cls(path.parent, config, groups, value)

    def begun(self) -> Iterator[tuple[Path, Group]]:
        """The groups whose folder holds a run, be it theirs or another."""
        folders = ((self.folder / group.name, group) for group in self.groups)
        return ((folder, group) for folder, group in folders if (folder / "run.json").exists())

    def check(self) -> None:
        """That the folder is free for this plan, or holds the same (more steps are welcome); changes nothing."""
        if (self.folder / "run.json").exists():
            raise LocaterError(f"{self.folder} holds a single run; choose another folder for a sweep")
        path = self.folder / _FILE
        if not path.exists():
            return
        earlier = Plan.from_json(read_json(path), path)
        if earlier.groups != self.groups or not self.config.same_but(FREE_TO_RESUME, earlier.config):
            raise LocaterError(f"{self.folder} holds another sweep; choose another folder, or remove it to start anew")
        if earlier.about.get("comparisons") != self.about.get("comparisons"):
            raise LocaterError(
                f"{self.folder} was begun with other planned comparisons, which stay as they are: choose another folder"
            )

    def write(self) -> None:
        """Puts the plan into the folder, if it is free for it."""
        self.check()
        groups = [{"name": group.name, "members": [m.to_json() for m in group.members]} for group in self.groups]
        value = {"format": 1, "config": self.config.to_json(), "groups": groups, **self.about}
        with exclusive_lock(writable_folder(self.folder)):
            remove_unfinished(self.folder)
            write_file(self.folder / _FILE, json_bytes(value, indent=1) + b"\n")


def _parts(members: Sequence[Member], size: int) -> list[tuple[Member, ...]]:
    """In their order, at most `size` each; neighbours of one seed stay together if one of them follows another."""
    runs = [tuple(run) for _, run in groupby(members, key=lambda member: member.seed)]
    follow = [any(member.intervention and member.intervention.leaders for member in run) for run in runs]
    together = [part for run, one in zip(runs, follow, strict=True) for part in ([run] if one else [(m,) for m in run])]
    parts: list[tuple[Member, ...]] = []
    for part in together:
        if len(part) > size:
            raise LocaterError(
                f"the {len(part)} members with seed {part[0].seed} follow each other and train as one group, "
                f"which is to have at most {size}: choose a group size of {len(part)} or more"
            )
        if parts and len(parts[-1]) + len(part) <= size:
            parts[-1] += part
        else:
            parts.append(part)
    return parts


def sweep(
    config: Config,
    members: Sequence[Member],
    folder: str | Path,
    *,
    group_size: int = 24,
    engine: str = "local",
    address: str | None = None,
    device: str | None = None,
    watch: Callable[[str, Progress], None] | None = None,
    about: dict[str, Any] | None = None,
) -> Plan:
    """Trains all members, `group_size` of them stacked at a time. Engines: local, ray."""
    if engine not in ("local", "ray"):
        raise LocaterError(f"engine must be local or ray, got {engine!r}")
    if address is not None and engine != "ray":
        raise LocaterError("an address is for the engine ray: add --engine ray")
    plan = Plan.of(folder, config, members, group_size, about or {})
    watch = watch or (lambda _group, _progress: None)
    if engine == "ray":
        from locater.lab.runs.ray import run_on_cluster

        plan.write()
        run_on_cluster(plan, address=address, device=device, watch=watch)
        return plan
    corpus = load_corpus(config.data, unit=config.unit, vocabulary=config.vocabulary)
    check_sizes(config, corpus)  # before anything is written
    run_plan(plan, corpus, device=device, watch=watch)
    return plan


def run_plan(plan: Plan, corpus: Corpus, *, device: str | None, watch: Callable[[str, Progress], None]) -> None:
    """Trains the groups of a plan here, one after the other."""
    plan.write()
    for group in plan.groups:
        train(
            plan.config,
            group.members,
            plan.folder / group.name,
            corpus=corpus,
            device=device,
            watch=lambda progress, name=group.name: watch(name, progress),  # type: ignore[misc]
            about=plan.about,
        )
