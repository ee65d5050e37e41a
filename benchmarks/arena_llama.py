"""The arena where people train: Hugging Face's Llama, 24 million parameters, bytes, compiled, bf16, the shipped methods
through the public API. `--small` is 0.8 million parameters for a CPU, in float32 and not compiled.

    python benchmarks/arena_llama.py run FOLDER [--small] [--only TEXT] [--minutes M]    what FOLDER/runs.jsonl lacks
    python benchmarks/arena_llama.py show FOLDER                                         prints the tables

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
from collections.abc import Iterator, Sequence
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

METHODS = ("none", "LocAteR", "QK-norm", "keys alone", "keys alone, LocAteR", "QK-clip")
SEEDS, MORE_SEEDS = (0, 1, 2), (3, 4, 5, 6, 7)  # more of none and LocAteR, at the rate that is best without protection


@dataclass(frozen=True)
class Size:
    """What is trained, on what, and at which rates. Runs of two sizes differ in their number of updates."""

    device: str
    width: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    batch: int
    tokens: int
    train: int  # bytes of enwik8, its first
    valid: int  # and those after them
    updates: int
    long: int  # updates of a few runs
    long_rates: tuple[float, ...]  # theirs, of AdamW
    look_every: int
    rates: dict[str, tuple[float, ...]]  # of none and LocAteR
    rivals_rates: dict[str, tuple[float, ...]]
    words: bool = False  # whether a few runs are on words
    first_at_full_rate: bool = False  # before warm-up begins: a fault of the runs in results/arena-llama

    @property
    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")


LARGE = Size(
    device="cuda", width=512, layers=8, heads=8, key_heads=4, inner=1_408, batch=16, tokens=512,
    train=90_000_000, valid=1_000_000, updates=1_500, long=15_000, long_rates=(1e-3,), look_every=250,
    rates={"AdamW": (3e-4, 1e-3, 3e-3, 1e-2), "Muon": (1e-3, 3e-3, 1e-2)},
    rivals_rates={"AdamW": (1e-3, 3e-3, 1e-2), "Muon": (3e-3, 1e-2)}, words=True, first_at_full_rate=True,
)  # fmt: skip
SMALL = Size(
    device="cpu", width=128, layers=4, heads=4, key_heads=2, inner=352, batch=8, tokens=128,
    train=90_000_000, valid=65_536, updates=600, long=6_000, long_rates=(3e-3, 1e-2), look_every=50,
    rates={"AdamW": (1e-3, 3e-3, 1e-2, 3e-2), "Muon": (3e-3, 1e-2, 3e-2)},
    rivals_rates={"AdamW": (3e-3, 1e-2, 3e-2), "Muon": (1e-2, 3e-2)},
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    method: str
    optimizer: str
    rate: float
    seed: int
    updates: int
    unit: str = "bytes"

    @property
    def name(self) -> str:
        return f"{self.method}, {self.optimizer} {self.rate:g}, seed {self.seed}, {self.updates} updates, {self.unit}"


def plan(known: list[tuple[Run, dict]], size: Size = LARGE) -> Iterator[Run]:
    """All comparisons, in the order in which they are trained; some are at the rate that is best without protection."""
    yield from planned(best_rates(known, size), size)


def planned(best: dict[str, float | None], size: Size) -> Iterator[Run]:
    def runs(methods: Sequence[str], optimizer: str, rate: float | None, seeds: Sequence[int]) -> Iterator[Run]:
        if rate is not None:
            yield from (Run(method, optimizer, rate, seed, size.updates) for seed in seeds for method in methods)

    three = "none", "LocAteR", "QK-norm"
    longest = [Run(method, "AdamW", rate, 0, size.long) for rate in size.long_rates for method in three]
    words = [Run(method, "AdamW", 1e-3, 0, size.updates, "words") for method in three if size.words]
    found = None not in best.values()
    if found:  # nothing waits for the others: the longest begin first, and processes end together
        yield from longest
    for optimizer, rates in size.rates.items():
        for rate in rates:
            yield from runs(("none", "LocAteR"), optimizer, rate, SEEDS)
    for optimizer, rate in best.items():
        yield from runs(("none", "LocAteR"), optimizer, rate, MORE_SEEDS)
    for optimizer, rates in size.rivals_rates.items():
        for rate in rates:
            yield from runs(("QK-norm", "keys alone"), optimizer, rate, SEEDS)
    for method, optimizer in (("keys alone, LocAteR", "AdamW"), ("QK-clip", "AdamW"), ("QK-clip", "Muon")):
        yield from runs((method,), optimizer, best[optimizer], SEEDS)
    yield from words
    if not found:
        yield from longest


def best_rates(known: list[tuple[Run, dict]], size: Size) -> dict[str, float | None]:
    return {optimizer: best_rate(optimizer, known, size) for optimizer in size.rates}


def best_rate(optimizer: str, known: list[tuple[Run, dict]], size: Size) -> float | None:
    """Of the lowest mean loss without protection over `SEEDS`, once all of them are known."""
    found = {run: line["loss"] for run, line in known}
    losses = {
        rate: [found.get(Run("none", optimizer, rate, seed, size.updates)) for seed in SEEDS]
        for rate in size.rates[optimizer]
    }
    if any(loss is None for each in losses.values() for loss in each):
        return None
    return min(losses, key=lambda rate: sum(losses[rate]))


# ---------------------------------------------------------------------- text


class Text:
    """Bytes of enwik8, or words of WikiText-2, as tokens on the device."""

    def __init__(self, unit: str, size: Size) -> None:
        self.size = size
        folder = Path(os.environ.get("LOCATER_DATA", "data"))
        if unit == "bytes":
            with gzip.open(folder / "enwik8" / "enwik8.gz") as file:
                tokens = np.frombuffer(file.read(size.train + size.valid), dtype=np.uint8)
            self.train, self.valid, self.vocabulary = tokens[: size.train], tokens[size.train :], 256
        else:
            at = folder / "wikitext-2"
            lines = {part: (at / f"{part}.txt").read_text("utf-8").split() for part in ("train", "valid")}
            words = {word: i for i, word in enumerate(dict.fromkeys(lines["train"]))}
            self.train, self.valid = (np.array([words.get(w, 0) for w in lines[part]], np.int32) for part in lines)
            self.vocabulary = len(words)
        self.train, self.valid = (torch.from_numpy(x.copy()).to(size.device) for x in (self.train, self.valid))

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        batch, tokens, device = self.size.batch, self.size.tokens, self.size.device
        starts = torch.randint(len(self.train) - tokens, (batch, 1), generator=generator, device=device)
        return self.train[starts + torch.arange(tokens, device=device)].long()

    def batches(self) -> Iterator[torch.Tensor]:
        shape = self.size.batch, self.size.tokens
        rows = self.valid[: len(self.valid) // math.prod(shape) * math.prod(shape)].view(-1, *shape)
        yield from (row.long() for row in rows)


# ---------------------------------------------------------------------- a run


def built(text: Text) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = text.size
    config = LlamaConfig(
        hidden_size=size.width, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads, intermediate_size=size.inner, vocab_size=text.vocabulary, use_cache=False,
        max_position_embeddings=size.tokens,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(size.device).train()


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
        self.text, self.size, self.model = text, text.size, built(text)
        self.norm = self.locater = self.clip = None
        if method.startswith(("QK-norm", "keys alone")):
            self.norm = QKNorm(queries=method == "QK-norm").apply(self.model)
        if method.endswith("LocAteR"):
            self.locater = DecoupledLocAteR(self.model)
            self.fresh = self.locater.state_dict()
        # QK-clip looks at q and k in every forward, and is not compiled
        self.clips = method == "QK-clip"
        plain = self.clips or self.size.device == "cpu"
        self.compiled = self.model if plain else torch.compile(self.model, mode="reduce-overhead")

    def optimizers(self, run: Run) -> list[torch.optim.Optimizer]:
        """New ones, the method at work in their steps, and the model at its start."""
        torch.manual_seed(run.seed)
        self.model.load_state_dict(built(self.text).state_dict(), strict=False)
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
        generator = torch.Generator(self.size.device).manual_seed(run.seed)
        largest, lowest, losses, watching, began = 0.0, math.inf, [], 0.0, time.perf_counter()
        for update in range(run.updates):
            part = 1.0 if update == 0 and self.size.first_at_full_rate else factor(update, run.updates)
            for one, own in zip(optimizers, rates, strict=True):
                for group, rate in zip(one.param_groups, own, strict=True):
                    group["lr"] = rate * part
            loss = self.step(optimizers, self.text.batch(generator))
            for one in optimizers:
                one.step()
            if (update + 1) % self.size.look_every == 0:
                losses.append(float(loss))
                at = time.perf_counter()
                logit, entropy = self.watched()
                largest, lowest = max(largest, logit), min(lowest, entropy)
                watching += time.perf_counter() - at
        if self.size.device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - began - watching
        found = {**asdict(run), "loss": self.loss(), "largest_logit": largest, "lowest_entropy": lowest}
        found |= {"train_losses": [round(x, 4) for x in losses], "seconds": took}
        return found

    def step(self, optimizers: list[torch.optim.Optimizer], ids: torch.Tensor) -> torch.Tensor:
        for one in optimizers:
            one.zero_grad()
        with self.size.autocast:
            loss = self.compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss.detach()

    @torch.no_grad()
    def watched(self) -> tuple[float, float]:
        """The largest logit of any head and the lowest mean entropy of a layer, on 8 held-out sequences."""
        ids = self.text.valid[: 8 * self.size.tokens].view(8, self.size.tokens).long()
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
            with self.size.autocast:
                total.append(self.compiled(input_ids=ids, labels=ids).loss.clone())  # graphs write there again
        return float(torch.stack(total).mean())


def missing(path: Path, only: str, size: Size = LARGE) -> tuple[Run, FileLock] | None:
    """The next run that is neither trained nor being trained by another process, which is kept from it."""
    runs = (run for run in plan(read(path), size) if re.match(only, run.name))
    return claim(path.parent, runs, lambda: done(read(path)), lambda run: run.name)


def more_to_come(known: list[tuple[Run, dict]], only: str, size: Size) -> bool:
    """Whether runs that match are planned once all best rates are known, whichever they are."""
    best = best_rates(known, size)
    cases = product(*(size.rates[optimizer] if rate is None else [rate] for optimizer, rate in best.items()))
    later = {run for case in cases for run in planned(dict(zip(best, case, strict=True)), size)}
    return any(re.match(only, run.name) for run in later.difference(planned(best, size)))


def run_all(folder: Path, only: str, minutes: float, size: Size = LARGE) -> None:
    """Several processes may share a folder. Where a best rate is not known yet, it is waited for while others train."""
    path, end = folder / "runs.jsonl", time.monotonic() + 60 * minutes
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    texts, trainers, alone = {}, {}, 0
    while time.monotonic() < end:
        found = missing(path, only, size)
        if found is None:
            known = read(path)
            if None not in best_rates(known, size).values():
                return
            alone = 0 if somebody_trains(folder) else alone + 1  # twice: others may be between two runs
            if alone > 1 or not more_to_come(known, only, size):
                print("nothing else that matches can be trained before the best rates without protection are known, "
                      "which runs without --only, or with --only none, find", flush=True)  # fmt: skip
                return
            time.sleep(5)
            continue
        run, lock = found
        try:
            if run.unit not in texts:
                texts[run.unit] = Text(run.unit, size)
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
    parser.add_argument("--small", action="store_true", help="the model for a CPU")
    given = parser.parse_args()
    if given.what == "run":
        run_all(given.folder, given.only, given.minutes, SMALL if given.small else LARGE)
    else:
        show(given.folder)


if __name__ == "__main__":
    main()
