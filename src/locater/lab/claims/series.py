"""The records of a sweep as arrays: a line a member, on one grid of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from locater.errors import LocaterError
from locater.lab.claims.statistics import Array, relative_change
from locater.lab.config import FREE_TO_COMPARE, Config, Member
from locater.lab.runs.records import Run, read_metrics, read_runs

__all__ = ["FIGURE_OF", "Folders", "Sweep", "kappa_name", "read_sweep", "seed_spread"]

Folders: TypeAlias = str | Path | Sequence[str | Path]  # of one sweep, or of its seeds a few at a time

FIGURE_OF = {(128, 1): 6, (32, 1): 8, (32, 3): 9, (32, 6): 10, (128, 3): 11, (128, 6): 12}
"""The paper's figure of a model's width and layers."""


@dataclass(frozen=True)
class Sweep:
    """The members the paper's figures show, their records on one grid of steps; NaN where a member has none."""

    config: Config
    members: tuple[Member, ...]  # E: no LocAteR first, then κ₂ rising, then seeds
    steps: NDArray[np.int64]  # N
    recorded: NDArray[np.bool_]  # (E, N)
    values: dict[str, Array]  # by _QUANTITIES: (E, N), means over heads
    rho: Array  # (E, N, heads of all layers, T)

    @property
    def kappas(self) -> list[float | None]:
        return list(dict.fromkeys(member.kappa_2 for member in self.members))

    def of(self, kappa: float | None) -> dict[int, int]:
        """Seed → index of the members of one strength."""
        return {member.seed: index for index, member in enumerate(self.members) if member.kappa_2 == kappa}

    def at(self, columns: NDArray[np.bool_]) -> Sweep:
        """This sweep at some of its steps."""
        values = {name: value[:, columns] for name, value in self.values.items()}
        return replace(
            self, steps=self.steps[columns], recorded=self.recorded[:, columns], values=values, rho=self.rho[:, columns]
        )

    def even(self) -> Sweep:
        """At evenly spaced steps: the early records 1, 2, 4, … would outweigh the rest of training."""
        return self.at((self.steps > 0) & (self.steps % self.config.record_every == 0))

    def every(self, updates: int) -> Sweep:
        """At the multiples of `updates`, whatever else was recorded; an error if one of them was not."""
        wanted = np.arange(updates, self.steps[-1] + 1, updates)
        missing = wanted[~np.isin(wanted, self.steps)]
        if len(missing):
            raise LocaterError(f"needs a record every {updates:,} updates, has none at {missing[0]:,}")
        return self.at(np.isin(self.steps, wanted))

    def shared(self) -> Sweep:
        """At the steps every member has recorded."""
        columns = np.all(self.recorded, axis=0)
        if not columns.any():
            raise LocaterError("the members of this sweep have no recorded step in common; let it go on")
        return self.at(columns)

    def summaries(self) -> dict[str, Array]:
        """One number a member, (E,), of each quantity that strengths are compared by."""
        perplexity = self.values["perplexity"]
        return {
            "scale": self.values["scale"][:, -1],
            "entropy": self.values["entropy"][:, -1],
            "best perplexity": np.where(np.isnan(perplexity), np.inf, perplexity).min(-1),
            "last perplexity": perplexity[:, -1],
        }


def kappa_name(kappa: float | None) -> str:
    return "none" if kappa is None else f"{kappa:g}"


def seed_spread(folder: str | Path) -> dict[str, float]:
    """How far a relative difference between two strengths varies from seed to seed, at most: `noise` for one seed."""
    sweep = read_sweep(folder).shared()
    spreads: dict[str, float] = {}
    for name, values in sweep.summaries().items():
        ranges = []
        for strengths in pairwise(map(sweep.of, sweep.kappas)):
            seeds = sorted(set.intersection(*map(set, strengths)))
            if len(seeds) > 1:
                weaker, stronger = (values[[of_seed[seed] for seed in seeds]] for of_seed in strengths)
                ranges.append(float(np.ptp(relative_change(weaker, stronger))))
        if not ranges:
            raise LocaterError(f"{folder} has one seed only; the spread between seeds needs two or more")
        spreads[name] = max(ranges)
    return spreads


def read_sweep(folders: Folders, model: tuple[int, int] | None = None) -> Sweep:
    """The members read as the figures' and those without LocAteR, from runs of one configuration.

    Folders that differ in nothing but their seeds are read as one. `model` is a width and a number of layers: runs of
    others in a folder are passed over.
    """
    parts = [_part(folder, model) for folder in ([folders] if isinstance(folders, str | Path) else folders)]
    if not parts:
        raise LocaterError("there is no folder to read a sweep from")
    _check_seeds_alone_differ(parts)
    runs = [run for part in parts for run in part.runs]
    lines = {line: found for part in parts for line, found in part.lines.items()}
    chosen = [lines[line] for line in sorted(lines, key=lambda line: (-1.0 if line[0] is None else line[0], line[1]))]
    config = parts[0].config
    records = [(run.folder, each) for run in runs for each in read_metrics(run.folder).to_dict("records")]
    steps = sorted({record["step"] for _, record in records})
    shape, heads = (len(chosen), len(steps)), (config.model.layers * config.model.heads, config.model.tokens)
    recorded, rho = np.zeros(shape, dtype=bool), np.full((*shape, *heads), np.nan)
    values = np.full((len(_QUANTITIES), *shape), np.nan)
    row_of = {(run.folder, member.name): row for row, (run, member) in enumerate(chosen)}
    members = tuple(member for _, member in chosen)
    for run_folder, record in records:
        if (row := row_of.get((run_folder, record["member"]))) is None:
            continue
        at = row, steps.index(record["step"])
        recorded[at], values[:, *at] = True, _measured(record, members[row])
        measured = _numbers(record, "rho")
        if measured.size == np.prod(heads):
            rho[at] = measured.reshape(heads)
    named = dict(zip(_QUANTITIES, values, strict=True))
    return Sweep(config, members, np.array(steps, dtype=np.int64), recorded, named, rho)


