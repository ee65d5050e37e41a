"""The comparisons that were planned for a sweep: effects on perplexity, with their intervals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from locater.figures._paper import BLACK, BLUE, ORANGE, Drawing
from locater.io import nulled

if TYPE_CHECKING:
    from locater.lab.claims import Effects

__all__ = ["intervals"]

_COLOURS = {"lower": BLUE, "higher": ORANGE}
_NONE = "0.6"
_STYLE: dict[str, Any] = {"fmt": "o", "markersize": 4, "linewidth": 1.4}
_PLAIN = "none"  # the condition without anything


def intervals(found: Effects, title: str) -> Drawing:
    """A line a comparison, in the order in which they were planned; of those that broke it is left blank.

    Hollow: against another condition than the model without anything.
    """
    effects = found.effects
    figure = Figure(figsize=(7.6, 0.9 + 0.19 * len(effects)), layout="constrained")
    ax = figure.subplots()
    ax.axvline(0, color="0.75", linewidth=0.8, zorder=0)
    for at, each in enumerate(effects):
        half = 100 * each.half_width if math.isfinite(each.half_width) else 0.0
        colour = _COLOURS.get(each.verdict, _NONE)
        inside = colour if each.reference == _PLAIN else "white"
        ax.errorbar(100 * each.change, at, xerr=half, color=colour, markerfacecolor=inside, **_STYLE)
    ax.set_yticks(range(len(effects)), [each.name for each in effects], fontsize=7.5)
    ax.set(ylim=(len(effects) - 0.5, -0.5), xlabel="change of perplexity (%), with its 95% interval over seeds")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    seen = [verdict for verdict in _COLOURS if verdict in {each.verdict for each in effects}]
    looks: list[tuple[str, str, str | None]] = [(verdict, _COLOURS[verdict], None) for verdict in seen]
    looks += [("no effect seen, or open", _NONE, None), ("against another condition", BLACK, "white")]
    marks = [
        Line2D([], [], label=label, linewidth=1.4, marker="o", markersize=4, color=colour, markerfacecolor=inside)
        for label, colour, inside in looks
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks))
    figure.suptitle(title, fontsize=9)
    about = {"step": found.step, "seeds": max(each.seeds for each in effects)}
    rows = [{"name": each.name, "change": each.change, "half_width": each.half_width} for each in effects]
    return Drawing(figure, about | {"effects": nulled(rows)})
