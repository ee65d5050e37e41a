"""Loss, largest logit and lowest entropy against the learning rate, a line a method."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

from locater.figures._paper import BLACK, Drawing
from locater.lab.arena import CONTENDERS, ENTROPY_FLOOR, LOGIT_CEILING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["against_rate"]


def against_rate(models: pd.DataFrame, title: str, unit: str) -> Drawing:
    """At every contender's default strength: the mean over seeds, the band from the lowest to the highest."""
    per, name = (math.log(2), "bits a byte") if unit == "bytes" else (1.0, "nats a word")
    drawn = Figure(figsize=(10.2, 3.9), layout="constrained")
    axes = drawn.subplots(1, 3)
    drawn.suptitle(title, fontsize=9)
    lines: dict[str, Any] = {}
    present = [key for key in CONTENDERS if key in set(models.contender)]
    colours = matplotlib.colormaps["tab10"]
    ours = [key for key in present if key.startswith("locater")]
    rivals = [key for key in present if key not in ours and key != "none"]
    for key in present:
        part = models[(models.contender == key) & (models.strength == CONTENDERS[key].strengths[0])]
        if part.empty:
            continue
        colour = BLACK if key == "none" else colours(ours.index(key) if key in ours else 3 + rivals.index(key))
        look: dict[str, Any] = {"color": colour, "linestyle": ":" if key == "none" else "-" if key in ours else "--"}
        look |= {"linewidth": 2.2 if key in ours else 1.2, "label": CONTENDERS[key].label}
        line: dict[str, Any] = {}
        quantities = (("loss", part.loss / per), ("max_logit", part.max_logit), ("entropy", part.entropy))
        for ax, (quantity, values) in zip(axes, quantities, strict=True):
            by_rate = values.groupby(part.learning_rate)
            mean, low, high = by_rate.mean(), by_rate.min(), by_rate.max()
            ax.fill_between(mean.index, low, high, color=colour, alpha=0.12, linewidth=0)
            ax.plot(mean.index, mean, marker="o", markersize=3, **look)
            line[quantity] = {"mean": mean.tolist(), "low": low.tolist(), "high": high.tolist()}
        lines[key] = {"learning_rate": mean.index.tolist(), **line}
    for ax, label in zip(
        axes, (f"validation loss ({name})", "largest logit", "lowest layer entropy (nats)"), strict=True
    ):
        ax.set(xscale="log", xlabel="learning rate", ylabel=label)
    axes[1].set_yscale("log")
    for ax, level in ((axes[1], LOGIT_CEILING), (axes[2], ENTROPY_FLOOR)):
        ax.axhline(level, color="0.6", linewidth=0.8, zorder=0)
    handles, labels = axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside right upper", fontsize=8, handlelength=2.6, labelspacing=0.6)
    return Drawing(drawn, {"unit": name, "band": "lowest to highest over seeds", "lines": lines})
