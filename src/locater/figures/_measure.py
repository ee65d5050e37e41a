"""Pictures of a reading: layer × head maps, entropy and ρ by position, entropy predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

    from locater.measure import Agreement, Prediction
    from locater.measure.reading import Reading


_PEAKED = 4  # heads shown
_LAWS = {
    "general": "general law\n(queries and keys by position)",
    "separable": "tokens $K \\otimes \\Sigma$\n(exact)",
    "three-number": "three numbers\n($\\mathrm{tr}\\,W$, $\\mathrm{tr}\\,W^2$, scale)",
}


def maps(seen: Reading, title: str) -> Figure:
    """Entropy share and largest logit, a row of each map a layer, a column a head."""
    table, modules = seen.heads, list(seen.layers["module"])
    row = table["module"].map({name: index for index, name in enumerate(modules)}).to_numpy()
    heads = int(table["head"].max()) + 1
    figure = Figure(figsize=(7.2, min(12.0, 1.5 + 0.16 * max(9, len(modules)))), layout="constrained")
    figure.suptitle(title, fontsize=10)
    highest = float(np.nanpercentile(table["max_logit"], 98))  # one head must not darken all the others
    for ax, (name, label, colours, limits, extend) in zip(
        figure.subplots(1, 2, sharey=True),
        (
            ("entropy_share", "entropy / ln(unmasked keys)", "cividis", {"vmin": 0.0, "vmax": 1.0}, "neither"),
            ("max_logit", "largest logit", "magma", {"vmax": highest}, "max"),
        ),
        strict=True,
    ):
        grid = np.full((len(modules), heads), np.nan)
        grid[row, table["head"].to_numpy()] = table[name].to_numpy(dtype=float)
        image = ax.imshow(grid, cmap=colours, aspect="auto", interpolation="nearest", **limits)
        figure.colorbar(image, ax=ax, pad=0.03, extend=extend).outline.set_visible(False)
        ax.set_title(label)
        ax.set_xlabel("head")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        _name_rows(ax, seen.layers)
        if ax is not figure.axes[0]:
            ax.set_ylabel("")
            ax.tick_params(left=False)
    return figure


def positions(seen: Reading, title: str) -> Figure:
    """Entropy by query position; ρ by key position, averaged over the heads of a layer and of the most peaked heads."""
    figure = Figure(figsize=(7.2, 5.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplot_mosaic([["entropy", "peaked"], ["rho", "rho"]])
    _draw_entropy(axes["entropy"], seen)
    _draw_peaked(axes["peaked"], seen)
    ax = axes["rho"]
    modules = list(seen.layers["module"])
    longest = max(seen.rho[name].shape[1] for name in modules)
    grid = np.full((len(modules), longest), np.nan)
    for row, name in enumerate(modules):
        mean = _mean(seen.rho[name])
        grid[row, : len(mean)] = mean
    extent = (0.5, longest + 0.5, len(modules) - 0.5, -0.5)
    image = ax.imshow(grid, cmap="cividis", aspect="auto", interpolation="nearest", extent=extent, vmin=0.0, vmax=1.0)
    figure.colorbar(image, ax=ax, pad=0.015).outline.set_visible(False)
    ax.set_title(r"measured $\rho$ of each key for the last text token of a sequence, mean over heads")
    ax.set_xlabel("key position")
    _name_rows(ax, seen.layers)
    return figure


def predicted(predictions: Sequence[Prediction], title: str) -> Figure:
    """Entropy of every head, predicted from one half of the sequences against measured in the other; a panel a law."""
    from locater.measure import agreement

    rows = agreement(predictions)
    figure = Figure(figsize=(7.2, 3.15), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(1, len(rows), sharex=True, sharey=True, squeeze=False)[0]
    found = [one.attention[0] for one in predictions]
    highest = max(float(np.log(one.laws["general"].tokens)) for one in found)
    points = None
    for ax, row in zip(axes, rows, strict=True):
        there = [(one, each) for one, each in zip(predictions, found, strict=True) if row.law in each.laws]
        ax.plot([0, highest], [0, highest], color="0.6", linewidth=0.8, zorder=0)
        points = ax.scatter(
            np.concatenate([each.entropy for _, each in there]),
            np.concatenate([each.laws[row.law].entropy for _, each in there]),
            c=np.concatenate([np.full(len(each.entropy), one.layer) for one, each in there]),
            cmap="viridis_r",
            vmin=min(one.layer for one in predictions),
            vmax=max(one.layer for one in predictions),
            s=11,
            linewidth=0.25,
            edgecolor="white",
            clip_on=False,  # a head that looks at one key
            zorder=3,
        )
        ax.set_title(_LAWS[row.law])
        ax.set(xlim=(0, highest), ylim=(0, highest), aspect="equal", xlabel="measured entropy, nats")
        corner = {"transform": ax.transAxes, "ha": "right", "va": "bottom"}
        ax.text(0.98, 0.03, _agreement(row), fontsize=7.5, linespacing=1.35, **corner)
    axes[0].set_ylabel("predicted entropy, nats")
    if points is not None:
        figure.colorbar(points, ax=axes, pad=0.015, label="layer", aspect=30).outline.set_visible(False)
    return figure


def _agreement(row: Agreement) -> str:
    return (
        f"median error {row.median:.2f}\n90th percentile {row.percentile_90:.2f}\nrank corr. {row.rank_correlation:.2f}"
    )


def _draw_entropy(ax: Axes, seen: Reading) -> None:
    """A line a layer, of its heads' mean, coloured by depth."""
    modules = list(seen.layers["module"])
    depth = Normalize(0, max(1, len(modules) - 1))
    colours = matplotlib.colormaps["viridis_r"]
    for row, name in enumerate(modules):
        values = _mean(seen.entropy_by_position[name])
        ax.plot(range(1, len(values) + 1), values, color=colours(0.08 + 0.92 * depth(row)), linewidth=0.8)
    ends = {0: "first layer", len(modules) - 1: "last layer"}
    for row, label in ends.items():
        ax.plot([], [], color=colours(0.08 + 0.92 * depth(row)), label=label)
    position = np.arange(1, seen.length + 1)
    causal = _is_causal(seen)
    bound, label = (position, "ln(position)") if causal else (np.full_like(position, seen.length), "ln(length)")
    ax.plot(position, np.log(bound), color="0.4", linestyle="--", linewidth=1, label=label)
    ax.set_title("entropy by query, mean over heads")
    ax.set_xlabel("query position")
    ax.set_ylabel("nats")
    ax.set_ylim(bottom=0)
    ax.margins(x=0)
    ax.legend(fontsize=7, loc="lower right", handlelength=1.4)


