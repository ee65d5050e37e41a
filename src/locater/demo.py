"""The main job, small: predict ρ, simulate it, train models with and without LocAteR."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from locater.io import write_file
from locater.theory import TokenProcess, normal_spectrum, regime, rho
from locater.theory.law import spectrum_of
from locater.theory.simulate import rho_by_walks

if TYPE_CHECKING:
    from locater.lab import Config

__all__ = ["KAPPAS", "SPECTRA", "compare", "config", "train_models", "write_report"]

SPECTRA = ((0.05, 0.02), (0.2, 0.05), (0.4, 0.1), (-0.2, 0.05), (0.0, 0.3), (0.1, 2.0))
"""Means and standard deviations of the eigenvalues of W_QK, a row of the demo each."""


def compare(
    mean: float, std: float, *, dim: int = 128, tokens: int = 40, walks: int = 4000, seed: int = 0
) -> dict[str, Any]:
    """ρ of one spectrum by every method, beside the share counted in simulated walks."""
    spectrum, walk, temperature = normal_spectrum(mean, std, dim), TokenProcess.random_walk(tokens), np.sqrt(dim)
    predicted = {
        method: rho(spectrum, walk, temperature, method)
        for method in ("exact", "gaussian", "asymptotic", "printed")
    }  # fmt: skip
    simulated = rho_by_walks(spectrum_of(spectrum), walk, temperature, samples=walks, seed=seed)
    return {
        "mean": mean,
        "std": std,
        "regime": regime(predicted["exact"]),
        "rho": {name: values.tolist() for name, values in predicted.items()} | {"simulated": simulated.tolist()},
        "largest_gap": {name: float(np.abs(values - simulated).max()) for name, values in predicted.items()},
        "four_standard_errors": float(4 * np.sqrt(0.25 / walks)),
    }


KAPPAS = (None, 1.0, 100.0)
"""LocAteR's κ₂ of the trained models; None is without it."""


def config(steps: int | None = None) -> Config:
    """The laptop preset's, with so many updates."""
    from locater.lab import preset

    chosen = preset("laptop").config
    return chosen if steps is None else chosen.changed(steps=steps)


def train_models(out: Path, config: Config, *, seed: int = 0, watch: Callable[[str, Any], None] | None = None) -> Path:
    """Trains the laptop preset's models, stacked; gives the folder of the sweep."""
    from locater.lab import members_for, preset, sweep

    members = members_for(config, KAPPAS, seeds=[seed], learning_rate=preset("laptop").learning_rate)
    folder = out / f"laptop-seed-{seed}"
    sweep(config, members, folder, watch=watch, about={"preset": "laptop"})
    return folder


def write_report(out: Path, results: Sequence[dict[str, Any]], runs: Path) -> Path:
    """A page of the predictions and of the trained models."""
    from locater.report import report

    predictions = write_file(out / "predictions.json", (json.dumps({"spectra": list(results)}) + "\n").encode())
    return report([predictions, runs]).write(out / "report.html")
