"""What the paper says of its experiments, put to the test with the numbers of one sweep.

Verdicts are three words: reproduced, not reproduced, cannot tell. What makes them:

- Two strengths differ only if the seeds say so: the differences, paired by seed, are all of one sign and their mean
  exceeds their standard deviation. With a single seed, a difference must exceed `noise`, the relative spread between
  seeds measured in another sweep (`seed_spread`); without one, nothing can be told.
- A trend over the paper's five strengths is reproduced if κ₂ = 0 and 1 differ as claimed and no step between
  neighbours goes the other way by more than the seeds' spread and a tenth of the whole change. Neighbours that cannot
  be told apart do not break it: 0 and 10⁻³ hardly differ.
- A strength that was not trained, or a sweep that has not come to its end, gives "cannot tell".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from locater.errors import LocaterError
from locater.lab.config import Config, Member
from locater.lab.records import Run, read_metrics, read_runs

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "FIGURE_OF", "PAPER_KAPPAS", "Claim", "Stripes", "Sweep", "broken_line", "claims", "claims_markdown",
    "claims_table", "plain", "read_sweep", "seed_spread", "stripes",
]  # fmt: skip

Array: TypeAlias = NDArray[np.float64]
Noise: TypeAlias = Mapping[str, float] | float | None
Finding: TypeAlias = tuple[str, str, dict[str, Any]]  # measured, verdict, evidence

PAPER_KAPPAS = (0.0, 1e-3, 1e-2, 1e-1, 1.0)
FIGURE_OF = {(128, 1): 6, (32, 1): 8, (32, 3): 9, (32, 6): 10, (128, 3): 11, (128, 6): 12}
"""The paper's figure of a model's width and layers."""

REPRODUCED, NOT_REPRODUCED, CANNOT_TELL = "reproduced", "not reproduced", "cannot tell"

MATERIAL = 0.1  # of the whole change: a smaller step back does not break a trend
THROUGHOUT = 0.95  # of the recorded steps is "entirely"
HELD = 0.1  # tr W_QK this close to its target is held there
SALIENT = 0.05  # stripes of this contrast, in units of ρ, can be seen
CORRELATED = 0.5  # rank correlation that counts, if several seeds have it; one seed needs ALONE
ALONE = 0.9
PHASES_AT = 10_000
PHASES_REMOVE = 0.75  # of a straight line's squared residuals, by breaking it
PHASES_STAY = 1.25  # factor by which a break may move when only the first half of training is seen


@dataclass(frozen=True)
class Claim:
    statement: str
    where: str  # in the paper
    measured: str  # our numbers, in words
    verdict: str  # reproduced, not reproduced or cannot tell
    evidence: dict[str, Any]  # plain numbers, words and lists


# --- the numbers of a sweep ---------------------------------------------------------------------------------------


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
    config = runs[0].config.changed(steps=max(run.config.steps for run in runs))
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


def plain(value: Any) -> Any:
    """Arrays as lists, and None for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


# --- measures -----------------------------------------------------------------------------------------------------


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


def seed_spread(folder: str | Path) -> dict[str, float]:
    """How far a relative difference between two strengths varies from seed to seed, at most: `noise` for one seed."""
    sweep = _comparable(read_sweep(folder))
    spreads: dict[str, float] = {}
    for name, values in _summaries(sweep).items():
        ranges = []
        for weaker, stronger in pairwise(sweep.kappas):
            seeds = sorted(sweep.of(weaker).keys() & sweep.of(stronger).keys())
            if len(seeds) > 1:
                pair = np.array([[values[sweep.of(kappa)[seed]] for seed in seeds] for kappa in (weaker, stronger)])
                ranges.append(float(np.ptp(_relative(pair[0], pair[1]))))
        if not ranges:
            raise LocaterError(f"{folder} has one seed only; the spread between seeds needs two or more")
        spreads[name] = max(ranges)
    return spreads


# --- judging ------------------------------------------------------------------------------------------------------


class _UndecidedError(Exception):
    """Why not."""


def claims(folder: str | Path, *, noise: Noise = None) -> list[Claim]:
    """The claims of Section 7 and Appendix D against the sweep in this folder."""
    sweep = _comparable(read_sweep(folder))
    end, model = int(sweep.steps[-1]), sweep.config.model
    number = FIGURE_OF.get((model.width, model.layers))
    figure, beside = f"Fig. {number or 6}", "" if number else " (of another model)"
    made = []
    for statement, place, test in _TESTS:
        try:
            measured, verdict, evidence = test(sweep, noise)
        except _UndecidedError as why:
            measured, verdict, evidence = str(why), CANNOT_TELL, {}
        if end < sweep.config.steps:
            measured, verdict = f"at step {end:,} of {sweep.config.steps:,}: {measured}", CANNOT_TELL
        evidence = {"step": end, "steps": sweep.config.steps} | evidence
        made.append(Claim(statement, place.format(figure=figure) + beside, measured, verdict, plain(evidence)))
    return made