def _is_causal(seen: Reading) -> bool:
    """A first query that sees one key has no entropy."""
    return max(float(values[:, 0].max()) for values in seen.entropy_by_position.values()) < 1e-6


def _draw_peaked(ax: Axes, seen: Reading) -> None:
    """The heads whose ρ stands out most at some place, the places counted in stretches since sequences are few."""
    stretch = max(1, seen.length // 32)
    found = []
    for name, layer in zip(seen.layers["module"], seen.layers["layer"], strict=True):
        smooth = _stretches(seen.rho[name], stretch)
        height = np.nanmax(smooth, 1) - np.nanmean(smooth, 1)
        found += [(float(height[head]), layer, head, smooth[head]) for head in range(len(smooth))]
    found.sort(key=lambda one: -one[0])
    for _, layer, head, smooth in found[:_PEAKED]:
        places = (np.arange(len(smooth)) + 0.5) * stretch + 0.5
        ax.plot(places, smooth, linewidth=1.1, label=f"{layer}.{head}")
    ax.set_title(r"$\rho$ of the most peaked heads (layer.head)")
    ax.set_xlabel("key position")
    ax.set_ylim(0, 1.2)  # the legend has the room above 1
    ax.set_yticks(np.linspace(0, 1, 6))
    ax.set_xlim(0.5, seen.length + 0.5)
    ax.legend(fontsize=7, ncols=_PEAKED, handlelength=1.2, columnspacing=1.2, loc="upper center")


def _stretches(rho: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Means over stretches of `size` keys (H, stretches), the last one maybe shorter."""
    padded = np.pad(rho, ((0, 0), (0, -rho.shape[1] % size)), constant_values=np.nan)
    return _nanmean(padded.reshape(len(rho), -1, size), 2)


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over heads (first axis)."""
    return _nanmean(values, 0)


def _nanmean(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """NaN, without a warning, where there is nothing to average."""
    known = np.isfinite(values)
    count = known.sum(axis)
    total = np.where(known, values, 0.0).sum(axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _name_rows(ax: Axes, layers: pd.DataFrame) -> None:
    """By layer, and by kind where a model has several."""
    several = layers["kind"].nunique() > 1
    names = [f"{k} {n}" if several else str(n) for k, n in zip(layers["kind"], layers["layer"], strict=True)]
    step = max(1, -(-len(names) // 16))
    ax.set_yticks(range(0, len(names), step), names[::step])
    ax.set_ylabel("" if several else "layer")
    ax.spines[:].set_visible(False)
