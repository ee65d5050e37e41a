"""The trainability diagram of a transformer's initialisation: entropy and cosine over query-key gain and residuals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from locater.figures._paper import BLACK, ORANGE, Drawing
from locater.theory.softmax_regime import COLLAPSED_TO, UNIFORM_FROM
from locater.theory.trainability import ALIKE_FROM

if TYPE_CHECKING:
    from locater.theory import TrainabilityMap

__all__ = ["diagram"]


def diagram(found: TrainabilityMap, title: str) -> Drawing:
    """Left the median layer's entropy, right the cosine of what leaves the last; a star where the configuration is."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    left, right = figure.subplots(1, 2, sharey=True)
    for ax, values, borders, label in (
        (left, found.entropy_share, (COLLAPSED_TO, UNIFORM_FROM), "entropy / ln(keys), median layer"),
        (right, found.cosine, (ALIKE_FROM,), "mean cosine of tokens, last layer"),
    ):
        image = ax.contourf(found.gain, 1 / found.branch, values.clip(0, 1), np.linspace(0, 1, 11), cmap="cividis")
        image.set(rasterized=True)
        figure.colorbar(image, ax=ax, label=label)
        border = ax.contour(found.gain, 1 / found.branch, values, borders, colors="white", linewidths=1.4)
        border.set(path_effects=[withStroke(linewidth=2.4, foreground=BLACK)])
        _frame(ax, found)
    left.set_ylabel("residual strength: stream / branches")
    _name(left, found, found.entropy_share, ("frozen", "uniform"))
    _name(right, found, np.where(found.cosine >= ALIKE_FROM, 1.0, 0.5), ("", "tokens alike"))
    data = {name: getattr(found, name).tolist() for name in ("gain", "branch", "entropy_share", "cosine")}
    return Drawing(figure, data | {"freezing_gain": found.freezing_gain})


def _frame(ax: Axes, found: TrainabilityMap) -> None:
    ax.set(xscale="log", yscale="log", xlabel="query-key gain on the logits (1: as configured)")
    ax.plot(1, 1, "*", color=ORANGE, markersize=13, markeredgecolor=BLACK, markeredgewidth=0.8, clip_on=False)
    if found.gain[0] < found.freezing_gain < found.gain[-1]:
        ax.axvline(found.freezing_gain, color="white", linestyle=":", linewidth=1.4)
        ax.text(
            found.freezing_gain, 0.02, " freezing, T → ∞", transform=ax.get_xaxis_transform(), fontsize=7,
            color="white", path_effects=[withStroke(linewidth=2, foreground=BLACK)],
        )  # fmt: skip


def _name(ax: Axes, found: TrainabilityMap, values: np.ndarray, words: tuple[str, str]) -> None:
    """Names of the regions below the lowest border and above the highest, at their centres."""
    x, y = np.meshgrid(np.log(found.gain), -np.log(found.branch))
    for word, where in zip(words, (values <= COLLAPSED_TO, values >= UNIFORM_FROM), strict=True):
        if word and where.sum() >= 3:
            across, up = float(x[where].mean()), float(y[where].mean())
            if np.hypot(across, up) < 0.6:
                up -= 0.6  # the star is there
            ax.text(
                np.exp(across), np.exp(up), word, ha="center", va="center", fontsize=8,
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )  # fmt: skip
