"""What softmax attention does, by its law: for six spectra beside simulation, and over all traces and scales."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from scipy.interpolate import RectBivariateSpline

from locater.figures._paper import BLACK, BLUE, ORANGE, PINK, Drawing, Progress
from locater.theory import (
    ATTENTION_REGIMES,
    AttentionMap,
    TokenProcess,
    attention,
    attention_map,
    attention_regime,
    normal_spectrum,
    regime,
    rho,
)
from locater.theory.softmax_regime import COLLAPSED_TO, FAR_TO, NEAR_FROM, UNIFORM_FROM

__all__ = ["regimes", "spectra"]

TOKENS, DIM, WALKS = 40, 128, 2000
SPECTRA = ((0.0, 0.01), (0.05, 0.02), (-0.05, 0.02), (0.0, 0.3), (0.4, 0.05), (0.0, 2.0))
"""Means and standard deviations of the eigenvalues: every regime of softmax once."""


def spectra(progress: Progress) -> Drawing:
    """Above, eigenvalues; below, the weight that softmax gives each token, predicted and counted, and the paper's ρ."""
    figure = Figure(figsize=(10.4, 4.9), layout="constrained")
    axes = figure.subplots(3, len(SPECTRA), height_ratios=(1, 2.3, 1.3), sharey="row")
    data: dict[str, Any] = {"tokens": TOKENS, "dim": DIM, "walks": WALKS, "spectra": []}
    for done, (column, (mean, std)) in enumerate(zip(axes.T, SPECTRA, strict=True), start=1):
        data["spectra"].append({"mean": mean, "std": std} | _spectrum(column, mean, std))
        progress(done / len(SPECTRA))
    axes[0, 0].set_ylabel(f"{DIM}\neigenvalues")
    axes[1, 0].set_ylabel("weight that softmax\ngives the token")
    axes[2, 0].set_ylabel(r"the paper's $\rho$")
    key = f"Lines: predicted from the eigenvalues;  points: counted in {WALKS:,} random walks;  dotted: 1/T"
    figure.supxlabel(f"token; the query is token {TOKENS}.  {key}", fontsize=9)
    return Drawing(figure, data)


def _spectrum(axes: Any, mean: float, std: float) -> dict[str, Any]:
    """One column; what it shows."""
    walk, temperature = TokenProcess.random_walk(TOKENS), float(np.sqrt(DIM))
    eigenvalues = normal_spectrum(mean, std, DIM)
    law = attention(eigenvalues, walk, temperature)
    counted = attention(eigenvalues, walk, temperature, "montecarlo", samples=WALKS)
    slope = rho(eigenvalues, walk, temperature)
    slope_counted = rho(eigenvalues, walk, temperature, "montecarlo", samples=WALKS)
    position = np.arange(1, TOKENS + 1)
    reach = max(0.5, 1.1 * float(np.abs(eigenvalues).max()))
    above, middle, below = axes
    above.hist(eigenvalues, bins=np.linspace(-reach, reach, 41), color=ORANGE)
    above.axvline(0, color="0.4", linewidth=0.7)
    above.set(title=f"mean {mean:g}, std {std:g}".replace("-", "−"), yticks=(), xlim=(-reach, reach))
    middle.axhline(1 / TOKENS, color="0.5", linestyle=":", linewidth=0.9)
    middle.plot(position, law.weights, color=BLUE)
    middle.plot(position, counted.weights, "o", color=BLUE, markersize=2.3)
    middle.set(yscale="log", ylim=(4e-5, 1.6))
    found = attention_regime(law)
    words = ATTENTION_REGIMES[f"{found.name} {found.side}".strip()]
    middle.set_title(_in_two_lines(words), weight="bold", pad=15)
    middle.text(
        0.5, 1.02, f"{law.entropy:.2f} nats ({counted.entropy:.2f} counted)", transform=middle.transAxes,
        ha="center", va="bottom", fontsize=7.5,
    )  # fmt: skip
    below.plot(position, slope, color=PINK)
    below.plot(position, slope_counted, "o", color=PINK, markersize=1.8)
    below.set(ylim=(-0.05, 1.08), yticks=(0, 1))
    for ax in (middle, below):
        ax.set(xlim=(0, TOKENS + 1), xticks=(1, 20, 40))
    middle.tick_params(labelbottom=False)
    return {
        "regime": str(found),
        "weights": {"exact": law.weights.tolist(), "simulated": counted.weights.tolist()},
        "entropy": {"exact": float(law.entropy), "simulated": float(counted.entropy)},
        "rho": {"exact": slope.tolist(), "simulated": slope_counted.tolist()},
        "shape_of_rho": str(regime(slope)),
    }


def _in_two_lines(words: str) -> str:
    """Broken where the longer of the two is shortest; one word stays one."""
    parts = words.split()
    broken = [(" ".join(parts[:k]), " ".join(parts[k:])) for k in range(1, len(parts))]
    return "\n".join(min(broken, key=lambda lines: max(map(len, lines)))) if broken else words


# ---------------------------------------------------------------------- regimes over trace and scale

