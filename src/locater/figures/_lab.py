"""Figures 6 to 12 of the paper, drawn from the records of trained models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from locater.errors import LocaterError
from locater.figures._paper import BLACK, BLUE, Drawing, Progress
from locater.io import nulled
from locater.lab.claims.series import FIGURE_OF, Folders, Sweep, kappa_name, read_sweep
from locater.lab.claims.statistics import Array, stripes

PANELS = (
    ("A", "trace", r"mean: $\mathrm{tr}\,W_{QK}$"),
    ("B", "scale", r"scale: $\mathrm{tr}(W_{QK}^\top W_{QK})$"),
    ("C", "entropy", "attention entropy (nats)"),
    ("D", "perplexity", "validation perplexity"),
)
TOP = 3.0  # D ends at this multiple of the lowest perplexity: an untrained model's is hundreds of times as high


def sweep_for(number: int, runs: Folders) -> Sweep:
    """The sweep a figure shows, if these folders hold it."""
    model = (128, 1) if number == 7 else next(model for model, figure in FIGURE_OF.items() if figure == number)
    sweep = read_sweep(runs, model)
    if number == 7 and not sweep.of(1.0).keys() & sweep.of(None).keys():
        raise LocaterError("figure 7 needs κ₂ = 1 and no LocAteR with the same seed: train one with both")
    return sweep


def figure(number: int, sweep: Sweep, progress: Progress) -> Drawing:
    drawing = propagation(sweep, 1.0) if number == 7 else curves(sweep)
    progress(1.0)
    return drawing


def curves(sweep: Sweep) -> Drawing:
    """The spectrum's mean and scale, entropy and perplexity over training, a line a strength, averaged over heads."""
    drawn = Figure(figsize=(9.6, 5.0), layout="constrained")
    axes = drawn.subplots(2, 3)
    drawn.suptitle(_title(sweep), fontsize=9)
    unit, label = _iterations(sweep)
    styles = _styles(sweep.kappas)
    lines: dict[str, Any] = {}
    for kappa in _drawing_order(sweep.kappas):
        line = lines[kappa_name(kappa)] = _line(sweep, kappa)
        panels = zip(axes.flat, [*PANELS, PANELS[-1]], strict=False)
        for ax, (_, quantity, _) in panels:
            if len(line["seeds"]) > 1:
                low, high = line[quantity]["low"], line[quantity]["high"]
                ax.fill_between(line["steps"] / unit, low, high, color=styles[kappa]["color"], alpha=0.15, linewidth=0)
            ax.plot(line["steps"] / unit, line[quantity]["mean"], **styles[kappa])
    for ax, (letter, quantity, name) in zip(axes.flat, PANELS, strict=False):
        ax.set_title(letter, loc="left", fontweight="bold")
        ax.set(xlabel=label, ylabel=name, xlim=(0, sweep.steps[-1] / unit))
        if quantity == "scale":
            _log_if_wide(ax, [line["scale"]["mean"] for line in lines.values()])
    _mark_target(axes.flat[0], sweep)
    window = _magnify(axes.flat[3], axes.flat[4], lines, styles, unit)
    axes.flat[4].set_title("D, magnified", loc="left", fontweight="bold")
    axes.flat[4].set(xlabel=label, ylabel=PANELS[-1][2])
    axes.flat[5].axis("off")
    handles = [Line2D([], [], label=_label(kappa), **styles[kappa]) for kappa in sweep.kappas]
    axes.flat[5].legend(handles=handles, loc="center", fontsize=9, handlelength=3.2, labelspacing=0.7)
    about = {"model": _model(sweep), "band": "lowest to highest over seeds", "averaged_over": "layers and heads"}
    return Drawing(drawn, nulled({**about, "magnified": window, "lines": lines}))