def claims_table(folder: str | Path, *, noise: Noise = None) -> pd.DataFrame:
    """A row a claim: claim, where, measured, verdict, seeds."""
    import pandas as pd

    rows = [
        (claim.statement, claim.where, claim.measured, claim.verdict, claim.evidence.get("seeds"))
        for claim in claims(folder, noise=noise)
    ]
    return pd.DataFrame(rows, columns=["claim", "where", "measured", "verdict", "seeds"])


def claims_markdown(folder: str | Path, *, noise: Noise = None) -> str:
    """The table for a page."""
    lines = ["| the paper says | where | measured | verdict |", "|---|---|---|---|"]
    for claim in claims(folder, noise=noise):
        cells = (claim.statement, claim.where, claim.measured, f"**{claim.verdict}**")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _comparable(sweep: Sweep) -> Sweep:
    """At the steps every member has recorded."""
    shared = np.all(sweep.recorded, axis=0)
    if not shared.any():
        raise LocaterError("the members of this sweep have no recorded step in common; let it go on")
    return sweep.at(shared)


def _summaries(sweep: Sweep) -> dict[str, Array]:
    """One number a member of each quantity that strengths are compared by."""
    perplexity = sweep.values["perplexity"]
    return {
        "scale": sweep.values["scale"][:, -1],
        "entropy": sweep.values["entropy"][:, -1],
        "best perplexity": np.where(np.isnan(perplexity), np.inf, perplexity).min(-1),
        "last perplexity": perplexity[:, -1],
    }


def _paired(sweep: Sweep, kappas: Sequence[float | None]) -> tuple[NDArray[np.int64], list[int]]:
    """Indices of members (strength, seed) for the seeds all these strengths have, and those seeds."""
    missing = [_name(kappa) for kappa in kappas if kappa not in sweep.kappas]
    if missing:
        raise _UndecidedError(f"not trained: κ₂ = {', '.join(missing)}")
    seeds = sorted(set.intersection(*(set(sweep.of(kappa)) for kappa in kappas)))
    if not seeds:
        raise _UndecidedError("the strengths have no seed in common")
    return np.array([[sweep.of(kappa)[seed] for seed in seeds] for kappa in kappas], dtype=np.int64), seeds


def _told(weaker: Array, stronger: Array, noise: float | None) -> NDArray[np.int64]:
    """+1 where `stronger` (seeds, …) is higher, −1 where lower, 0 where the seeds do not tell."""
    with np.errstate(invalid="ignore"):
        difference = stronger - weaker
        mean = difference.mean(0)
        if len(difference) > 1:
            one_sign = (np.sign(difference) == np.sign(difference[0])).all(0)
            told = one_sign & (np.abs(mean) > difference.std(0, ddof=1))
        else:
            told = np.abs(mean) > (np.inf if noise is None else noise * np.abs(weaker[0]))
        return np.where(told & np.isfinite(mean), np.sign(mean), 0).astype(np.int64)


