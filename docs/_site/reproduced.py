"""The verdicts of docs/results.md from results/: python docs/_site/reproduced.py

Writes each sweep's claims.md and figure, and the table of docs/results.md. A sweep is the folder of its name and those
beside it that hold its other seeds.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pictures import ROOT, shrink

from locater.figures import draw
from locater.lab.claims import Claim, claims, claims_markdown
from locater.lab.claims.series import FIGURE_OF

RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "results.md"
SIZES = {f"paper-d{width}-l{layers}": (width, layers) for width, layers in FIGURE_OF}
SWEEPS = (*SIZES, "paper-d128-l1-h4")


def folders(name: str) -> list[Path]:
    return [RESULTS / name, *sorted(RESULTS.glob(f"{name}-seeds-*"))]


def table() -> list[str]:
    """In Markdown: a row a claim, a column a size."""
    found = {name: claims(folders(name)) for name in SIZES}
    heads = [_head(name, made) for name, made in found.items()]
    lines = ["| " + " | ".join(["the paper says", *heads]) + " |", "|---" * (1 + len(heads)) + "|"]
    for label, statement, numbers in ROWS:
        judged = [next(claim for claim in made if claim.statement.startswith(statement)) for made in found.values()]
        cells = [f"{claim.verdict}: {numbers(claim.evidence)}" for claim in judged]
        lines.append("| " + " | ".join([label, *cells]) + " |")
    return lines


def _head(name: str, made: list[Claim]) -> str:
    (width, layers), seeds = SIZES[name], made[0].evidence["seeds"]
    return f"d={width}, L={layers}" + ("" if seeds == 3 else f" ({seeds} seeds)")


def _held(evidence: dict[str, Any]) -> str:
    return f"off by {max(sum(seeds) / len(seeds) for seeds in evidence['gap']):.3f}"


def _change(digits: int, unit: str = "") -> Callable[[dict[str, Any]], str]:
    def numbers(evidence: dict[str, Any]) -> str:
        (first, *_, last), (low, high) = evidence["mean"], evidence["interval"]
        change = f"{50 * (low + high):+.2f}% ± {50 * (high - low):.2f}".replace("-", "−")
        return f"{first:.{digits}f} → {last:.{digits}f}{unit}, {change}"

    return numbers


def _phases(evidence: dict[str, Any]) -> str:
    at_spacing = evidence["at_spacing"].values()
    names = ("log-perplexity", "scale", "entropy")
    shares = {name.removeprefix("log-"): _range([each[name]["share"] for each in at_spacing]) for name in names}
    return ", ".join(f"{name} {share}" for name, share in shares.items()) + " of members"


def _over_training(evidence: dict[str, Any]) -> str:
    return f"{_range([each['share'] for each in evidence['at_spacing'].values()])} of members"


def _range(shares: list[float]) -> str:
    """Of what records 1, 2 and 3 fiftieths of training apart give."""
    low, high = (round(100 * end) for end in (min(shares), max(shares)))
    return f"{low}%" if low == high else f"{low} to {high}%"


def _stripes(evidence: dict[str, Any]) -> str:
    with_locater, without = (
        sum(evidence[name]) / len(evidence[name]) for name in ("contrast_with", "contrast_without")
    )
    return f"contrast {with_locater:.3f} with, {without:.3f} without"


def _correlation(evidence: dict[str, Any]) -> str:
    return ", ".join(f"{each:+.2f}" for each in evidence["rank_correlation"]).replace("-", "−")


ROWS: tuple[tuple[str, str, Callable[[dict[str, Any]], str]], ...] = (
    ("LocAteR holds tr W_QK at 1", "LocAteR holds tr W_QK", _held),
    ("stronger κ₂, smaller scale (B)", "the stronger κ₂, the smaller the eigenspectrum scale", _change(1)),
    (
        "stronger κ₂, higher entropy, all along (C)",
        "κ₂ keeps the attention entropy higher",
        lambda evidence: f"at {evidence['share_higher']:.0%} of records",
    ),
    ("… and at the end", "the stronger κ₂, the higher the attention entropy at the end", _change(3, " nats")),
    ("stronger κ₂, better perplexity (D)", "the stronger κ₂, the better the perplexity, at the end", _change(1)),
    (
        "LocAteR (κ₂ = 1) beats no LocAteR",
        "LocAteR (κ₂ = 1) betters the perplexity of no LocAteR, at the end",
        _change(1),
    ),
    ("stripes of ρ with LocAteR, none without (Fig. 7)", "ρ has lasting stripes", _stripes),
    ("two learning phases, before and after 10⁴ updates", "two learning phases", _phases),
    (
        "smaller scale, higher entropy, across strengths (rank correlation by seed)",
        "the smaller the scale, the higher the entropy, across",
        _correlation,
    ),
    (
        "smaller scale, higher entropy, over training",
        "the smaller the scale, the higher the entropy, over training",
        _over_training,
    ),
    (
        "smaller scale, further from rank collapse (A2; rank correlation by seed)",
        "the smaller the scale, the further from rank collapse",
        _correlation,
    ),
)


def main() -> None:
    for name in SWEEPS:
        (RESULTS / name / "claims.md").write_text(claims_markdown(folders(name)), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for name, size in SIZES.items():
            picture = draw(FIGURE_OF[size], folder, runs=folders(name))[0]
            shrink(picture, RESULTS / name / picture.name)
    text, rows = PAGE.read_text(encoding="utf-8"), "\n".join(table())
    PAGE.write_text(re.sub(r"\| the paper says \|.*?(?=\n\n)", lambda _: rows, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