PROCESSES = {
    "random walk": TokenProcess.random_walk(TOKENS),
    "AR(1), decay 0.9": TokenProcess.autoregressive(TOKENS, 0.9),
    "independent tokens": TokenProcess.independent(TOKENS),
}
_LINEAR = 0.1  # the axis of the trace is linear below and logarithmic above
_FINE = 10  # points drawn for each one computed
_GRID = 51, 33  # traces and scales computed
_Places: TypeAlias = dict[str, tuple[tuple[float, float], ...]]
_PLACES: dict[str, _Places] = {  # of the names of the regions, (trace, scale); of narrow ones also where to point
    "random walk": {
        "uniform": ((0, 0.022),), "local,\nnear": ((0.95, 0.25),), "local,\nfar": ((-0.95, 0.25),),
        "local,\nanywhere": ((0, 0.4),), "collapsed\non itself": ((26, 0.4), (20, 3.2)),
        "collapsed on others": ((0, 12),),
    },
    "AR(1), decay 0.9": {
        "uniform": ((0, 0.15),), "local, near": ((10, 0.07), (6.5, 1.4)), "local,\nfar": ((-26, 4.4),),
        "local, anywhere": ((0, 4.5),), "collapsed\non itself": ((27, 0.4), (62, 8.5)),
        "collapsed on others": ((0, 42),),
    },
    "independent tokens": {
        "uniform": ((0, 0.15),), "local, near": ((10, 0.07), (4.9, 0.9)), "local, anywhere": ((0, 2.8),),
        "collapsed\non itself": ((27, 0.4), (22, 3.6)), "collapsed on others": ((0, 32),),
    },
}  # fmt: skip


def regimes(progress: Progress) -> Drawing:
    """Regimes of softmax over trace and scale for three kinds of tokens, by the three-number law."""
    reach = np.arcsinh(100 / _LINEAR)
    trace = _LINEAR * np.sinh(np.linspace(-reach, reach, _GRID[0]))
    scale = np.geomspace(0.01, 100, _GRID[1])
    figure = Figure(figsize=(10.4, 3.7), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    data: dict[str, Any] = {"trace": trace.tolist(), "scale": scale.tolist(), "tokens": TOKENS}
    image = None
    for done, (ax, (title, process)) in enumerate(zip(axes, PROCESSES.items(), strict=True), start=1):
        found = attention_map(trace, scale, process, samples=1 << 10)
        image = _plane(ax, found, _PLACES[title])
        ax.set_title(f"{title}, T = {TOKENS}")
        shown = ("name", "entropy_share", "own_weight", "near")
        data[title] = {name: getattr(found, name).tolist() for name in shown}
        progress(done / len(PROCESSES))
    axes[0].set_ylabel(r"$\eta = (\mathrm{tr}\,W^\top W)^{1/2}/\lambda$")
    axes[1].set_xlabel(r"$r = \mathrm{tr}\,W/\lambda$")
    assert image is not None
    figure.colorbar(image, ax=axes, label="expected entropy / ln T", pad=0.01, ticks=(0, 0.1, 0.3, 0.5, 0.7, 0.9, 1))
    return Drawing(figure, data)


def _plane(ax: Axes, found: AttentionMap, places: _Places) -> Any:
    x, y = np.arcsinh(found.trace / _LINEAR), np.log(found.scale)
    fine_x, fine_y = (np.linspace(v[0], v[-1], _FINE * (len(v) - 1) + 1) for v in (x, y))
    trace, scale = _LINEAR * np.sinh(fine_x), np.exp(fine_y)
    share, own, near = (
        RectBivariateSpline(x, y, values)(fine_x, fine_y).T
        for values in (found.entropy_share, found.own_weight, found.near)
    )
    image = ax.contourf(trace, scale, share.clip(0, 1), np.linspace(0, 1, 11), cmap="cividis")
    image.set(rasterized=True)
    local, collapsed = (share > COLLAPSED_TO) & (share < UNIFORM_FROM), share <= COLLAPSED_TO
    for values, where, levels in (
        (share, share > -1, (COLLAPSED_TO, UNIFORM_FROM)),
        (near, local, (FAR_TO, NEAR_FROM)),
        (own, collapsed, (0.5,)),
    ):
        border = ax.contour(trace, scale, np.ma.array(values, mask=~where), levels, colors="white", linewidths=1.2)
        border.set(path_effects=[withStroke(linewidth=2.2, foreground=BLACK)])
    _leave_out(ax, trace, scale)
    for name, (place, *target) in places.items():
        arrow = {"arrowstyle": "-|>", "linewidth": 0.8, "mutation_scale": 7, "shrinkA": 0, "shrinkB": 0}
        text = ax.annotate(
            name, target[0] if target else place, place, ha="center", va="center", fontsize=7.5, linespacing=1.0,
            arrowprops=arrow if target else None, zorder=5,
        )  # fmt: skip
        for part in filter(None, (text, text.arrow_patch)):
            part.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
    ax.set_xscale("symlog", linthresh=_LINEAR, linscale=0.5)
    ax.set_yscale("log")
    ax.set(xlim=(trace[0], trace[-1]), ylim=(scale[0], scale[-1]))
    ax.set_xticks((-100, -10, -1, 0, 1, 10, 100), ("−100", "−10", "−1", "0", "1", "10", "100"))
    return image


def _leave_out(ax: Axes, trace: Any, scale: Any) -> None:
    """Where no spectrum of 128 real eigenvalues is: |tr W| ≤ √(d tr W²), the bound (5)."""
    edge = np.sqrt(DIM) * scale
    for sign in (-1, 1):
        ax.fill_betweenx(scale, sign * edge, sign * np.maximum(edge, trace[-1]), color="0.93", linewidth=0, zorder=3)
        ax.plot(sign * edge, scale, color="0.3", linewidth=0.8, zorder=3)
    words = f"no {DIM}\neigenvalues\nhave these"
    ax.text(0.03, 0.03, words, transform=ax.transAxes, fontsize=7, color="0.3", zorder=4)
