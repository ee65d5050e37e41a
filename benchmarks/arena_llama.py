"""The arena where people train: Hugging Face's Llama, 24 million parameters, bytes, compiled, bf16, the shipped methods
through the public API.

    python benchmarks/arena_llama.py run FOLDER [--only TEXT] [--minutes M]    trains what FOLDER/runs.jsonl lacks
    python benchmarks/arena_llama.py show FOLDER                               prints the tables

A run is one line of the file; what is there is not trained again, but for LocAteR's of another version of its rule; a
run that was cut off is trained anew. Processes may share a folder. Methods of one seed share their start and their
batches. `plan` is what is compared, written down before the runs.
"""

from __future__ import annotations

import argparse
import gzip
import math
import os
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import nn

from _runs import add_line, claim, read_lines, somebody_trains
from _versions import MARK, newest, outdated, versioned
from locater import observe
from locater.control import DecoupledLocAteR, QKClip, QKNorm

BATCH, TOKENS = 16, 512
UPDATES, LONG = 1_500, 15_000
TRAIN, VALID = 90_000_000, 1_000_000  # bytes of enwik8: its first 90 million, and a million of the next five
METHODS = ("none", "LocAteR", "QK-norm", "keys alone", "keys alone, LocAteR", "QK-clip")
RATES = {"AdamW": (3e-4, 1e-3, 3e-3, 1e-2), "Muon": (1e-3, 3e-3, 1e-2)}  # of none and LocAteR
RIVALS_RATES = {"AdamW": (1e-3, 3e-3, 1e-2), "Muon": (3e-3, 1e-2)}
SEEDS, MORE_SEEDS = (0, 1, 2), (3, 4, 5, 6, 7)  # more of none and LocAteR, at the rate that is best without protection


@dataclass(frozen=True)
class Run:
    method: str
    optimizer: str
    rate: float
    seed: int
    updates: int = UPDATES
    unit: str = "bytes"

    @property
    def name(self) -> str:
        return f"{self.method}, {self.optimizer} {self.rate:g}, seed {self.seed}, {self.updates} updates, {self.unit}"


def plan(known: list[tuple[Run, dict]]) -> Iterator[Run]:
    """All comparisons, in the order in which they are trained; some are at the rate that is best without protection."""
    yield from planned(best_rates(known))


def planned(best: dict[str, float | None]) -> Iterator[Run]:
    longest = [Run(method, "AdamW", 1e-3, 0, LONG) for method in ("none", "LocAteR", "QK-norm")]
    found = None not in best.values()
    if found:  # nothing waits for the others: the longest begin first, and processes end together
        yield from longest
    for optimizer, rates in RATES.items():
        for rate in rates:
            for seed in SEEDS:
                yield from (Run(method, optimizer, rate, seed) for method in ("none", "LocAteR"))
    for optimizer, rate in best.items():
        if rate is not None:
            for seed in MORE_SEEDS:
                yield from (Run(method, optimizer, rate, seed) for method in ("none", "LocAteR"))
    for optimizer, rates in RIVALS_RATES.items():
        for rate in rates:
            for seed in SEEDS:
                yield from (Run(method, optimizer, rate, seed) for method in ("QK-norm", "keys alone"))
    for method, optimizer in (("keys alone, LocAteR", "AdamW"), ("QK-clip", "AdamW"), ("QK-clip", "Muon")):
        yield from (Run(method, optimizer, rate, seed) for seed in SEEDS if (rate := best[optimizer]) is not None)
    yield from (Run(method, "AdamW", 1e-3, 0, unit="words") for method in ("none", "LocAteR", "QK-norm"))
    if not found:
        yield from longest


def best_rates(known: list[tuple[Run, dict]]) -> dict[str, float | None]:
    return {optimizer: best_rate(optimizer, known) for optimizer in RATES}


def best_rate(optimizer: str, known: list[tuple[Run, dict]]) -> float | None:
    """Of the lowest mean loss without protection over `SEEDS`, once all of them are known."""
    found = {run: line["loss"] for run, line in known}
    losses = {rate: [found.get(Run("none", optimizer, rate, seed)) for seed in SEEDS] for rate in RATES[optimizer]}
    if any(loss is None for each in losses.values() for loss in each):
        return None
    return min(losses, key=lambda rate: sum(losses[rate]))


# ---------------------------------------------------------------------- text