def _relative(weaker: Array, stronger: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(stronger / weaker - 1)


def _noise(noise: Noise, quantity: str) -> float | None:
    return noise.get(quantity) if isinstance(noise, Mapping) else noise


def _name(kappa: float | None) -> str:
    return "none" if kappa is None else f"{kappa:g}"


def _signed(value: float, form: str) -> str:
    return f"{value:{form}}".replace("-", "−")


def _seeds(seeds: Sequence[int]) -> str:
    return "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _trend(quantity: str, sign: int, kappas: Sequence[float | None]) -> Callable[[Sweep, Noise], Finding]:
    """Tests that a quantity rises (+1) or falls (−1) along strengths."""

    def test(sweep: Sweep, noise: Noise) -> Finding:
        rows, seeds = _paired(sweep, kappas)
        level = _noise(noise, quantity)
        values = _summaries(sweep)[quantity][rows]  # (strength, seed)
        means = values.mean(1)
        steps = [int(_told(a, b, level)) for a, b in pairwise(values)]
        ends = int(_told(values[0], values[-1], level))
        change = _relative(values[0], values[-1])
        with np.errstate(invalid="ignore"):
            material = np.abs(np.diff(means)) > MATERIAL * np.abs(means[-1] - means[0])
        back = [told == -sign and bool(large) for told, large in zip(steps, material, strict=True)]
        verdict = CANNOT_TELL
        if ends:
            verdict = REPRODUCED if ends == sign and not any(back) else NOT_REPRODUCED
        alone = len(seeds) == 1 and level is None
        signs = {1: " <", -1: " >", 0: "," if alone else " ≈"}
        chain = f"{means[0]:.4g}" + "".join(
            f"{signs[told]} {mean:.4g}" for told, mean in zip(steps, means[1:], strict=True)
        )
        names = ", ".join(map(_name, kappas))
        why = ", and no noise to compare with" if alone else ""
        measured = (
            f"κ₂ = {names}: {chain}; {_signed(float(change.mean()), '+.2%')} from first to last ({_seeds(seeds)}{why})"
        )
        evidence = {"seeds": len(seeds), "kappa_2": list(kappas), "mean": means, "values": values, "steps_told": steps}
        return measured, verdict, evidence | {"ends_told": ends, "relative_change": change, "noise": level}

    return test


def _trace_held(sweep: Sweep, noise: Noise) -> Finding:
    del noise  # the yardstick is the target, not another strength
    rows, seeds = _paired(sweep, PAPER_KAPPAS)
    late = sweep.steps >= sweep.steps[-1] / 2
    gap = sweep.values["trace_gap"][rows][..., late].mean(-1)  # (strength, seed)
    held = gap <= HELD
    without = [float(sweep.values["trace"][index, -1]) for index in sweep.of(None).values()]
    verdict = REPRODUCED if held.all() else NOT_REPRODUCED if (gap > HELD).all(1).any() else CANNOT_TELL
    beside = f"; without LocAteR tr W_QK ends at {np.mean(without):.3g}" if without else ""
    chain = ", ".join(f"{value:.2g}" for value in gap.mean(1))
    measured = f"mean |tr W_QK − target| of heads, second half: {chain} at κ₂ = 0 to 1 ({_seeds(seeds)}){beside}"
    evidence = {"seeds": len(seeds), "kappa_2": list(PAPER_KAPPAS), "gap": gap, "held_within": HELD}
    return measured, verdict, evidence | {"last_trace_without": without}


def _entropy_throughout(sweep: Sweep, noise: Noise) -> Finding:
    rows, seeds = _paired(sweep, PAPER_KAPPAS)
    even = sweep.even()
    if not len(even.steps):
        raise _UndecidedError("no record after the first steps yet")
    entropy = even.values["entropy"][rows]  # (strength, seed, step)
    told = _told(entropy[0], entropy[-1], _noise(noise, "entropy"))
    higher, lower = float((told > 0).mean()), float((told < 0).mean())
    in_order = float((np.diff(entropy.mean(1), axis=0) > 0).all(0).mean())
    verdict = REPRODUCED if higher >= THROUGHOUT else NOT_REPRODUCED if lower > 1 - THROUGHOUT else CANNOT_TELL
    measured = (
        f"κ₂ = 1 above 0 at {higher:.0%} of the recorded steps, below at {lower:.0%}; all five means in order at "
        f"{in_order:.0%} ({_seeds(seeds)})"
    )
    evidence = {"seeds": len(seeds), "share_higher": higher, "share_lower": lower, "share_all_in_order": in_order}
    return measured, verdict, evidence | {"records": len(even.steps)}


def _phases(sweep: Sweep, noise: Noise) -> Finding:
    """Two phases are a line with one bend near 10⁴ that stays when only the first half of training is seen.

    That it stays is what counts. A curve without a time of its own, such as a power law, also follows a bent line far
    better than a straight one; but its bend moves with the end of the window.
    """
    del noise
    even = sweep.even()
    early = even.steps <= sweep.steps[-1] / 2
    if sweep.steps[-1] < 2 * PHASES_AT or early.sum() < 8:
        raise _UndecidedError(
            f"needs {2 * PHASES_AT:,} steps and 16 records, has {sweep.steps[-1]:,} and {len(even.steps)}"
        )
    lines = [index for kappa in (None, *PAPER_KAPPAS) for index in sweep.of(kappa).values()]
    found: dict[str, Any] = {}
    for name, values in (
        ("log-perplexity", np.log(even.values["perplexity"])),
        ("scale", even.values["scale"]),
        ("entropy", even.values["entropy"]),
    ):
        series = values[lines]
        series = series[np.isfinite(series).all(1)]
        if not len(series):
            raise _UndecidedError(f"{name} is not finite")
        bend, removed = broken_line(even.steps, series)
        bend_early, _ = broken_line(even.steps[early], series[:, early])
        moved = np.maximum(bend / bend_early, bend_early / bend)
        near = (bend >= PHASES_AT / 2) & (bend <= 2 * PHASES_AT)
        phases = (removed >= PHASES_REMOVE) & near & (moved <= PHASES_STAY)
        found[name] = {
            "share": float(phases.mean()),
            "bend": float(np.median(bend)),
            "bend_first_half": float(np.median(bend_early)),
            "removed": float(np.median(removed)),
        }
    shares = [each["share"] for each in found.values()]
    agree = sum(share >= 2 / 3 for share in shares)
    verdict = REPRODUCED if agree >= 2 else NOT_REPRODUCED if max(shares) <= 1 / 3 else CANNOT_TELL
    measured = "; ".join(
        f"{name} bends at {each['bend']:,.0f} ({each['bend_first_half']:,.0f} in the first half alone), which removes "
        f"{each['removed']:.0%} of a line's residual; two phases in {each['share']:.0%} of members"
        for name, each in found.items()
    )
    return measured, verdict, {"members": len(lines), "near": PHASES_AT} | found


def _stripes_shown(sweep: Sweep, noise: Noise) -> Finding:
    del noise  # the yardstick is the sampling error
    rows, seeds = _paired(sweep, (1.0, None))
    found = [[stripes(sweep.steps, sweep.rho[index], sweep.config.probe_blocks) for index in pair] for pair in rows]
    contrast = np.array([[each.contrast for each in pair] for pair in found])  # (with and without, seed)
    if not np.isfinite(contrast).all():
        raise _UndecidedError("ρ was not recorded at every step")
    chance = np.array([[each.chance for each in pair] for pair in found])
    salient = (contrast >= SALIENT) & (chance < 1e-3)
    if salient[0].all() and not salient[1].any():
        verdict = REPRODUCED
    else:
        verdict = NOT_REPRODUCED if not salient[0].any() or salient[1].all() else CANNOT_TELL
    sampling = float(np.mean([each.sampling.mean() for pair in found for each in pair]))
    measured = (
        f"contrast of ρ over positions {contrast[0].mean():.3f} with κ₂ = 1, {contrast[1].mean():.3f} without; "
        f"sampling error {sampling:.3f}, {SALIENT} is salient ({_seeds(seeds)})"
    )
    evidence = {"seeds": len(seeds), "contrast_with": contrast[0], "contrast_without": contrast[1]}
    return measured, verdict, evidence | {"chance": chance, "sampling": sampling, "salient_from": SALIENT}


def _rank_correlation(x: Array, y: Array) -> float:
    from scipy.stats import rankdata

    if not (np.isfinite(x).all() and np.isfinite(y).all()) or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])