def propagation(sweep: Sweep, kappa: float | None = None) -> Drawing:
    """ρ over training and positions, with LocAteR (the strongest unless given) above no LocAteR.

    Under each map stands ρ's spread over positions beside the one sampling makes of a smooth profile; `stripes` of
    locater.lab.claims.statistics says how, and what contrast is.
    """
    strongest = max((each for each in sweep.kappas if each is not None), default=None) if kappa is None else kappa
    shown = [each for each in dict.fromkeys((strongest, None)) if each in sweep.kappas]
    seed = min(set.intersection(*(set(sweep.of(each)) for each in shown)), default=None)
    if seed is None:
        raise LocaterError("ρ with and without LocAteR can be compared for the same seed only; train one with both")
    unit, label = _iterations(sweep)
    drawn = Figure(figsize=(7.2, 2.9 * len(shown) + 0.2), layout="constrained")
    axes = drawn.subplots(2 * len(shown), 1, sharex=True, height_ratios=[3, 1] * len(shown), squeeze=False)[:, 0]
    rows = [sweep.of(each)[seed] for each in shown]
    maps = [sweep.rho[row][sweep.recorded[row]] for row in rows]  # each (N, heads, T)
    low, high = _colours(np.concatenate([each.ravel() for each in maps]))
    data: dict[str, Any] = {"model": _model(sweep), "seed": seed, "probe_blocks": sweep.config.probe_blocks}
    image = None
    for each, row, values, ax, below in zip(shown, rows, maps, axes[::2], axes[1::2], strict=True):
        steps = sweep.steps[sweep.recorded[row]]
        image = ax.pcolormesh(
            steps / unit, np.arange(1, values.shape[-1] + 1), values.mean(1).T, cmap="cividis", vmin=low, vmax=high,
            shading="nearest", rasterized=True,
        )  # fmt: skip
        ax.set(ylabel="token position $i$", xlim=(0, sweep.steps[-1] / unit), yticks=_positions(values.shape[-1]))
        ax.set_title(_label(each) if each is None else f"LocAteR, {_label(each)}", loc="left")
        found = stripes(steps, values, sweep.config.probe_blocks)
        below.fill_between(
            steps / unit, 0, found.sampling, color="0.82", linewidth=0, label="expected from sampling alone"
        )
        below.plot(
            steps / unit,
            found.spread,
            color=BLUE,
            linewidth=1.2,
            label=r"spread of $\rho_i$ over positions, less the best parabola",
        )
        below.set_title(f"beyond sampling, second half: {found.contrast:.3f}", loc="right", fontsize=8, pad=3)
        below.set_ylabel("spread")
        data[kappa_name(each)] = {
            "steps": steps,
            "rho": values.mean(1),
            "spread": found.spread,
            "sampling": found.sampling,
            "contrast": found.contrast,
            "chance": found.chance,
        }
    top = 1.15 * max(
        float(np.nanmax(data[kappa_name(each)][name])) for each in shown for name in ("spread", "sampling")
    )
    for below in axes[1::2]:
        below.set_ylim(0, top or 1.0)
    axes[-1].set_xlabel(label)
    drawn.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    drawn.suptitle(f"{_setting(sweep)};  seed {seed}, counted in {sweep.config.probe_blocks} blocks", fontsize=9)
    assert image is not None
    bar = r"signal propagation probability $\rho_i$" + ("" if sweep.rho.shape[2] == 1 else ", mean over heads")
    drawn.colorbar(image, ax=list(axes), label=bar, shrink=0.6, extend="both")
    return Drawing(drawn, nulled(data))


def _line(sweep: Sweep, kappa: float | None) -> dict[str, Any]:
    """Mean, lowest and highest over seeds, at the steps all of them have recorded."""
    seeds = sweep.of(kappa)
    rows = list(seeds.values())
    there = np.all(sweep.recorded[rows], axis=0)
    line: dict[str, Any] = {"kappa_2": kappa, "seeds": list(seeds), "steps": sweep.steps[there]}
    for _, quantity, _ in PANELS:
        values = sweep.values[quantity][rows][:, there]
        line[quantity] = {"mean": values.mean(0), "low": values.min(0), "high": values.max(0)}
    return line


def _styles(kappas: Sequence[float | None]) -> dict[float | None, dict[str, Any]]:
    """Light to dark with κ₂ up to the paper's 1; beyond it another hue and dashes; none is black."""
    within = [kappa for kappa in kappas if kappa is not None and kappa <= 1]
    beyond = [kappa for kappa in kappas if kappa is not None and kappa > 1]
    styles: dict[float | None, dict[str, Any]] = {None: {"color": BLACK, "linestyle": (0, (4, 2)), "linewidth": 1.2}}
    for group, colours, first, last, dashes in (
        (within, "YlGnBu", 0.35, 0.95, "-"),
        (beyond, "OrRd", 0.5, 0.95, (0, (6, 1.5, 1.2, 1.5))),
    ):
        ramp = matplotlib.colormaps[colours](np.linspace(last, first, len(group))[::-1])  # one alone is dark
        styles |= {kappa: {"color": tuple(c), "linestyle": dashes} for kappa, c in zip(group, ramp, strict=True)}
    return styles


def _drawing_order(kappas: Sequence[float | None]) -> list[float | None]:
    """No LocAteR last, on top: its dashes let the others through."""
    return sorted(kappas, key=lambda kappa: (kappa is None, kappa or 0.0))