class Text:
    """Bytes of enwik8, or words of WikiText-2, as tokens on the GPU."""

    def __init__(self, unit: str) -> None:
        folder = Path(os.environ.get("LOCATER_DATA", "data"))
        if unit == "bytes":
            with gzip.open(folder / "enwik8" / "enwik8.gz") as file:
                tokens = np.frombuffer(file.read(TRAIN + VALID), dtype=np.uint8)
            self.train, self.valid, self.vocabulary = tokens[:TRAIN], tokens[TRAIN:], 256
        else:
            at = folder / "wikitext-2"
            lines = {part: (at / f"{part}.txt").read_text("utf-8").split() for part in ("train", "valid")}
            words = {word: i for i, word in enumerate(dict.fromkeys(lines["train"]))}
            self.train, self.valid = (np.array([words.get(w, 0) for w in lines[part]], np.int32) for part in lines)
            self.vocabulary = len(words)
        self.train, self.valid = (torch.from_numpy(x.copy()).cuda() for x in (self.train, self.valid))

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        starts = torch.randint(len(self.train) - TOKENS, (BATCH, 1), generator=generator, device="cuda")
        return self.train[starts + torch.arange(TOKENS, device="cuda")].long()

    def batches(self) -> Iterator[torch.Tensor]:
        rows = self.valid[: len(self.valid) // (BATCH * TOKENS) * BATCH * TOKENS].view(-1, BATCH, TOKENS)
        yield from (row.long() for row in rows)


# ---------------------------------------------------------------------- a run


def built(vocabulary: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1408,
        vocab_size=vocabulary, use_cache=False, max_position_embeddings=TOKENS,
    )  # fmt: skip
    return LlamaForCausalLM(config).cuda().train()


def optimizers_of(model: nn.Module, kind: str, rate: float) -> list[torch.optim.Optimizer]:
    """Decay on matrices alone. Muon's updates are as large as AdamW's, which trains what is not inside the layers."""
    named = list(model.named_parameters())
    inside = [p for name, p in named if p.ndim == 2 and "layers" in name]
    tables = [p for name, p in named if p.ndim == 2 and "layers" not in name]
    vectors = {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0}
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True, "lr": rate}
    if kind == "AdamW":
        return [torch.optim.AdamW([{"params": inside + tables}, vectors], **options)]
    muon = torch.optim.Muon(inside, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW([{"params": tables}, vectors], **options)]


def factor(update: int, updates: int) -> float:
    """Warm-up over a tenth, then a cosine to a tenth."""
    warm = updates // 10
    if update < warm:
        return (update + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (update - warm) / (updates - warm)))


class Trainer:
    """Runs of one method and vocabulary: the model is compiled once, and its weights are set anew for each.

    Compiled code keeps the hooks that it was compiled with, so methods stay, and are attached to new optimizers.
    """

    def __init__(self, method: str, text: Text) -> None:
        self.text, self.model = text, built(text.vocabulary)
        self.norm = self.locater = self.clip = None
        if method.startswith(("QK-norm", "keys alone")):
            self.norm = QKNorm(queries=method == "QK-norm").apply(self.model)
        if method.endswith("LocAteR"):
            self.locater = DecoupledLocAteR(self.model)
            self.fresh = self.locater.state_dict()
        # QK-clip looks at q and k in every forward, and is not compiled
        self.clips = method == "QK-clip"
        self.compiled = self.model if self.clips else torch.compile(self.model, mode="reduce-overhead")

    def optimizers(self, run: Run) -> list[torch.optim.Optimizer]:
        """New ones, the method at work in their steps, and the model at its start."""
        torch.manual_seed(run.seed)
        self.model.load_state_dict(built(self.text.vocabulary).state_dict(), strict=False)
        if self.norm is not None:
            for gain in self.norm.parameters:
                gain.detach().fill_(1.0)
        made = optimizers_of(self.model, run.optimizer, run.rate)
        if self.locater is not None:
            self.locater.detach()
            self.locater.load_state_dict(self.fresh)
            self.locater.attach(made)
        if self.clips:
            if self.clip is not None:
                self.clip.remove()
            self.clip = QKClip().apply(self.model, made)
        return made

    def __call__(self, run: Run) -> dict:
        optimizers = self.optimizers(run)
        rates = [[group["lr"] for group in one.param_groups] for one in optimizers]
        generator = torch.Generator("cuda").manual_seed(run.seed)
        largest, lowest, losses, watching, began = 0.0, math.inf, [], 0.0, time.perf_counter()
        for update in range(run.updates):
            loss = self.step(optimizers, self.text.batch(generator))
            for one, own in zip(optimizers, rates, strict=True):
                one.step()
                for group, rate in zip(one.param_groups, own, strict=True):
                    group["lr"] = rate * factor(update + 1, run.updates)
            if update % 250 == 249:
                losses.append(float(loss))
                at = time.perf_counter()
                logit, entropy = self.watched()
                largest, lowest, watching = (
                    max(largest, logit),
                    min(lowest, entropy),
                    watching + time.perf_counter() - at,
                )
        torch.cuda.synchronize()
        took = time.perf_counter() - began - watching
        found = {**asdict(run), "loss": self.loss(), "largest_logit": largest, "lowest_entropy": lowest}
        found |= {"train_losses": [round(x, 4) for x in losses], "seconds": took}
        return found

    def step(self, optimizers: list[torch.optim.Optimizer], ids: torch.Tensor) -> torch.Tensor:
        for one in optimizers:
            one.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss.detach()

    @torch.no_grad()
    def watched(self) -> tuple[float, float]:
        """The largest logit of any head and the lowest mean entropy of a layer, on 8 held-out sequences."""
        ids = self.text.valid[: 8 * TOKENS].view(8, TOKENS).long()
        with torch.compiler.set_stance("force_eager"), observe(self.model) as seen:
            self.model.eval()(input_ids=ids)
        self.model.train()
        table = seen.table()
        return float(table.max_logit.max()), float(table.groupby("layer").entropy.mean().min())

    @torch.no_grad()
    def loss(self) -> float:
        """Nats a token, held out."""
        total = []
        for ids in self.text.batches():
            with torch.autocast("cuda", torch.bfloat16):
                total.append(self.compiled(input_ids=ids, labels=ids).loss.clone())  # graphs write there again
        return float(torch.stack(total).mean())


