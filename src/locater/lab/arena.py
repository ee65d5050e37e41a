"""LocAteR against its rivals: one decoder, one text, rising learning rates, and what each method makes of them.

A contender is a method and the strengths it is tried at, its authors' default first; all contenders have as many. Each
is trained stacked, strengths × learning rates × seeds at once, by the engine that trains the paper's models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from locater.errors import LocaterError
from locater.lab.config import Config, Member, ModelConfig
from locater.lab.data import Corpus, load_corpus
from locater.lab.records import read_metrics, read_runs
from locater.lab.stack import Stack
from locater.lab.sweep import sweep
from locater.lab.train import Progress

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ARENAS",
    "CONTENDERS",
    "ENTROPY_FLOOR",
    "LOGIT_CEILING",
    "Arena",
    "Contender",
    "read_arena",
    "run_arena",
    "step_cost",
    "summary",
]

LOGIT_CEILING, ENTROPY_FLOOR = 200.0, 0.3
"""Attention has collapsed where a logit exceeds the one, or a layer's mean entropy, in nats, is under the other."""

_TIMED = 15  # models stacked while a step is timed on a GPU: for all contenders the same

TRAINS_WITHIN = 1.2
"""A learning rate breaks a contender if a seed's loss is not finite or ends above this times the best of all."""


@dataclass(frozen=True)
class Contender:
    """A method as it enters the arena."""

    label: str
    method: str
    strengths: tuple[float, ...]  # the default first
    at_inference: str  # what remains of it
    coupled: bool = False  # LocAteR through the optimizer: the strength is the paper's κ₂, beside κ₁ = 100

    def member(self, strength: float, rate: float, seed: int, config: Config) -> Member:
        name = f"x{strength:g}-lr{rate:g}-s{seed}"
        if self.coupled:
            tokens = config.tokens_per_batch
            return Member(name, seed, rate, 0.0, strength / tokens, 100 / tokens, strength=strength)
        return Member(name, seed, rate, 0.0, strength=strength)