def _magnify(
    whole: Axes, part: Axes, lines: dict[str, Any], styles: dict[float | None, dict[str, Any]], unit: float
) -> dict[str, Any]:
    """Sets D's range, and another panel's to where the lines have their minimum; marks the minima and the place."""
    lines = {key: line for key, line in lines.items() if np.isfinite(line["perplexity"]["mean"]).any()}
    if not lines:
        return {}
    lowest = {key: _lowest(line) for key, line in lines.items()}
    steps, values = (np.array(each, dtype=float) for each in zip(*lowest.values(), strict=True))
    spread = max(float(np.ptp(values)), 0.004 * float(values.min()))
    floor, ceiling = float(values.min()) - 0.25 * spread, float(values.max()) + 0.8 * spread
    # from where the first line enters that range, but not far from the minima
    last = max(float(line["steps"][-1]) for line in lines.values())
    enters = min(float(line["steps"][np.nanargmax(line["perplexity"]["mean"] <= ceiling)]) for line in lines.values())
    right = min(last, float(steps.max()) + 0.12 * last)
    left = max(0.0, min(enters - 0.02 * last, right - 0.2 * last), float(steps.min()) - 0.3 * last)
    # lines that still fall steeply at the end would otherwise cross the panel in one corner
    ceiling = max(ceiling, min(_perplexity_at(left, line) for line in lines.values()))
    for key, (x, y) in lowest.items():
        part.plot(
            x / unit, y, "o", color=styles[lines[key]["kappa_2"]]["color"], markersize=3.5, zorder=5, clip_on=False
        )
    part.set(xlim=(left / unit, right / unit), ylim=(floor, ceiling))
    part.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    means = np.concatenate([line["perplexity"]["mean"] for line in lines.values()])
    top = min(TOP * float(values.min()), float(means[np.isfinite(means)].max()))
    whole.set_ylim(min(floor, float(values.min()) - 0.06 * (top - float(values.min()))), max(top, ceiling))
    box = left / unit, floor, (right - left) / unit, ceiling - floor
    whole.indicate_inset(box, edgecolor="0.4", alpha=1, linewidth=0.8)
    minima = {key: {"step": int(x), "perplexity": y} for key, (x, y) in lowest.items()}
    return {"steps": [left, right], "perplexity": [floor, ceiling], "minima_of_means": minima}


def _lowest(line: dict[str, Any]) -> tuple[float, float]:
    at = int(np.nanargmin(line["perplexity"]["mean"]))
    return float(line["steps"][at]), float(line["perplexity"]["mean"][at])


def _perplexity_at(step: float, line: dict[str, Any]) -> float:
    there = np.isfinite(line["perplexity"]["mean"])
    return float(np.interp(step, line["steps"][there], line["perplexity"]["mean"][there]))


def _mark_target(ax: Axes, sweep: Sweep) -> None:
    targets = {member.target for member in sweep.members if member.kappa_2 is not None}
    for target in targets:
        ax.axhline(target, color="0.75", linewidth=0.8, zorder=0)


def _log_if_wide(ax: Axes, series: Sequence[Array]) -> None:
    """A logarithmic axis where the lines span more than one and a half decades."""
    values = np.concatenate(series)
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() > 30 * values.min():
        ax.set_yscale("log")


def _colours(values: Array) -> tuple[float, float]:
    """Where nearly all values lie, but no less than 0.3 of ρ: a narrower bar would make stripes of sampling errors."""
    seen = values[np.isfinite(values)]
    if not len(seen):
        raise LocaterError("the records hold no ρ")
    low, high = (float(each) for each in np.quantile(seen, (0.005, 0.995)))
    missing = max(0.0, 0.3 - (high - low))
    low = min(max(0.0, low - missing / 2), 0.7)
    return low, max(high, low + 0.3)


def _iterations(sweep: Sweep) -> tuple[float, str]:
    """The unit of the axis of time, and its name."""
    if sweep.steps[-1] == 0:
        raise LocaterError("the sweep has no record after step 0 to draw; let it go on")
    return (1000.0, r"iterations ($\times 10^3$)") if sweep.steps[-1] >= 5000 else (1.0, "iterations")


def _positions(tokens: int) -> NDArray[np.int64]:
    return np.unique([1, *(np.arange(1, 5) * tokens // 4)])


def _label(kappa: float | None) -> str:
    if kappa is None:
        return "no LocAteR"
    power = round(np.log10(kappa)) if kappa > 0 else 0
    round_power = kappa > 0 and np.isclose(kappa, 10.0**power) and power not in (0, 1)
    return rf"$\kappa_2 = 10^{{{power}}}$" if round_power else rf"$\kappa_2 = {kappa:g}$"


def _model(sweep: Sweep) -> dict[str, Any]:
    model = sweep.config.model
    return {"width": model.width, "layers": model.layers, "heads": model.heads, "tokens": model.tokens}


def _setting(sweep: Sweep) -> str:
    model, data = sweep.config.model, sweep.config.data
    text = "the embedded corpus" if data is None else "WikiText-2" if data == "wikitext-2" else Path(data).name
    layers = f"{model.layers} layers" if model.layers > 1 else "1 layer"
    layers += f", {model.heads} heads" if model.heads > 1 else ""
    strengths = {member.mean_strength for member in sweep.members if member.kappa_2 is not None}
    kappa_1 = "".join(rf", $\kappa_1 = {each * sweep.config.tokens_per_batch:.4g}$" for each in strengths)
    return f"{text}, $d = {model.width}$, {layers}, $T = {model.tokens}${kappa_1}"


def _title(sweep: Sweep) -> str:
    seeds = max(len(sweep.of(kappa)) for kappa in sweep.kappas)
    over = f"mean of {seeds} seeds, band from the lowest to the highest" if seeds > 1 else "one seed"
    return f"{_setting(sweep)};  {over}"
