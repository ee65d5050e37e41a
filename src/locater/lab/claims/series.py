"""The records of a sweep as arrays: a line a member, on one grid of steps; and what is read off such lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from locater.errors import LocaterError
from locater.lab.config import Config, Member
from locater.lab.runs.records import Run, read_metrics, read_runs

__all__ = ["FIGURE_OF", "Array", "Stripes", "Sweep", "broken_line", "read_sweep", "stripes"]

Array: TypeAlias = NDArray[np.float64]

FIGURE_OF = {(128, 1): 6, (32, 1): 8, (32, 3): 9, (32, 6): 10, (128, 3): 11, (128, 6): 12}
"""The paper's figure of a model's width and layers."""


@dataclass(frozen=True)
class Sweep:
    """The members the paper's figures show, their records on one grid of steps; NaN where a member has none."""

    config: Config
    members: tuple[Member, ...]  # E: no LocAteR first, then κ₂ rising, then seeds
    steps: NDArray[np.int64]  # N
    recorded: NDArray[np.bool_]  # (E, N)
    values: dict[str, Array]  # trace, trace_gap, scale, entropy, perplexity, rank_residual: (E, N), means over heads
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


def read_sweep(folder: str | Path, model: tuple[int, int] | None = None) -> Sweep:
    """The members read as the figures' and those without LocAteR, from runs of one configuration.

    `model` is a width and a number of layers: runs of others in the folder are passed over.
    """
    runs = read_runs(Path(folder))
    if model is not None:
        there = sorted({(run.config.model.width, run.config.model.layers) for run in runs})
        runs = [run for run in runs if (run.config.model.width, run.config.model.layers) == model]
        if not runs:
            raise LocaterError(
                f"this needs a sweep of {_shape(*model)} (locater sweep paper-d{model[0]}-l{model[1]}), "
                f"but {folder} holds {' and '.join(_shape(*each) for each in there)}"
            )
    if any(_compared(run.config) != _compared(runs[0].config) for run in runs):
        raise LocaterError(f"the runs in {folder} differ in more than their members; give the folder of one sweep")
    chosen = _chosen(folder, runs)
    config = runs[0].config.changed(
        steps=max(run.config.steps for run in runs),
        probe_blocks=runs[0].about.get("probed", runs[0].config.probe_blocks),  # a short text has fewer
    )
    records = {
        (run.folder, record["member"], record["step"]): record
        for run in runs
        for record in read_metrics(run.folder).to_dict("records")
    }
    steps = sorted({step for _, _, step in records})
    heads, tokens = config.model.layers * config.model.heads, config.model.tokens
    shape = len(chosen), len(steps)
    recorded = np.zeros(shape, dtype=bool)
    values = {name: np.full(shape, np.nan) for name in _QUANTITIES}
    rho = np.full((*shape, heads, tokens), np.nan)
    for row, (run, member) in enumerate(chosen):
        for column, step in enumerate(steps):
            record = records.get((run.folder, member.name, step))
            if record is None:
                continue
            recorded[row, column] = True
            for name, measure in _QUANTITIES.items():
                values[name][row, column] = measure(record, member)
            measured = _numbers(record, "rho")
            if measured.size == heads * tokens:
                rho[row, column] = measured.reshape(heads, tokens)
    members = tuple(member for _, member in chosen)
    return Sweep(config, members, np.array(steps, dtype=np.int64), recorded, values, rho)


def _numbers(record: Mapping[Any, Any], name: str) -> Array:
    return np.asarray(record.get(name), dtype=float)  # a missing one is NaN


_QUANTITIES: dict[str, Callable[[Mapping[Any, Any], Member], float]] = {
    "trace": lambda record, _: float(_numbers(record, "trace").mean()),
    "trace_gap": lambda record, member: float(np.abs(_numbers(record, "trace") - member.target).mean()),
    "scale": lambda record, _: float(_numbers(record, "scale").mean()),
    "entropy": lambda record, _: float(_numbers(record, "entropy").mean()),
    "perplexity": lambda record, _: float(_numbers(record, "perplexity")),
    "rank_residual": lambda record, _: float(_numbers(record, "rank_residual").reshape(-1)[-1]),
}


