"""Pictures of a scan: layer × head maps and eigenvalue clouds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    import pandas as pd

    from locater.models import Scan

__all__ = ["clouds", "maps"]

_MAPS = (
    ("r", r"$r = \mathrm{tr}\,W_{QK}\cdot$ scale of the logits", "RdBu_r", "centred"),
    ("eta", r"$\log_{10}\eta$,  $\eta = \sqrt{\mathrm{tr}\,W^\top W}\cdot$ scale", "cividis", "log"),
    ("xi", r"$\xi = \mathrm{tr}\,W/\sqrt{\mathrm{tr}\,W^\top W}$", "RdBu_r", "centred"),
    ("effective_rank", "effective rank", "cividis", "plain"),
    ("symmetric_share", r"symmetric share of $\|W\|^2$", "cividis", "plain"),
    ("spectral_norm", r"$\log_{10}\|W_{QK}\|_2$", "cividis", "log"),
)


def maps(scan: Scan) -> Figure:
    """Six quantities of a scan, a row of each map a layer, a column a head."""
    table = scan.table
    modules = list(dict.fromkeys(table["module"]))
    heads = int(table["head"].max()) + 1
    row = table["module"].map({name: index for index, name in enumerate(modules)}).to_numpy()
    figure = Figure(figsize=(9.6, min(14.0, 2.4 + 0.24 * len(modules))), layout="constrained")
    figure.suptitle(scan.title, fontsize=10)
    axes = figure.subplots(2, 3)
    for ax, (name, label, colours, kind) in zip(axes.flat, _MAPS, strict=True):
        grid = np.full((len(modules), heads), np.nan)
        values = table[name].to_numpy(dtype=float)
        grid[row, table["head"].to_numpy()] = np.log10(np.maximum(values, 1e-12)) if kind == "log" else values
        reach = float(np.nanmax(np.abs(grid), initial=0.0)) or 1.0
        limits: dict[str, Any] = {"vmin": -reach, "vmax": reach} if kind == "centred" else {}
        image = ax.imshow(grid, cmap=colours, aspect="auto", interpolation="nearest", **limits)
        figure.colorbar(image, ax=ax)
        ax.set_title(label, fontsize=9)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        _layers(ax, table, modules)
    for ax in axes[1]:
        ax.set_xlabel("head")
    return figure


def _layers(ax: Axes, table: pd.DataFrame, modules: list[str]) -> None:
    """Names the rows by layer, and by kind where a model has several."""
    first = table.drop_duplicates("module").set_index("module").loc[modules]
    several = first["kind"].nunique() > 1
    names = [
        f"{kind} {layer}" if several else str(layer) for kind, layer in zip(first["kind"], first["layer"], strict=True)
    ]
    step = max(1, len(modules) // 12)
    ax.set_yticks(range(0, len(modules), step), names[::step])
    ax.set_ylabel("" if several else "layer")
    ax.spines[:].set_visible(False)


def clouds(scan: Scan) -> Figure:
    """Eigenvalues of W_QK in the complex plane: a panel a module, at most 12 of them, a colour a head."""
    modules = scan.table.drop_duplicates("module")
    chosen = modules.iloc[np.unique(np.linspace(0, len(modules) - 1, 12).round().astype(int))]
    columns = min(4, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = Figure(figsize=(2.4 * columns + 0.4, 2.3 * rows + 0.4), layout="constrained")
    figure.suptitle(scan.title, fontsize=10)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat[len(chosen) :]:
        ax.set_visible(False)
    for ax, row in zip(axes.flat, chosen.to_dict("records"), strict=False):
        for head, cloud in enumerate(scan.eigenvalues[row["module"]]):
            colour = f"C{head % 10}"
            ax.plot(cloud.real, cloud.imag, ".", color=colour, markersize=2.5, alpha=0.6, markeredgewidth=0)
            ax.plot(cloud.real.mean(), 0, "|", color=colour, markersize=8)
        ax.axhline(0, color="0.8", linewidth=0.6, zorder=0)
        ax.axvline(0, color="0.8", linewidth=0.6, zorder=0)
        kind = row["kind"] if modules["kind"].nunique() > 1 else "layer"
        ax.set_title(f"{kind} {row['layer']}", fontsize=8)
    for ax in axes[-1]:
        ax.set_xlabel(r"Re $w$")
    for ax in axes[:, 0]:
        ax.set_ylabel(r"Im $w$")
    return figure