class _Part(NamedTuple):
    """What a folder holds of a sweep."""

    folder: str | Path
    runs: list[Run]
    lines: dict[tuple[float | None, int], tuple[Run, Member]]  # by κ₂ and seed

    @property
    def config(self) -> Config:
        first = self.runs[0]
        probed = first.about.get("probed", first.config.probe_blocks)  # a short text has fewer
        return first.config.changed(steps=max(run.config.steps for run in self.runs), probe_blocks=probed)

    @property
    def settings(self) -> dict[str, Any]:
        """All that was chosen but the seeds, by name; how often checkpoints were written changes nothing."""
        config, members = self.config, [member for _, member in self.lines.values()]
        with_locater = [member for member in members if member.kappa_2 is not None]
        shared = asdict(config) | asdict(config.model)
        return {
            **{name: value for name, value in shared.items() if name not in ("model", "data", "checkpoint_every")},
            "text": self.runs[0].about.get("corpus", config.data),
            "κ₂": {member.kappa_2 for member in members},
            **{name: {getattr(member, name) for member in members} for name in ("learning_rate", "decay")},
            **{name: {getattr(member, name) for member in with_locater} for name in ("mean_strength", "target")},
        }


def _part(folder: str | Path, model: tuple[int, int] | None) -> _Part:
    runs = _comparable_runs(folder, model)
    return _Part(folder, runs, _chosen(folder, runs))


def _check_seeds_alone_differ(parts: Sequence[_Part]) -> None:
    held: dict[int, str | Path] = {}
    expected = parts[0].settings
    for part in parts:
        apart = [name for name, value in part.settings.items() if value != expected[name]]
        if apart:
            raise LocaterError(
                f"{parts[0].folder} and {part.folder} differ in {', '.join(apart)}; folders are one sweep only if they "
                "differ in nothing but their seeds"
            )
        for seed in sorted({seed for _, seed in part.lines}):
            if seed in held:
                raise LocaterError(f"{held[seed]} and {part.folder} both hold seed {seed}; give each seed once")
            held[seed] = part.folder


def _comparable_runs(folder: str | Path, model: tuple[int, int] | None) -> list[Run]:
    runs = read_runs(Path(folder))
    if model is not None:
        shapes = [(run.config.model.width, run.config.model.layers) for run in runs]
        runs = [run for run, shape in zip(runs, shapes, strict=True) if shape == model]
        if not runs:
            raise LocaterError(
                f"this needs a sweep of {_shape(*model)} (locater sweep paper-d{model[0]}-l{model[1]}), "
                f"but {folder} holds {' and '.join(_shape(*each) for each in sorted(set(shapes)))}"
            )
    if not all(run.config.same_but(FREE_TO_COMPARE, runs[0].config) for run in runs):
        raise LocaterError(f"the runs in {folder} differ in more than their members; give the folder of one sweep")
    return runs


def _numbers(record: Mapping[Any, Any], name: str) -> Array:
    return np.asarray(record.get(name), dtype=float)  # a missing one is NaN


_QUANTITIES = ("trace", "trace_gap", "scale", "entropy", "perplexity", "rank_residual")


def _measured(record: Mapping[Any, Any], member: Member) -> tuple[Any, ...]:
    trace, scale, entropy = (_numbers(record, name) for name in ("trace", "scale", "entropy"))
    perplexity, residual = _numbers(record, "perplexity"), _numbers(record, "rank_residual")
    gap = np.abs(trace - member.target)
    return trace.mean(), gap.mean(), scale.mean(), entropy.mean(), perplexity, residual.flat[-1]


def _chosen(folder: str | Path, runs: Sequence[Run]) -> dict[tuple[float | None, int], tuple[Run, Member]]:
    """A member for each κ₂ and seed, that differ in nothing else."""
    found: dict[tuple[float | None, int], tuple[Run, Member]] = {}
    for run in runs:
        for member in filter(_in_figures, run.members):
            line = member.kappa_2, member.seed
            if member.kappa_2 is None:
                found.setdefault(line, (run, member))  # without LocAteR, every reading trains the same model
            elif member.reading == "figures":
                if line in found:
                    raise LocaterError(
                        f"{folder} holds κ₂ = {member.kappa_2:g} with seed {member.seed} twice; keep one of "
                        f"{found[line][0].folder.name}/{found[line][1].name} and {run.folder.name}/{member.name}"
                    )
                found[line] = run, member
    if not found:
        raise LocaterError(f"{folder} has no member without LocAteR and none of the reading 'figures'")
    members = [member for _, member in found.values()]
    apart = {(member.learning_rate, member.decay) for member in members}
    apart_with = {(member.mean_strength, member.target) for member in members if member.kappa_2 is not None}
    if len(apart) > 1 or len(apart_with) > 1:
        raise LocaterError(f"the members in {folder} differ in more than κ₂ and the seed; a figure compares these only")
    return found


def _in_figures(member: Member) -> bool:
    """Whether a line of the paper's figures can be it: no intervention, and without a κ₂ no LocAteR."""
    plain = not (member.scale_strength or member.mean_strength)
    return member.intervention is None and (member.kappa_2 is not None or plain)


def _shape(width: int, layers: int) -> str:
    return f"d = {width}, {layers} layer{'s' if layers > 1 else ''}"
