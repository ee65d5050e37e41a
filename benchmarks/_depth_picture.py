"""The picture of docs/depth.md: predicted and measured by layer, and finite lengths beside the Random Energy Model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from locater.figures import style
from locater.theory import RandomAttention, RandomLinear, RandomMLP, RandomTransformer, depth_law, long_limit

NAMES = {"gpt2": "GPT-2", "llama": "Llama", "bert": "BERT", "vit": "ViT"}
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
LENGTHS = (16, 64, 256, 1024)


def draw(rows: list[dict[str, Any]], file: Path, layers: int) -> None:
    """`rows` as `depth.compare` gives them; those of one depth are shown."""
    with style():
        figure = Figure(figsize=(10.4, 4.4), layout="constrained")
        grid = figure.add_gridspec(2, 6, width_ratios=(1, 1, 1, 1, 0.02, 1.7))
        for column, (kind, name) in enumerate(NAMES.items()):
            above, below = (figure.add_subplot(grid[row, column]) for row in range(2))
            shown = [row for row in rows if row["class"] == kind and row["layers"] == layers]
            for colour, row in zip(COLOURS, shown, strict=False):
                _layers(above, row["law"].entropy_share, row["measured"][0] / row["law"].most_entropy, colour)
                _layers(below, row["law"].cosine, row["measured"][1], colour, f"gain {row['gain']}")
            above.set(title=name, ylim=(0, 1.04), xticks=(0, layers // 2, layers))
            below.set(ylim=(-0.03, 1.04), xlabel="layer", xticks=(0, layers // 2, layers))
            if column:
                above.tick_params(labelleft=False)
                below.tick_params(labelleft=False)
            else:
                above.set_ylabel("entropy / ln(keys)")
                below.set_ylabel("mean cosine of tokens")
        below.legend(loc="upper right", fontsize=7)
        _entropy_limit(figure.add_subplot(grid[0, 5]))
        _cosine_limit(figure.add_subplot(grid[1, 5]))
        figure.savefig(file, dpi=160)


def _layers(ax: Axes, predicted: np.ndarray, measured: np.ndarray, colour: str, label: str = "") -> None:
    ax.plot(predicted, color=colour, linewidth=1.2, label=label)
    ax.plot(measured, "o", color=colour, markersize=2.2)


def _entropy_limit(ax: Axes) -> None:
    """Entropy over ln T against the logits' variance over 2 ln T."""
    share = np.linspace(0, 2.5, 26)
    for colour, tokens in zip(COLOURS, LENGTHS, strict=True):
        linear = RandomLinear(1, 1.0)
        attention = RandomAttention(2, 2, 128, linear, linear, linear, linear, 128**-0.5, causal=False)
        model = RandomTransformer(1, attention, norm="none")
        law = depth_law(model, np.eye(tokens), gain=np.sqrt(2 * np.log(tokens) * share), draws=max(1, 1024 // tokens))
        ax.plot(share, law.entropy_share[:, 0], color=colour, label=f"T = {tokens:,}")
    ax.plot([0, 1, 2.5], [1, 0, 0], color="black", linestyle="--", label="T → ∞")
    ax.set(xlabel="variance of the logits / 2 ln T", ylabel="entropy / ln T", title="Different tokens, one layer")
    ax.legend(fontsize=7)


def _cosine_limit(ax: Axes) -> None:
    """Giorlandino and Goldt's encoder (one head, ReLU, Post-LN, weights of variance 0.2/D), by layer."""
    layers, start, width = 30, 0.2, 720
    small, one = RandomLinear(width, (0.2 / width) ** 0.5, 0.02), RandomLinear(width, width**-0.5)
    for colour, beta in zip(COLOURS, (0.5, 3.0, 6.0), strict=False):
        share = beta**2 / 2
        for tokens, line in ((64, ":"), (512, "-")):
            looks = RandomLinear(width, (2 * share * np.log(tokens)) ** 0.25 / width**0.5)
            attention = RandomAttention(1, 1, width, looks, looks, small, one, width**-0.5, causal=False)
            model = RandomTransformer(layers, attention, RandomMLP(small, small, "relu"), norm="post")
            law = depth_law(model, (1 - start) * np.eye(tokens) + start, draws=max(1, 512 // tokens))
            ax.plot(law.cosine, line, color=colour, label=f"β = {beta:g}" if line == "-" else None)
        ax.plot(long_limit(model, start, share).cosine, "--", color="black", linewidth=0.9)
    for tokens, line in (("T = 64", ":"), ("T = 512", "-")):
        ax.plot([], line, color="grey", label=tokens)
    ax.plot([], "--", color="black", linewidth=0.9, label="T → ∞")
    ax.set(xlabel="layer", ylabel="mean cosine", title="An encoder, b = β² ln T", ylim=(0, 1.04))
    ax.legend(fontsize=7, loc="lower right", ncols=2)