def _chosen(folder: str | Path, runs: Sequence[Run]) -> list[tuple[Run, Member]]:
    """A member for each κ₂ and seed, that differ in nothing else."""
    found: dict[tuple[float | None, int], tuple[Run, Member]] = {}
    for run in runs:
        for member in run.members:
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
    order = sorted(found, key=lambda line: (-1.0 if line[0] is None else line[0], line[1]))
    return [found[line] for line in order]


def _compared(config: Config) -> Config:
    """What must be equal for members to be compared; how far they have come and what is kept need not."""
    return config.changed(steps=1, record_every=1, record_early=False, checkpoint_every=0, deterministic=False)


def _shape(width: int, layers: int) -> str:
    return f"d = {width}, {layers} layer{'s' if layers > 1 else ''}"


@dataclass(frozen=True)
class Stripes:
    """How far ρ over positions is from a smooth profile, and how far sampling alone would put it."""

    spread: Array  # (N,) standard deviation over positions, at each record
    sampling: Array  # (N,) the one expected of a smooth profile, from the number of blocks
    contrast: float  # of the profile that lasts: √(spread² − sampling²) of the mean over the second half
    excess: float  # its spread² over sampling²; 1 if there are no stripes
    chance: float  # of such an excess without stripes


def stripes(steps: NDArray[Any], rho: Array, blocks: int) -> Stripes:
    """The stripes of Fig. 7 in ρ (records, heads, T), each record counted in the same `blocks` blocks.

    From each profile over positions the best parabola is taken away: a slope or a bulge, which any spectrum gives, is
    no stripe. The query's own position is left out: a token meets itself there, whatever the weights. What remains is
    ρ's `spread`. Counting in n blocks makes one of √(ρ(1−ρ)/(n−1)), `sampling`, out of nothing; and as the blocks are
    the same at every record, chance draws stripes that last as well. So lasting is no evidence, only a spread beyond
    sampling is: `contrast` is that of the mean profile over the second half of training (flicker averages out), less
    sampling (which does not). Heads are averaged after squaring, so that stripes of different heads do not cancel.
    """
    from scipy.stats import chi2

    free = rho[..., :-1]  # (N, heads, T − 1)
    x = np.linspace(-1, 1, free.shape[-1])
    q = np.linalg.qr(np.stack([np.ones_like(x), x, x**2], axis=-1))[0]
    rest = free - free @ q @ q.T
    freedom = max(1, len(x) - 3)
    noise = (free * (1 - free)).mean((1, 2)) / max(1, blocks - 1)  # (N,)
    late = steps >= steps[-1] / 2
    lasting, by_chance = float((rest[late].mean(0) ** 2).sum(-1).mean() / freedom), float(noise[late].mean())
    certain = np.inf if lasting > 1e-12 else 1.0  # where each ρ is 0 or 1, sampling has no part; 1e-12 is rounding
    excess = lasting / by_chance if by_chance > 0 else certain
    together = freedom * rho.shape[1]
    return Stripes(
        spread=np.sqrt((rest**2).sum(-1).mean(-1) / freedom),
        sampling=np.sqrt(noise),
        contrast=float(np.sqrt(np.maximum(0.0, lasting - by_chance))),
        excess=excess,
        chance=float(chi2.sf(excess * together, together)),
    )


def broken_line(steps: NDArray[Any], series: Array) -> tuple[Array, Array]:
    """Least squares with a line that bends once, for each row of `series` (M, N).

    Gives the step of the bend and the share of the straight line's squared residuals it removes.
    """
    t = np.asarray(steps, dtype=float) / float(steps[-1])
    bends = t[2:-2]
    line = np.broadcast_to(np.stack([np.ones_like(t), t], axis=-1), (len(bends), len(t), 2))
    bent = np.concatenate([line, np.maximum(t - bends[:, None], 0)[..., None]], axis=-1)  # (bends, N, 3)
    y = series - series.mean(-1, keepdims=True)
    whole = (y**2).sum(-1)  # (M,)
    straight = whole - ((y @ np.linalg.qr(line[0])[0]) ** 2).sum(-1)
    broken = whole - ((y @ np.linalg.qr(bent)[0]) ** 2).sum(-1)  # (bends, M)
    best = broken.argmin(0)
    floor = 1e-12 * whole  # below it, rounding; a straight line has nothing to remove
    left = np.maximum(broken.min(0), 0) / np.where(straight > floor, straight, 1)
    return np.asarray(steps, dtype=float)[2:-2][best], np.where(straight > floor, 1 - left, 0.0)
