"""LocAteR against its rivals: one decoder, one text, rising learning rates, and what each method makes of them.

A contender is a method and the strengths it is tried at, its authors' default first; all that have a strength have as
many. Each is trained stacked, strengths × learning rates × seeds at once, by the engine that trains the paper's models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from locater.control.rules.locater import paper_strengths
from locater.errors import LocaterError
from locater.lab.arena.cost import REFERENCE, Cost, read_costs, time_contenders, write_timing
from locater.lab.arena.folder import (
    Entry,
    check_groups,
    conditions,
    difference,
    discard,
    discard_unfinished,
    entries_in,
)
from locater.lab.config import KAPPA_1, Config, Member, ModelConfig
from locater.lab.data import Corpus, load_corpus
from locater.lab.engine.methods import METHODS
from locater.lab.engine.stack import check_sizes
from locater.lab.runs.sweep import Plan, run_plan
from locater.lab.runs.train import Progress
from locater.models.pretrained import device_of

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ARENAS",
    "CONTENDERS",
    "ENTROPY_FLOOR",
    "LOGIT_CEILING",
    "TRAINS_WITHIN",
    "Arena",
    "Contender",
    "finished",
    "outdated",
    "outdated_costs",
    "read_arena",
    "run_arena",
    "summary",
    "to_renew",
]

LOGIT_CEILING, ENTROPY_FLOOR = 200.0, 0.3
"""Attention has collapsed where a logit exceeds the one, or a layer's mean entropy, in nats, is under the other."""

TRAINS_WITHIN = 1.2
"""A learning rate breaks a contender if a seed's loss is not finite or ends above this times the best of all."""


@dataclass(frozen=True)
class Contender:
    """A method as it enters the arena."""

    label: str
    method: str
    strengths: tuple[float, ...]  # the default first
    at_inference: str  # what remains of it
    coupled: bool = False  # LocAteR through the optimizer: the strength is the paper's κ₂, beside its κ₁

    def member(self, strength: float, rate: float, seed: int, config: Config) -> Member:
        pair = paper_strengths(KAPPA_1, strength, config.tokens_per_batch) if self.coupled else (0.0, 0.0)
        return Member(f"x{strength:g}-lr{rate:g}-s{seed}", seed, rate, 0.0, *pair, strength=strength)


CONTENDERS: dict[str, Contender] = {
    "none": Contender("no protection", "none", (0.0,), "nothing"),
    "locater-paper": Contender("LocAteR, as in the paper", "none", (1.0, 0.1, 10.0), "nothing", coupled=True),
    "locater-auto": Contender("LocAteR, auto", "locater-auto", (0.1, 0.05, 0.2), "nothing"),
    "qk-norm": Contender("QK-norm", "qk-norm", (1.0, 0.3, 3.0), "two norms a layer"),
    "sigma-reparam": Contender("σReparam, all layers", "sigma-reparam", (1.0,), "nothing"),  # it has no strength
    "sigma-reparam-qk": Contender("σReparam, q and k", "sigma-reparam-qk", (1.0,), "nothing"),
    "qk-clip": Contender("QK-clip", "qk-clip", (100.0, 30.0, 10.0), "nothing"),
    "softcap": Contender("softcap", "softcap", (50.0, 20.0, 10.0), "a tanh a logit; no SDPA"),
    "z-loss": Contender("attention z-loss", "z-loss", (1e-4, 1e-3, 1e-2), "nothing"),
    "qk-decay": Contender("decay of W_Q, W_K", "qk-decay", (0.1, 1.0, 10.0), "nothing"),
}


@dataclass(frozen=True)
class Arena:
    """What the contenders are put through."""

    about: str
    config: Config
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    tuned: bool = True  # whether other strengths than the default are tried

    def planned(self, name: str) -> tuple[Config, list[Member]]:
        """What a contender trains."""
        contender = CONTENDERS[name]
        strengths = contender.strengths if self.tuned else contender.strengths[:1]
        members = [
            contender.member(strength, rate, seed, self.config)
            for strength in strengths
            for rate in self.learning_rates
            for seed in self.seeds
        ]
        return self.config.changed(method=contender.method), members