def _falls_with_scale(quantity: str) -> Callable[[Sweep, Noise], Finding]:
    """Tests that, over strengths at the end of training, a quantity is the higher the smaller the scale."""

    def test(sweep: Sweep, noise: Noise) -> Finding:
        del noise
        kappas = [kappa for kappa in sweep.kappas if kappa is not None]
        if len(kappas) < 4:
            raise _UndecidedError(f"needs four strengths to rank, has {len(kappas)}")
        rows, seeds = _paired(sweep, kappas)
        scale, other = sweep.values["scale"][rows][..., -1], sweep.values[quantity][rows][..., -1]
        found = np.array([_rank_correlation(scale[:, seed], other[:, seed]) for seed in range(len(seeds))])
        bar = CORRELATED if len(seeds) > 1 else ALONE
        verdict = REPRODUCED if (found <= -bar).all() else NOT_REPRODUCED if (found >= 0).all() else CANNOT_TELL
        chain = ", ".join(_signed(value, "+.2f") for value in found)
        measured = f"rank correlation over {len(kappas)} strengths {chain} ({_seeds(seeds)})"
        return measured, verdict, {"seeds": len(seeds), "kappa_2": kappas, "rank_correlation": found}

    return test


def _entropy_falls_over_time(sweep: Sweep, noise: Noise) -> Finding:
    del noise
    even = sweep.even()
    if len(even.steps) < 8:
        raise _UndecidedError(f"needs eight records, has {len(even.steps)}")
    pairs = zip(even.values["scale"], even.values["entropy"], strict=True)
    found = np.array([_rank_correlation(scale, entropy) for scale, entropy in pairs])
    share = float((found <= -CORRELATED).mean())
    verdict = REPRODUCED if share >= 0.9 else NOT_REPRODUCED if share <= 0.5 else CANNOT_TELL
    measured = (
        f"rank correlation over training at most −{CORRELATED} in {share:.0%} of {len(found)} members; "
        f"median {_signed(float(np.median(found)), '+.2f')}, "
        f"from {_signed(found.min(), '+.2f')} to {_signed(found.max(), '+.2f')}"
    )
    names = [member.name for member in even.members]
    return measured, verdict, {"members": names, "rank_correlation": found, "share": share}


