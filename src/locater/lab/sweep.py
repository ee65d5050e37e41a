"""Many members: stacked in groups, the groups one after the other here, or spread over a Ray cluster.

A sweep's folder holds `sweep.json`, the plan, and a run's folder for each group. Starting it again goes on with what is
not finished.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locater.errors import LocaterError
from locater.files import writable_folder, write_file
from locater.lab.config import Config, Member
from locater.lab.data import load_corpus
from locater.lab.stack import check_sizes
from locater.lab.train import MAY_CHANGE, Progress, train

__all__ = ["Group", "Plan", "sweep"]


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
        parts = [tuple(members[start : start + group_size]) for start in range(0, len(members), group_size)]
        groups = tuple(Group(f"group-{i:02d}", part) for i, part in enumerate(parts))
        return cls(Path(folder).absolute(), config, groups, about)

    def write(self) -> None:
        """Puts the plan into the folder; one that is there must be the same (more steps are welcome)."""
        if (self.folder / "run.json").exists():
            raise LocaterError(f"{self.folder} holds a single run; choose another folder for a sweep")
        path = writable_folder(self.folder) / "sweep.json"
        config = self.config.to_json()
        groups = [{"name": g.name, "members": [m.to_json() for m in g.members]} for g in self.groups]
        if path.exists():
            try:
                earlier = json.loads(path.read_text())
                free = dict.fromkeys(MAY_CHANGE)
                then = Config.from_json(earlier["config"]).to_json()  # an older file lacks what is newer
                same = earlier["groups"] == groups and then | free == config | free
            except (ValueError, KeyError, TypeError) as error:
                raise LocaterError(f"cannot read {path}: {error}") from error
            if not same:
                raise LocaterError(
                    f"{self.folder} holds another sweep; choose another folder, or remove it to start anew"
                )
        value = {"format": 1, "config": config, "groups": groups, **self.about}
        write_file(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


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
    tell = watch or (lambda _group, _progress: None)
    if engine == "ray":
        from locater.lab._ray import run_on_cluster

        plan.write()
        run_on_cluster(plan, address=address, device=device, watch=tell)
        return plan
    corpus = load_corpus(config.data, unit=config.unit, vocabulary=config.vocabulary)
    check_sizes(config, corpus)  # before anything is written
    plan.write()
    for group in plan.groups:
        train(
            config,
            group.members,
            plan.folder / group.name,
            corpus=corpus,
            device=device,
            watch=lambda progress, name=group.name: tell(name, progress),  # type: ignore[misc]
            about=plan.about,
        )
    return plan
