"""Loss, largest logit and lowest entropy against the learning rate, a line a method."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import offset_copy

from locater.figures._paper import BLACK, Drawing
from locater.lab.arena import CONTENDERS, ENTROPY_FLOOR, LOGIT_CEILING

if TYPE_CHECKING:
    import pandas as pd


_BROKE = "a seed broke"


def against_rate(models: pd.DataFrame, title: str, unit: str) -> Drawing:
    """At every contender's default strength: the mean over seeds; of LocAteR and no protection a band, too, from the
    lowest to the highest.

    Where a seed has no finite number there is no mean: the line is interrupted, and a cross stands at the top edge.
    """
    per, name = (math.log(2), "bits a byte") if unit == "bytes" else (1.0, "nats a word")
    drawn = Figure(figsize=(10.2, 3.9), layout="constrained")
    axes = drawn.subplots(1, 3)
    seeds = models.seed.nunique()
    spread = "one seed" if seeds == 1 else f"mean of {seeds} seeds (bands: range)"
    drawn.suptitle(f"{title}; default strengths, {spread}", fontsize=9)
    lines: dict[str, Any] = {}
    broken: list[dict[float, list[Any]]] = [defaultdict(list) for _ in axes]  # by rate, the colours of those that broke
    for key, colour in _colours(models).items():
        part = models[(models.contender == key) & (models.strength == CONTENDERS[key].strengths[0])]
        if part.empty:
            continue
        ours = key.startswith("locater")
        style: dict[str, Any] = {"color": colour, "linestyle": ":" if key == "none" else "-" if ours else "--"}
        style |= {"linewidth": 2.2 if ours else 1.2, "zorder": 3 if ours else 2, "label": CONTENDERS[key].label}
        line: dict[str, Any] = {}
        quantities = (("loss", part.loss / per), ("max_logit", part.max_logit), ("entropy", part.entropy))
        for ax, crosses, (quantity, values) in zip(axes, broken, quantities, strict=True):
            at = _over_seeds(values, part.learning_rate)
            if ours or key == "none":
                ax.fill_between(at.index, at["min"], at["max"], color=colour, alpha=0.15, linewidth=0)
            ax.plot(at.index, at["mean"], marker="o", markersize=3, **style)
            for rate in at.index[at.broke > 0]:
                crosses[float(rate)].append(colour)
            names = {"mean": "mean", "low": "min", "high": "max", "broke": "broke"}
            line[quantity] = {word: _plain(at[column]) for word, column in names.items()}
        lines[key] = {"learning_rate": at.index.tolist(), **line}
    limits = models.learning_rate.min() / 1.4, models.learning_rate.max() * 1.4  # those too where nothing is drawn
    for ax, label in zip(
        axes, (f"validation loss ({name})", "largest logit", "lowest layer entropy (nats)"), strict=True
    ):
        ax.set(xscale="log", xlim=limits, xlabel="learning rate", ylabel=label)
    axes[1].set_yscale("log")
    for ax, level in ((axes[1], LOGIT_CEILING), (axes[2], ENTROPY_FLOOR)):
        ax.axhline(level, color="0.6", linewidth=0.8, zorder=0)
    for ax, crosses in zip(axes, broken, strict=True):
        _mark(drawn, ax, crosses)
    handles, labels = axes[0].get_legend_handles_labels()
    if any(broken):
        handles.append(Line2D([], [], color="0.4", marker="x", linestyle=""))
        labels.append(_BROKE)
    drawn.legend(handles, labels, loc="outside right upper", fontsize=8, handlelength=2.6, labelspacing=0.6)
    about = {"band": "lowest to highest over seeds", "broke": "how many seeds have no finite number: a cross, no mean"}
    return Drawing(drawn, {"unit": name, **about, "lines": lines})


def _colours(models: pd.DataFrame) -> dict[str, Any]:
    present = [key for key in CONTENDERS if key in set(models.contender)]
    colours = matplotlib.colormaps["tab10"]
    ours = [key for key in present if key.startswith("locater")]
    rivals = [key for key in present if key not in ours and key != "none"]
    return {
        key: BLACK if key == "none" else colours(ours.index(key) if key in ours else 3 + rivals.index(key))
        for key in present
    }


def _over_seeds(values: pd.Series[float], rates: pd.Series[float]) -> pd.DataFrame:
    """By rate, the mean, lowest and highest over seeds, NaN where a seed has no finite one, and how many have none."""
    whole = values.where(np.isfinite(values))
    at: pd.DataFrame = whole.groupby(rates).agg(["mean", "min", "max"])
    broke = whole.isna().groupby(rates).sum()
    return at.where(broke == 0).assign(broke=broke)


def _mark(drawn: Figure, ax: Axes, crosses: dict[float, list[Any]]) -> None:
    """A cross at the top edge for each that broke, side by side around its learning rate."""
    for rate, colours in crosses.items():
        for i, colour in enumerate(colours):
            beside = 5.5 * (i - (len(colours) - 1) / 2)
            at = offset_copy(ax.get_xaxis_transform(), drawn, beside, 0, units="points")
            ax.plot(
                [rate], [1.0], color=colour, marker="x", markersize=4, markeredgewidth=1.4, linestyle="",
                transform=at, clip_on=False, zorder=5,
            )  # fmt: skip


def _plain(values: pd.Series[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