def _past_one(sweep: Sweep, noise: Noise) -> Finding:
    """Where the perplexity turns, if it does: not the paper's claim but what its trend would lead one to."""
    kappas = [kappa for kappa in sweep.kappas if kappa is not None and kappa >= 1]
    if not any(kappa > 1 for kappa in kappas):
        raise _UndecidedError("not trained: κ₂ > 1")
    rows, seeds = _paired(sweep, [1.0, *(kappa for kappa in kappas if kappa > 1)])
    evidence: dict[str, Any] = {"seeds": len(seeds), "kappa_2": kappas}
    parts, verdicts = [], []
    for quantity in ("best perplexity", "last perplexity"):
        level, values = _noise(noise, quantity), _summaries(sweep)[quantity][rows]
        means = values.mean(1)
        low = int(np.where(np.isfinite(means), means, np.inf).argmin())
        worse = [k for k in range(low + 1, len(kappas)) if _told(values[low], values[k], level) > 0]
        better = bool(_told(values[0], values[low], level) < 0)
        turn = f", worse at {kappas[worse[0]]:g}" if worse else ", no turn told"
        chain = ", ".join(f"{mean:.4g}" for mean in means)
        parts.append(f"{quantity} {chain}: lowest at κ₂ = {kappas[low]:g}{turn}")
        evidence[quantity] = {
            "mean": means,
            "values": values,
            "lowest_at": kappas[low],
            "better_than_at_1": better,
            "worse_from": kappas[worse[0]] if worse else None,
        }
        to_the_end = low == len(kappas) - 1 and better
        verdicts.append(NOT_REPRODUCED if worse else REPRODUCED if to_the_end else CANNOT_TELL)
    names = ", ".join(map(_name, kappas))
    return f"κ₂ = {names}: {'; '.join(parts)} ({_seeds(seeds)})", verdicts[0], evidence


_TESTS: tuple[tuple[str, str, Callable[[Sweep, Noise], Finding]], ...] = (
    ("LocAteR holds tr W_QK at its target, 1", "Section 6, {figure}A", _trace_held),
    ("the stronger κ₂, the smaller the eigenspectrum scale", "{figure}B", _trend("scale", -1, PAPER_KAPPAS)),
    ("κ₂ keeps the attention entropy higher during the updates entirely", "{figure}C", _entropy_throughout),
    ("the stronger κ₂, the higher the attention entropy at the end", "{figure}C", _trend("entropy", +1, PAPER_KAPPAS)),
    (
        "the stronger κ₂, the better the perplexity, at its best over training",
        "{figure}D",
        _trend("best perplexity", -1, PAPER_KAPPAS),
    ),
    (
        "the stronger κ₂, the better the perplexity, at the end",
        "{figure}D",
        _trend("last perplexity", -1, PAPER_KAPPAS),
    ),
    (
        "LocAteR (κ₂ = 1) betters the perplexity of no LocAteR, at its best over training",
        "Section 7",
        _trend("best perplexity", -1, (None, 1.0)),
    ),
    (
        "LocAteR (κ₂ = 1) betters the perplexity of no LocAteR, at the end",
        "Section 7",
        _trend("last perplexity", -1, (None, 1.0)),
    ),
    ("two learning phases, before and after 10⁴ iterations", "Section 7", _phases),
    ("ρ has lasting stripes with LocAteR (κ₂ = 1) and none without", "Fig. 7", _stripes_shown),
    ("the smaller the scale, the higher the entropy, across strengths", "Section 7, A2", _falls_with_scale("entropy")),
    ("the smaller the scale, the higher the entropy, over training", "Section 7, A2", _entropy_falls_over_time),
    (
        "the smaller the scale, the further from rank collapse, across strengths",
        "Section 5, A2",
        _falls_with_scale("rank_residual"),
    ),
    ("the stronger the better holds past κ₂ = 1 too", "beyond {figure}D", _past_one),
)