CONTENDERS: dict[str, Contender] = {
    "none": Contender("no protection", "none", (0.0,), "nothing"),
    "locater-paper": Contender("LocAteR, as in the paper", "none", (1.0, 0.1, 10.0), "nothing", coupled=True),
    "locater-decoupled": Contender("LocAteR, decoupled", "locater-decoupled", (1.0, 0.3, 3.0), "nothing"),
    "locater-auto": Contender("LocAteR, auto", "locater-auto", (3.0, 1.0, 10.0), "nothing"),
    "qk-norm": Contender("QK-norm", "qk-norm", (1.0, 0.3, 3.0), "two norms a layer"),
    "sigma-reparam": Contender("σReparam, all layers", "sigma-reparam", (1.0, 0.5, 2.0), "nothing"),
    "sigma-reparam-qk": Contender("σReparam, q and k", "sigma-reparam-qk", (1.0, 0.5, 2.0), "nothing"),
    "qk-clip": Contender("QK-clip", "qk-clip", (100.0, 30.0, 10.0), "nothing"),
    "softcap": Contender("softcap", "softcap", (50.0, 20.0, 10.0), "a tanh a logit; no SDPA"),
    "z-loss": Contender("attention z-loss", "z-loss", (1e-4, 1e-3, 1e-2), "nothing"),
    "qk-decay": Contender("decay of W_Q, W_K", "qk-decay", (1.0, 0.1, 10.0), "nothing"),
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

    def members(self, contender: Contender) -> list[Member]:
        strengths = contender.strengths if self.tuned else contender.strengths[:1]
        return [
            contender.member(strength, rate, seed, self.config)
            for strength in strengths
            for rate in self.learning_rates
            for seed in self.seeds
        ]


_BYTES = Config(
    model=ModelConfig(width=256, ffn=1024, layers=6, heads=4, tokens=256, norm="pre", tied=True, dropout=0.0),
    data="enwik8", unit="bytes", batch=8, steps=800, warmup=100, final_rate=0.1, clip=1.0, precision="bf16",
    record_every=200, record_early=False, checkpoint_every=0, probe_blocks=16, valid_blocks=256, details=False,
)  # fmt: skip

ARENAS: dict[str, Arena] = {
    "laptop": Arena(
        "the embedded corpus, two small layers: minutes on two cores",
        replace(
            _BYTES, model=replace(_BYTES.model, width=64, ffn=256, layers=2, heads=2, tokens=64), data=None, batch=8,
            steps=300, warmup=30, precision="fp32", record_every=100, probe_blocks=32,
        ),
        (3e-3, 1e-2, 3e-2, 1e-1),
        (0,),
        tuned=False,
    ),
    "pre": Arena("enwik8, six Pre-LN layers", _BYTES, (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (0, 1, 2)),
    "post": Arena(
        "enwik8, six Post-LN layers", replace(_BYTES, model=replace(_BYTES.model, norm="post")),
        (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), (0, 1, 2), tuned=False,
    ),
    "words": Arena(
        "WikiText-2, six Pre-LN layers",
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
    watch: Callable[[str, Progress], None] | None = None,
) -> None:
    """Trains every contender into a folder of its own; one that is there already is not trained again."""
    if not arena.contenders:
        raise LocaterError("an arena without contenders: name at least one contender")
    unknown = [name for name in arena.contenders if name not in CONTENDERS]
    if unknown:
        raise LocaterError(f"there is no contender {unknown[0]!r}; there are {', '.join(CONTENDERS)}")
    corpus = load_corpus(arena.config.data, unit=arena.config.unit, vocabulary=arena.config.vocabulary)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for name in arena.contenders:
        contender = CONTENDERS[name]
        config = arena.config.changed(method=contender.method)
        members = arena.members(contender)
        about: dict[str, Any] = {"contender": name}
        if not (Path(folder) / name / "sweep.json").exists():
            timed = [replace(members[0], name=f"timed-{i}") for i in range(_TIMED if place.type == "cuda" else 2)]
            about |= step_cost(config, timed, corpus, place)
        sweep(
            config,
            members,
            Path(folder) / name,
            group_size=group_size,
            device=device,
            about=about,
            watch=None if watch is None else lambda group, progress, name=name: watch(f"{name} {group}", progress),  # type: ignore[misc]
        )


def step_cost(config: Config, members: Sequence[Member], corpus: Corpus, device: torch.device) -> dict[str, float]:
    """Milliseconds a model and update, and bytes a model on a GPU, of these members stacked."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    stack = Stack(config, members, corpus, device)
    times = []
    for warm, count in ((True, 4), (False, 20 if cuda else 3)):
        if cuda:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(count):
            stack.advance()
        if cuda:
            torch.cuda.synchronize(device)
        if not warm:
            times.append((time.perf_counter() - began) / count)
    found = {"milliseconds": 1e3 * times[0] / len(members)}
    if cuda:
        found["bytes"] = (torch.cuda.max_memory_allocated(device) - before) / len(members)
    return found


# ---------------------------------------------------------------------- results


def read_arena(folder: str | Path) -> pd.DataFrame:
    """A row a trained model, at its end and at its worst.

    contender, strength, learning_rate, seed; loss (validation, nats; NaN if it broke); max_logit, the largest of all
    records; entropy, the lowest mean over a layer's heads of all records; rank_residual, the last layer's at the end;
    milliseconds and bytes, of a model and update.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    found = [path for path in sorted(Path(folder).glob("*")) if (path / "sweep.json").exists()]
    if not found:
        raise LocaterError(f"{folder} holds no arena: no folder in it has a sweep.json")
    for path in found:
        by_name = {member.name: (run, member) for run in read_runs(path) for member in run.members}
        for name, records in read_metrics(path).groupby("member", sort=False):
            run, member = by_name[str(name)]
            last = records.iloc[-1]
            broke = "broke_at" in records and bool(records.broke_at.notna().any())
            whole = not broke and last["step"] == run.config.steps and last["valid_loss"] is not None
            rows.append(
                {
                    "contender": run.about.get("contender", path.name),
                    "strength": member.strength,
                    "learning_rate": member.learning_rate,
                    "seed": member.seed,
                    "loss": float(last["valid_loss"]) if whole else math.nan,
                    "max_logit": max(_worst(layers, max) for layers in records["max_logit"]),
                    "entropy": min(_worst(layers, min) for layers in records["entropy"]),
                    "rank_residual": _number(last["rank_residual"][-1]),
                    "milliseconds": run.about.get("milliseconds", math.nan),
                    "bytes": run.about.get("bytes", math.nan),
                }
            )
    return pd.DataFrame(rows)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _worst(layers: list[list[float | None]], choose: Callable[..., float]) -> float:
    """The largest logit of all heads, or the lowest mean over a layer's heads; what is no number is worst of all."""
    if any(value is None for heads in layers for value in heads):
        return math.inf if choose is max else 0.0
    if choose is max:
        return max(float(value or 0) for heads in layers for value in heads)
    return min(sum(float(value or 0) for value in heads) / len(heads) for heads in layers)


def summary(models: pd.DataFrame, strength: str = "default") -> pd.DataFrame:
    """A row a contender, over seeds, at its default strength or at its "best": that of the lowest area.

    loss: the mean at the learning rate where that is lowest; area: the mean over the learning rates of the loss, at
    most the worst finite one of all; trains_to: the largest learning rate up to which no seed breaks (TRAINS_WITHIN);
    holds_to: up to which no seed's attention collapses; max_logit and entropy: the worst up to trains_to.
    """
    import pandas as pd

    if strength not in ("default", "best"):
        raise LocaterError(f"strength must be default or best, got {strength!r}")
    best, worst = models.loss.min(), models.loss.max()
    rows = []
    for name, of_contender in models.groupby("contender", sort=False):
        contender = CONTENDERS[str(name)]
        lines = {s: _line(part, best, worst) for s, part in of_contender.groupby("strength", sort=False)}
        chosen = contender.strengths[0] if strength == "default" else min(lines, key=lambda s: lines[s]["area"])
        if chosen not in lines:
            continue
        cost = of_contender[["milliseconds", "bytes"]].iloc[0].to_dict()
        row: dict[str, Any] = {"contender": name, "label": contender.label, "strength": chosen}
        rows.append(row | lines[chosen] | cost | {"at_inference": contender.at_inference})
    order = {name: i for i, name in enumerate(CONTENDERS)}
    return pd.DataFrame(rows).sort_values("contender", key=lambda x: x.map(order), ignore_index=True)


def _line(part: pd.DataFrame, best: float, worst: float) -> dict[str, float]:
    part = part.assign(
        capped=part.loss.fillna(worst),
        trains=part.loss <= TRAINS_WITHIN * best,
        holds=(part.max_logit <= LOGIT_CEILING) & (part.entropy >= ENTROPY_FLOOR),
    )
    at = part.groupby("learning_rate").agg(
        loss=("capped", "mean"), trains=("trains", "all"), holds=("holds", "all"),
        max_logit=("max_logit", "max"), entropy=("entropy", "min"), rank_residual=("rank_residual", "mean"),
    )  # fmt: skip
    rates, lowest = at.index.to_numpy(dtype=float), int(at.loss.to_numpy().argmin())
    trains, holds = (int(at[name].cummin().sum()) for name in ("trains", "holds"))  # how many rates, from the lowest on
    return {
        "loss": float(at.loss.iloc[lowest]),
        "best_rate": float(rates[lowest]),
        "area": float(at.loss.mean()),
        "trains_to": float(rates[trains - 1]) if trains else math.nan,
        "holds_to": float(rates[holds - 1]) if holds else math.nan,
        "max_logit": float(at.max_logit.iloc[:trains].max()) if trains else math.nan,
        "entropy": float(at.entropy.iloc[:trains].min()) if trains else math.nan,
        "rank_residual": float(at.rank_residual.iloc[lowest]),
    }