def missing(path: Path, only: str) -> tuple[Run, FileLock] | None:
    """The next run that is neither trained nor being trained by another process, which is kept from it."""
    runs = (run for run in plan(read(path)) if re.match(only, run.name))
    return claim(path.parent, runs, lambda: done(read(path)), lambda run: run.name)


def more_to_come(known: list[tuple[Run, dict]], only: str) -> bool:
    """Whether runs that match are planned once all best rates are known, whichever they are."""
    best = best_rates(known)
    cases = product(*(RATES[optimizer] if rate is None else [rate] for optimizer, rate in best.items()))
    later = {run for case in cases for run in planned(dict(zip(best, case, strict=True)))}
    return any(re.match(only, run.name) for run in later.difference(planned(best)))


def run_all(folder: Path, only: str, minutes: float) -> None:
    """Several processes may share a folder. Where a best rate is not known yet, it is waited for while others train."""
    path, end = folder / "runs.jsonl", time.monotonic() + 60 * minutes
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    texts, trainers, alone = {}, {}, 0
    while time.monotonic() < end:
        found = missing(path, only)
        if found is None:
            known = read(path)
            if None not in best_rates(known).values():
                return
            alone = 0 if somebody_trains(folder) else alone + 1  # twice: others may be between two runs
            if alone > 1 or not more_to_come(known, only):
                print("nothing else that matches can be trained before the best rates without protection are known, "
                      "which runs without --only, or with --only none, find", flush=True)  # fmt: skip
                return
            time.sleep(5)
            continue
        run, lock = found
        try:
            if run.unit not in texts:
                texts[run.unit] = Text(run.unit)
            if (run.method, run.unit) not in trainers:
                trainers[run.method, run.unit] = Trainer(run.method, texts[run.unit])
            line = trainers[run.method, run.unit](run)
            add_line(path, versioned(line))
        finally:
            lock.release()
        print(f"{run.name}: {line['loss']:.4f} nats, largest logit {line['largest_logit']:.0f}, "
              f"{1e3 * line['seconds'] / run.updates:.1f} ms an update", flush=True)  # fmt: skip
    print("time is up; the same command goes on", flush=True)


# ---------------------------------------------------------------------- tables


def read(path: Path) -> list[tuple[Run, dict]]:
    names = tuple(Run.__dataclass_fields__)
    return [(Run(**{name: line[name] for name in names}), line) for line in newest(read_lines(path), names)]


def done(known: list[tuple[Run, dict]]) -> set[Run]:
    return {run for run, line in known if not outdated(line)}


def interval(differences: list[float]) -> str:
    """Their mean and 95% interval, by Student's t."""
    from scipy.stats import t

    n = len(differences)
    if n < 2:
        return f"{100 * differences[0]:+.2f}%" if differences else "–"
    half = t.ppf(0.975, n - 1) * statistics.stdev(differences) / math.sqrt(n)
    return f"{100 * statistics.mean(differences):+.2f}% ± {100 * half:.2f}"


def table(folder: Path) -> list[str]:
    """In Markdown: bits a token, against none by pairs of one seed, and the largest logit of all seeds."""
    found = read(folder / "runs.jsonl")
    lines = ["| training | method | seeds | bits | against none | largest logit |", "|---|---|---|---|---|---|"]
    keys = {(run.unit, run.updates, run.optimizer, run.rate) for run, _ in found}
    for key in sorted(keys):
        here = {
            (run.method, run.seed): line
            for run, line in found
            if (run.unit, run.updates, run.optimizer, run.rate) == key
        }
        for method in (one for one in METHODS if any(method == one for method, _ in here)):
            own = {seed: line for (other, seed), line in here.items() if other == method}
            pairs = [
                line["loss"] / here["none", seed]["loss"] - 1 for seed, line in own.items() if ("none", seed) in here
            ]
            bits = statistics.mean(line["loss"] for line in own.values()) / math.log(2)
            largest = max(line["largest_logit"] for line in own.values())
            against = "" if method == "none" else interval(pairs)
            what = f"{key[0]}, {key[1]:,} updates, {key[2]} {key[3]:g}"
            name = f"{method} {MARK}" if any(map(outdated, own.values())) else method
            lines.append(f"| {what} | {name} | {len(own)} | {bits:.3f} | {against} | {largest:,.0f} |")
    return lines


def show(folder: Path) -> None:
    print("\n".join(table(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="runs whose name matches this regular expression from its start")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run is begun after so many")
    given = parser.parse_args()
    run_all(given.folder, given.only, given.minutes) if given.what == "run" else show(given.folder)


if __name__ == "__main__":
    main()