_BYTES = Config(
    model=ModelConfig(width=256, ffn=1024, layers=6, heads=4, tokens=256, norm="pre", tied=True, dropout=0.0),
    data="enwik8", unit="bytes", batch=8, steps=800, warmup=100, final_rate=0.1, clip=1.0, precision="bf16",
    record_every=200, record_early=False, checkpoint_every=0, probe_blocks=16, valid_blocks=256, details=False,
)  # fmt: skip

ARENAS: dict[str, Arena] = {
    "laptop": Arena(
        "bytes of the embedded corpus, two Pre-LN layers",
        replace(
            _BYTES, model=replace(_BYTES.model, width=64, ffn=256, layers=2, heads=2, tokens=64), data=None, batch=8,
            steps=300, warmup=30, precision="fp32", record_every=100, probe_blocks=32,
        ),
        (3e-3, 1e-2, 3e-2, 1e-1),
        (0,),
        tuned=False,
    ),
    "pre": Arena("bytes of enwik8, six Pre-LN layers", _BYTES, (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (0, 1, 2)),
    "post": Arena(
        "bytes of enwik8, six Post-LN layers", replace(_BYTES, model=replace(_BYTES.model, norm="post")),
        (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), (0, 1, 2), tuned=False,
    ),
    "rotary": Arena(
        "bytes of enwik8, six Pre-LN layers, rotary positions",
        replace(_BYTES, model=replace(_BYTES.model, positions="rotary")),
        (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (0, 1, 2), tuned=False,
    ),
    "words": Arena(
        "words of WikiText-2, six Pre-LN layers",
        replace(_BYTES, model=replace(_BYTES.model, width=128, ffn=512, dropout=0.1), data="wikitext-2", unit="words"),
        (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (0, 1, 2), tuned=False,
    ),
}  # fmt: skip


def run_arena(
    arena: Arena,
    folder: str | Path,
    *,
    device: str | None = None,
    group_size: int = 45,
    renew: bool = False,
    watch: Callable[[str, Progress], None] | None = None,
) -> None:
    """Times the contenders, then trains every one into a folder of its own.

    What is there already is neither timed nor trained again, a timing of another version of the method apart; a group
    that was cut off is trained anew. What another version of a method trained is refused, or with `renew` removed when
    its turn to be trained anew has come.
    """
    folder = Path(folder)
    _check_names(arena.contenders)
    torch_device = device_of(device)
    corpus = load_corpus(arena.config.data, unit=arena.config.unit, vocabulary=arena.config.vocabulary)
    check_sizes(arena.config, corpus)
    entries = entries_in(folder)
    renewed = [entry for entry in entries if renew and entry.contender in arena.contenders and _is_outdated(entry)]
    _check_folder(arena, folder, [entry for entry in entries if entry not in renewed], corpus)
    plans = [_plan(arena, name, folder, group_size) for name in arena.contenders]
    for plan in plans:  # all of them, before anything is written or removed
        if plan.folder not in {earlier.plan.folder for earlier in renewed}:
            plan.check()
            check_groups(plan)
    for earlier in renewed:
        check_groups(earlier.plan)
    costs, old = _costs(folder)
    if untimed := [name for name in arena.contenders if name not in costs or name in old]:
        timed = {name: arena.planned(name) for name in (REFERENCE, *untimed)}
        first = {name: (config, members[0]) for name, (config, members) in timed.items()}
        write_timing(folder, time_contenders(first, corpus, torch_device))
    watch = watch or (lambda _group, _progress: None)
    for name, plan in zip(arena.contenders, plans, strict=True):
        for earlier in renewed:
            if earlier.contender == name:
                discard(earlier.plan)
        discard_unfinished(plan)
        run_plan(
            plan,
            corpus,
            device=device,
            watch=lambda group, progress, name=name: watch(f"{name} {group}", progress),  # type: ignore[misc]
        )


def _plan(arena: Arena, name: str, folder: Path, group_size: int) -> Plan:
    config, members = arena.planned(name)
    about = {"contender": name, "rule": METHODS[config.model.method].version}
    return Plan.of(folder / name, config, members, group_size, about)


def _check_names(contenders: Sequence[str]) -> None:
    if not contenders:
        raise LocaterError("an arena without contenders: name at least one contender")
    unknown = [name for name in contenders if name not in CONTENDERS]
    if unknown:
        raise LocaterError(f"there is no contender {unknown[0]!r}; there are {', '.join(CONTENDERS)}")


def _check_folder(arena: Arena, folder: Path, entries: Sequence[Entry], corpus: Corpus) -> None:
    """A folder holds one arena: what is trained into it must fit what is there."""
    name = arena.contenders[0]
    wanted = conditions(*arena.planned(name), corpus.fingerprint)
    for entry in entries:
        if _is_outdated(entry):
            raise LocaterError(
                f"{entry.plan.folder} was trained by another version of {entry.plan.config.model.method} than this "
                "one: choose another folder, or train it anew (--renew)"
            )
        if found := difference(entry.conditions(), wanted):
            what, then, now = found
            raise LocaterError(
                f"{folder} holds {entry.contender} with {what} {then}, and {name} is to be trained with {now}: "
                "choose another folder, or remove this one to start anew"
            )


def _is_outdated(entry: Entry) -> bool:
    return entry.version != METHODS[entry.plan.config.model.method].version


# ---------------------------------------------------------------------- results


def outdated(folder: str | Path) -> set[str]:
    """The contenders there that were trained by another version of their method's formula than this one."""
    return {entry.contender for entry in entries_in(Path(folder)) if _is_outdated(entry)}


def to_renew(folder: str | Path) -> set[str]:
    """The contenders there that another version of their method trained, or whose training was cut off."""
    return {entry.contender for entry in entries_in(Path(folder)) if _is_outdated(entry) or not entry.is_finished}


def outdated_costs(folder: str | Path) -> set[str]:
    """The contenders there whose time and memory are those of another version of their method's formula."""
    return _costs(Path(folder))[1]


def finished(folder: str | Path) -> list[str]:
    """The contenders there that were trained to the end."""
    return [entry.contender for entry in entries_in(Path(folder)) if entry.is_finished]


def _costs(folder: Path) -> tuple[dict[str, Cost], set[str]]:
    """Of each contender the first timing of its method as it is now, or else the first of all; and whose are old."""
    # where timings do not say what was timed: it was what was trained, but for LocAteR auto's rule, which was another
    unsaid = {entry.contender: entry.version for entry in entries_in(folder)} | {"locater-auto": None}
    costs, old = {}, set()
    for name, timings in read_costs(folder, unsaid).items():
        current = METHODS[CONTENDERS[name].method].version if name in CONTENDERS else None
        own = [cost for version, cost in timings if version == current]
        costs[name] = (own or [cost for _, cost in timings])[0]
        if not own:
            old.add(name)
    return costs, old


def read_arena(folder: str | Path, contenders: Sequence[str] | None = None) -> pd.DataFrame:
    """A row a trained model of these contenders, or of all that are there, at its end and at its worst.

    contender, strength, learning_rate, seed; loss (validation, nats; NaN if it broke); max_logit, the largest of all
    records; entropy, the lowest mean over a layer's heads of all records; rank_residual, the last layer's at the end;
    milliseconds, of a model and update, relative, the same in units of no protection's, and bytes, of a model.
    """
    import pandas as pd

    folder = Path(folder)
    entries = entries_in(folder)
    if not entries:
        raise LocaterError(f"{folder} holds no arena: no folder in it has the sweep.json of a contender")
    if contenders is not None:
        _check_names(contenders)
        if absent := set(contenders) - {entry.contender for entry in entries}:
            raise LocaterError(f"{folder} does not hold {sorted(absent)[0]}: train it first")
        entries = [entry for entry in entries if entry.contender in contenders]
    _check_names([entry.contender for entry in entries])
    first = entries[0]
    for entry in entries[1:]:
        if found := difference(first.conditions(), entry.conditions()):
            what, one, other = found
            raise LocaterError(
                f"{first.contender} and {entry.contender} in {folder} cannot stand in one table: {what} is {one} "
                f"for the one and {other} for the other; name contenders that were trained alike"
            )
    costs, _ = _costs(folder)
    rows: list[dict[str, Any]] = []
    for entry in entries:
        records = entry.records()
        for member in entry.members:
            about = {"contender": entry.contender, "strength": member.strength, "learning_rate": member.learning_rate}
            row = about | {"seed": member.seed} | _outcome(records[member.name])
            rows.append(row | asdict(costs.get(entry.contender, Cost())))
    return pd.DataFrame(rows)


def _outcome(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    last = records[-1]
    loss, residual = last["valid_loss"], last["rank_residual"][-1]
    if any("broke_at" in record for record in records):
        loss = math.nan
    return {
        "loss": math.inf if loss is None else loss,
        "max_logit": max(_largest(record["max_logit"]) for record in records),
        "entropy": min(_lowest_mean(record["entropy"]) for record in records),
        "rank_residual": math.nan if residual is None else residual,
    }


def _largest(layers: list[list[float | None]]) -> float:
    """Of all heads; what is no number is the worst of all, infinite."""
    return max(math.inf if value is None else value for heads in layers for value in heads)


def _lowest_mean(layers: list[list[float | None]]) -> float:
    """Over a layer's heads; what is no number is the worst of all, 0."""
    return min(0.0 if None in heads else sum(filter(None, heads)) / len(heads) for heads in layers)


def summary(models: pd.DataFrame, strength: str = "default") -> pd.DataFrame:
    """A row a contender, over seeds, at its default strength or at its "best": that of the lowest area.

    loss: the lowest mean of all learning rates where every seed has one; area: the mean over the learning rates of the
    loss, the worst finite one of all where there is none; trains_to: the largest learning rate up to which, from the
    best one on, no seed breaks (TRAINS_WITHIN); holds_to: up to which no seed's attention collapses; max_logit and
    entropy: the worst up to trains_to. NaN is none.
    """
    import pandas as pd

    if strength not in ("default", "best"):
        raise LocaterError(f"strength must be default or best, got {strength!r}")
    _check_names(list(models.contender.unique()))
    finite = models.loss[np.isfinite(models.loss)]
    best, worst = finite.min(), finite.max()
    rows = []
    for name in (key for key in CONTENDERS if key in set(models.contender)):
        contender, of_contender = CONTENDERS[name], models[models.contender == name]
        strengths = [float(value) for value in of_contender.strength.unique()]
        lines = {s: _line(of_contender[of_contender.strength == s], best, worst) for s in strengths}
        chosen = contender.strengths[0] if strength == "default" else min(lines, key=lambda s: lines[s]["area"])
        if chosen not in lines:
            there = ", ".join(f"{s:g}" for s in lines)
            raise LocaterError(
                f"{name} was not trained at its default strength {chosen:g} but at {there}: train it anew"
            )
        cost = of_contender[["milliseconds", "relative", "bytes"]].iloc[0].to_dict()
        row: dict[str, Any] = {"contender": name, "label": contender.label, "strength": chosen}
        rows.append(row | lines[chosen] | cost | {"at_inference": contender.at_inference})
    return pd.DataFrame(rows)


def _line(part: pd.DataFrame, best: float, worst: float) -> dict[str, float]:
    finite = np.isfinite(part.loss)
    part = part.assign(
        capped=part.loss.where(finite, worst),
        finite=finite,
        trains=finite & (part.loss <= TRAINS_WITHIN * best),
        holds=(part.max_logit <= LOGIT_CEILING) & (part.entropy >= ENTROPY_FLOOR),
    )
    at = part.groupby("learning_rate").agg(
        capped=("capped", "mean"), finite=("finite", "all"), trains=("trains", "all"), holds=("holds", "all"),
        max_logit=("max_logit", "max"), entropy=("entropy", "min"), rank_residual=("rank_residual", "mean"),
    )  # fmt: skip
    lowest = at[at.finite].nsmallest(1, "capped")  # a row, or none
    loss, best_rate, residual = (
        float(values[0]) if len(values) else math.nan
        for values in (lowest.capped.to_numpy(), lowest.index.to_numpy(), lowest.rank_residual.to_numpy())
    )
    # how many rates: one that is so low that little is learned has not broken
    learned = at.trains.get(best_rate, default=False)
    trains = int((at.trains | (at.finite & (at.index < best_rate))).cummin().sum()) if learned else 0
    holds = int(at.holds.cummin().sum())
    return {
        "loss": loss,
        "best_rate": best_rate,
        "area": float(at.capped.mean()),
        "trains_to": float(at.index[trains - 1]) if trains else math.nan,
        "holds_to": float(at.index[holds - 1]) if holds else math.nan,
        "max_logit": float(at.max_logit.iloc[:trains].max()),
        "entropy": float(at.entropy.iloc[:trains].min()),
        "rank_residual": residual,
    }
