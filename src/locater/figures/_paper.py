"""Figures 1 to 5 of the paper, drawn from this package's own numbers.

Each function returns the figure and the data it shows. Progress, if wanted, is a callable that takes
the share done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from locater.theory import (
    Simulation,
    TokenProcess,
    entropy_lower_bound,
    piecewise_softmax,
    rho,
    rho_curve,
    simulate,
    softmax,
    sparsemax,
    spectrum_at,
)

Progress: TypeAlias = Callable[[float], None]

# Okabe and Ito's palette: distinct for every common colour vision
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
PRINTED: dict[str, Any] = {"color": RED, "linestyle": "--"}
RIGHT: dict[str, Any] = {"color": BLUE, "linestyle": "-"}


@dataclass(frozen=True)
class Drawing:
    figure: Figure
    data: dict[str, Any] | None = None  # plain lists and numbers, as JSON takes them


def figure_1(progress: Progress) -> Drawing:
    """Softmax, its piecewise linear approximation and sparsemax."""
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    data: dict[str, Any] = {}
    for ax, tokens, reach in zip(axes, (2, 8, 64), (6.0, 12.0, 80.0), strict=True):
        x = np.linspace(-reach, reach, 401)
        omega = np.zeros((len(x), tokens))
        omega[:, 0] = x
        curves = {
            "softmax": softmax(omega)[:, 0],
            "piecewise linear": piecewise_softmax(omega).value[:, 0],
            "sparsemax": sparsemax(omega)[:, 0],
        }
        styles = ({"color": BLACK}, {"color": BLUE}, {"color": ORANGE, "linestyle": ":"})
        for (name, y), style in zip(curves.items(), styles, strict=True):
            ax.plot(x, y, label=name, **style)
        ax.set(title=f"T = {tokens}", xlabel=r"$\omega_1$, the others at 0")
        data[f"T={tokens}"] = {"omega_1": x.tolist()} | {name: y.tolist() for name, y in curves.items()}
    axes[0].set_ylabel("weight of the first token")
    axes[2].legend(loc="lower right")
    progress(1.0)
    return Drawing(figure, data)


def figure_2(progress: Progress) -> Drawing:
    """ρ over relative position and η, for several ξ: as printed, corrected, and exact at finite size."""
    xis = (-10.0, -5.0, -1.0, 0.0, 1.0, 5.0, 10.0)
    eta = np.geomspace(1e-3, 10, 41)
    tokens, dim = 64, 128
    theta = (np.arange(tokens) + 1) / tokens
    walk = TokenProcess.random_walk(tokens)
    figure = Figure(figsize=(9.6, 4.8), layout="constrained")
    axes = figure.subplots(3, len(xis), sharex=True, sharey=True)
    data: dict[str, Any] = {"eta": eta.tolist(), "theta": theta.tolist(), "tokens": tokens, "dim": dim}
    names = ("printed", "corrected", f"exact, T = {tokens}, d = {dim}")
    image = None
    for column, xi in enumerate(xis):
        exact = rho(np.stack([spectrum_at(xi, e, dim) for e in eta]), walk, 1.0).T
        panels = (
            rho_curve(theta[:, None], xi, eta, "printed"),
            rho_curve(theta[:, None], xi, eta),
            exact,
        )
        for row, (name, values) in enumerate(zip(names, panels, strict=True)):
            ax = axes[row, column]
            image = ax.pcolormesh(
                eta, theta, values, vmin=0, vmax=1, cmap="cividis", shading="nearest", rasterized=True
            )
            ax.set_xscale("log")
            if row == 0:
                ax.set_title(rf"$\xi = {xi:g}$")
            if row == 2:
                ax.set_xlabel(r"$\eta$")
            if column == 0:
                ax.set_ylabel(f"{name.replace(', T', chr(10) + 'T')}\n" + r"$\theta = i/T$")
            data.setdefault(name, {})[f"{xi:g}"] = values.tolist()
        progress((column + 1) / len(xis))
    assert image is not None
    figure.colorbar(image, ax=axes, label=r"signal propagation probability $\rho$", shrink=0.8)
    return Drawing(figure, data)


def figure_3(progress: Progress) -> Drawing:
    """ρ(θ) on either side of ξη = 2, from where it localises in the limit of Lemma 2; η = 0.01."""
    theta = np.linspace(0, 1, 1001)
    eta = 0.01
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    data: dict[str, Any] = {"theta": theta.tolist(), "eta": eta}
    for ax, xi in zip(axes, (128.0, 512.0), strict=True):
        printed, right = rho_curve(theta, xi, eta, "printed"), rho_curve(theta, xi, eta)
        ax.plot(theta, right, label=r"corrected, $2\theta^2 - 2\theta + 7/12$", **RIGHT)
        ax.plot(theta, printed, label=r"printed, $2\theta^2 + 7/12$", **PRINTED)
        ax.set(title=rf"$\xi = {xi:g}$,  $\xi\eta = {xi * eta:.2f}$", xlabel=r"relative position $\theta = i/T$")
        step = ax.inset_axes((0.07, 0.35, 0.3, 0.42))
        step.plot(theta, right, **RIGHT)
        step.plot(theta, printed, **PRINTED)
        step.set(xlim=(0.48, 0.52), xticks=(0.48, 0.5, 0.52), ylim=(-0.03, 1.03), yticks=())
        step.tick_params(labelsize=7)
        data[f"xi={xi:g}"] = {"printed": printed.tolist(), "corrected": right.tolist()}
    axes[0].set_ylabel(r"$\rho(\theta)$")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    progress(1.0)
    return Drawing(figure, data)


def figure_4(progress: Progress) -> Drawing:
    """The entropy lower bound: as printed it rises above ln T, the largest entropy there is."""
    tokens = 64
    nu = np.linspace(0, 12, 601)
    printed, right = entropy_lower_bound(nu, tokens, "printed"), entropy_lower_bound(nu, tokens)
    ceiling = float(np.log(tokens))
    figure = Figure(figsize=(4.6, 3.0), layout="constrained")
    ax = figure.subplots()
    ax.plot(nu, printed, label="printed, Eq. (9)", **PRINTED)
    ax.plot(nu, right, label="Zhai et al., Theorem 3.1", **RIGHT)
    ax.axhline(ceiling, color=BLACK, linewidth=0.8)
    ax.text(3.2, ceiling + 0.2, f"ln T = {ceiling:.2f}, uniform attention", va="bottom", fontsize=8)
    crossing = nu[np.argmax(printed > ceiling * (1 + 1e-9))]
    ax.fill_between(nu, ceiling, printed, where=(printed > ceiling).tolist(), color=RED, alpha=0.12, linewidth=0)
    ax.set(xlabel=r"$\nu = \|XX^\top\|_2\,\|W_{QK}\|_2/\lambda$", ylabel="lower bound on entropy (nats)", xlim=(0, 12))
    ax.set_ylim(0, 1.08 * float(printed.max()))
    ax.set_title(f"T = {tokens}")
    ax.legend(loc="upper right")
    progress(1.0)
    data = {"nu": nu.tolist(), "printed": printed.tolist(), "zhai": right.tolist(), "ln_T": ceiling}
    return Drawing(figure, data | {"printed_exceeds_ln_T_from_nu": float(crossing)})


def figure_5(progress: Progress) -> Drawing:
    """Simulated ρ (points) with the exact law (lines), and attention entropy over mean and spread."""
    means, stds = np.linspace(-0.4, 0.4, 9), np.geomspace(0.01, 1.0, 9)
    by_mean, at_std = (0.05, 0.2, 0.4), 0.05
    by_std, at_mean = (0.05, 0.2, 0.8), 0.3
    figure = Figure(figsize=(9.6, 5.0), layout="constrained")
    figure.suptitle(
        "points: 300 random walks of 40 tokens for each of 10 matrices, d = 128;  lines: the exact law", fontsize=9
    )
    axes = figure.subplots(2, 3)
    data: dict[str, Any] = {}
    for row, covariance in enumerate(("isotropic", "anisotropic")):
        varied_mean = simulate(by_mean, [at_std], covariance=covariance)
        varied_std = simulate([at_mean], by_std, covariance=covariance)
        grid = simulate(means, stds, covariance=covariance)
        progress((3 * row + 1) / 6)
        labels = [f"mean {value:g}" for value in by_mean], [f"std {value:g}" for value in by_std]
        data[covariance] = {
            f"std={at_std}": _lines(axes[row, 0], varied_mean, labels[0]),
            f"mean={at_mean}": _lines(axes[row, 1], varied_std, labels[1]),
            "entropy": {"means": means.tolist(), "stds": stds.tolist(), "nats": grid.entropy.mean(-1).tolist()},
        }
        image = axes[row, 2].pcolormesh(
            stds, means, grid.entropy.mean(-1), cmap="cividis", shading="nearest", vmin=0, vmax=np.log(40)
        )
        axes[row, 2].set(xscale="log", xlabel="std of the eigenvalues", ylabel="mean of the eigenvalues")
        axes[row, 2].set_title(f"{covariance}: attention entropy")
        figure.colorbar(image, ax=axes[row, 2], label="nats")
        axes[row, 0].set_title(f"{covariance}: std {at_std}")
        axes[row, 1].set_title(f"{covariance}: mean {at_mean}")
        progress((3 * row + 3) / 6)
    return Drawing(figure, data)


def _lines(ax: Axes, simulation: Simulation, labels: list[str]) -> dict[str, Any]:
    """Simulated shares as points, each matrix's exact ρ averaged as a line."""
    tokens = simulation.rho.shape[-1]
    shape = (-1, *simulation.rho.shape[2:])
    measured = simulation.rho.reshape(shape)
    spectra = simulation.eigenvalues.reshape(-1, *simulation.eigenvalues.shape[2:])
    exact = rho(spectra, TokenProcess.random_walk(tokens), simulation.temperature)
    position = np.arange(1, tokens + 1)
    data: dict[str, Any] = {}
    for label, points, law, colour, marker in zip(
        labels, measured, exact, (BLUE, ORANGE, GREEN), ("o", "s", "^"), strict=True
    ):
        ax.plot(position, law.mean(0), color=colour, linewidth=1.2)
        ax.plot(
            position, points.mean(0), marker, color=colour, markersize=3, label=label,
            markeredgecolor="white", markeredgewidth=0.3,
        )  # fmt: skip
        data[label] = {"simulated": points.mean(0).tolist(), "exact": law.mean(0).tolist()}
    ax.set(xlabel="token $i$", ylabel=r"$\rho_i$", ylim=(-0.03, 1.03))
    ax.legend(loc="upper left", handletextpad=0.2)
    return data
