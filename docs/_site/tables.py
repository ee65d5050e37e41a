"""The tables of docs/ that are made of results/ by training with locater's methods: python docs/_site/tables.py

The arenas in docs/arena.md, fine-tuning in docs/locater.md and interventions in docs/cause.md; tests compare the pages
with these tables. A number of a method whose formula has changed since is marked †, a time by what was timed.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS, DOCS = ROOT / "results", ROOT / "docs"
sys.path.insert(0, str(ROOT / "benchmarks"))

import arena_llama  # noqa: E402
import finetune_smollm2  # noqa: E402
from locater.lab.arena import CONTENDERS, outdated, outdated_costs, read_arena, summary  # noqa: E402
from locater.lab.claims import effects  # noqa: E402

STACKED = {
    "pre": ("× none", "loss", "area", "trains to", "largest logit"), "long": ("loss", "largest logit"),
    "words": ("loss", "area"), "post": ("loss", "area"), "rotary": ("loss", "area"),
}  # fmt: skip
CELLS = {
    "loss": lambda row: f"{row.loss:.3f}",
    "area": lambda row: f"{row.area:.3f}",
    "trains to": lambda row: f"{row.trains_to:g}",
    "largest logit": lambda row: f"{row.max_logit:.0f}",
    "× none": lambda row: f"{row.relative:.2f}",
}


def stacked() -> list[str]:
    """A row a contender at its default strength; in nats a word, or bits a byte."""
    tables, old, timed = {}, {}, {}
    for name in STACKED:
        models = read_arena(RESULTS / f"arena-{name}")
        models = models.assign(loss=models.loss / (1.0 if name == "words" else math.log(2)))
        tables[name] = summary(models).set_index("contender")
        old[name], timed[name] = (which(RESULTS / f"arena-{name}") for which in (outdated, outdated_costs))
    columns = [(arena, quantity) for arena, quantities in STACKED.items() for quantity in quantities]
    head = ["", "at inference", "strength", *(f"{arena}: {quantity}" for arena, quantity in columns)]
    lines = ["| " + " | ".join(head).lstrip() + " |", "|---" * len(head) + "|"]
    for name, contender in CONTENDERS.items():
        strength = contender.strengths[0]
        cells = [contender.label, contender.at_inference, f"{strength:g}"]
        if not strength:
            cells[1:] = "–", "–"
        for arena, quantity in columns:
            there = name in tables[arena].index
            mark = " †" if there and name in (timed if quantity == "× none" else old)[arena] else ""
            cells.append(CELLS[quantity](tables[arena].loc[name]) + mark if there else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def cause(sweeps: dict[str, list[str]]) -> list[str]:
    """A row a comparison; of sweeps with the same plan two columns each, under what distinguishes them."""
    found = [effects([RESULTS / folder for folder in folders]).effects for folders in sweeps.values()]
    head = ["comparison", "condition", "against", *(word for title in sweeps for word in (title, "verdict"))]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in zip(*found, strict=True):
        seen = (word for one in row for word in (one.measured, one.verdict))
        lines.append("| " + " | ".join([row[0].name, f"`{row[0].condition}`", f"`{row[0].reference}`", *seen]) + " |")
    return lines


def pages() -> dict[str, list[list[str]]]:
    """Of each page its tables."""
    tuned = [finetune_smollm2.table(RESULTS / name) for name in ("finetune-smollm2", "finetune-smollm2-lora")]
    arenas = [stacked(), *(arena_llama.table(RESULTS / name) for name in ("arena-llama", "arena-llama-small"))]
    causes = [
        cause({"perplexity": ["cause-d128-l1-early", "cause-d128-l1-early-seeds-3-4"]}),
        cause({
            "rate 0.01": ["cause-laptop-rotary"], "rate 0.03": ["cause-laptop-rotary-3e-2"],
            "rate 0.03, seeds 10 to 14": ["cause-laptop-rotary-3e-2-seeds-10-14"],
        }),
    ]  # fmt: skip
    return {"arena.md": arenas, "locater.md": tuned, "cause.md": causes}


def main() -> None:
    for page, tables in pages().items():
        text = (DOCS / page).read_text(encoding="utf-8")
        for head in dict.fromkeys(table[0] for table in tables):
            made = iter("\n".join(table) for table in tables if table[0] == head)
            pattern = re.compile(rf"^{re.escape(head)}\n(?:\|.*\n)+", flags=re.MULTILINE)
            text = pattern.sub(lambda _, made=made: next(made) + "\n", text)
        (DOCS / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
