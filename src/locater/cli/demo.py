"""The command `demo`, the main job, small: predict attention and ρ, simulate them, train with and without LocAteR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer
from rich.box import SIMPLE_HEAD

from locater.cli import _terminal as terminal
from locater.cli import _training
from locater.cli._terminal import JsonOption, OutOption, SeedOption
from locater.io import json_bytes, writable_folder, write_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from locater.lab import Config
    from locater.theory import TokenProcess

    Array: TypeAlias = NDArray[np.float64]

__all__ = ["demo_command"]


_SPECTRA = ((0.0, 0.01), (0.05, 0.02), (0.4, 0.1), (-0.2, 0.05), (0.0, 0.3), (0.1, 2.0))
"""Means and standard deviations of the eigenvalues of W_QK, a row of the demo each: every regime of softmax once."""


def demo_command(
    out: OutOption = Path("locater-demo"),
    seed: SeedOption = 0,
    steps: Annotated[int | None, typer.Option(help="Updates of the trained models; the preset's if not given.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Predict softmax attention and ρ, and simulate both; then train small language models with and without LocAteR."""
    from locater.figures import draw, draw_run

    config = _config(steps)
    folder = writable_folder(out)
    with terminal.progress("simulating") as progress:
        written = draw(5, folder, lambda share: progress(0.3 * share))
        results = _compare(_SPECTRA, seed=seed, progress=lambda share: progress(0.3 + 0.7 * share))
    if json_file != "-":
        _print_predictions(results)
        print("Training three models as one program, on State of the Union addresses …", flush=True)
    with _training.watching() as watch:
        runs = _train_models(folder, config, seed=seed, watch=watch)
    rows = _training.summary(runs)
    written += draw_run(runs, folder, "laptop")
    page = _write_report(folder, results, runs)
    if json_file is not None:
        files = [str(path) for path in written]
        answer = {"spectra": results, "members": rows, "runs": str(runs), "files": files}
        terminal.write_json(json_file, {**answer, "report": str(page)})
    if json_file == "-":
        return
    console = terminal.out()
    names = {"none": "no LocAteR"} | {f"k{kappa:g}": f"LocAteR, κ₂ = {kappa:g}" for kappa in _KAPPAS if kappa}
    shown = ("perplexity", "scale", "trace", "entropy", "max logit")
    table = [{"model": names[row["member"].split("-")[0]]} | {key: row[key] for key in shown} for row in rows]
    console.print(terminal.table(table, "", box=SIMPLE_HEAD))
    console.print("perplexity: on addresses that were not trained on; scale: tr(W_QKᵀW_QK);")
    console.print("trace: tr W_QK; entropy of attention in nats.")
    for path in written:
        if path.suffix == ".png":
            console.print(str(path), highlight=False)
    console.print(f"All of it as a page, for a browser: {page}", highlight=False)


def _print_predictions(results: list[dict[str, Any]]) -> None:
    console = terminal.out()
    rows = [
        {
            "mean": result["mean"],
            "std": result["std"],
            "softmax": result["softmax"]["regime"],
            "weight": _sparkline(result["softmax"]["weights"]["exact"], full=None),
            "entropy": f"{result['softmax']['entropy']['exact']:.3f}",
            "counted": f"{result['softmax']['entropy']['simulated']:.3f}",
            "ρ": _sparkline(result["rho"]["exact"]),
        }
        for result in results
    ]
    worst = {name: max(result["largest_gap"][name] for result in results) for name in results[0]["largest_gap"]}
    errors = max(result["softmax"]["standard_errors"] for result in results)
    console.print("Where softmax looks, from token 1 to the query, token 40, and its entropy (of")
    console.print("3.689 nats): predicted from the mean and std of 128 eigenvalues of W_QK, and")
    console.print("counted in 4,000 random walks. Beside it the paper's ρ, the chance that a token")
    console.print("is on the slope of a piecewise linear softmax. Weights: █ is the row's highest.")
    console.print(terminal.table(rows, "", box=SIMPLE_HEAD))
    console.print(f"Entropy predicted and counted differ by {errors:.1f} standard errors at most.")
    console.print(
        f"ρ by formula and counted differ by {worst['exact']:.3f} (exact), {worst['asymptotic']:.3f} (large T),"
    )
    console.print(
        f"{worst['printed']:.3f} (as printed); sampling explains up to {results[0]['four_standard_errors']:.3f}.\n"
    )


def _sparkline(values: list[float], width: int = 10, full: float | None = 1.0) -> str:
    """Averages of `width` stretches as bars of eight heights, up to `full`, or the highest of them if None."""
    edges = [round(k * len(values) / width) for k in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    most = max(means) if full is None else full
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * value / most))] for value in means)


def _compare(
    spectra: Sequence[tuple[float, float]],
    *,
    dim: int = 128,
    tokens: int = 40,
    walks: int = 4000,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Softmax attention and, by every method, ρ of each spectrum, beside what is counted in simulated walks."""
    import numpy as np

    from locater.theory import TokenProcess, attention, attention_regime, normal_spectrum, regime, rho

    walk, temperature = TokenProcess.random_walk(tokens), float(np.sqrt(dim))
    eigenvalues = np.stack([normal_spectrum(mean, std, dim) for mean, std in spectra])
    counted = _count(eigenvalues, walk, temperature, walks, seed, lambda share: progress(0.5 * share))
    results: list[dict[str, Any]] = []
    for (mean, std), spectrum, seen in zip(spectra, eigenvalues, counted, strict=True):
        predicted = {
            method: rho(spectrum, walk, temperature, method)
            for method in ("exact", "gaussian", "asymptotic", "printed")
        }  # fmt: skip
        law = attention(spectrum, walk, temperature)
        phrase = attention_regime(law)
        gap = abs(law.entropy - seen.entropy) / np.hypot(law.entropy_error, seen.entropy_error)
        softmax = {
            "regime": f"{phrase.name} {phrase.side}".strip(),
            "weights": {"exact": law.weights.tolist(), "simulated": seen.weights.tolist()},
            "entropy": {"exact": float(law.entropy), "simulated": seen.entropy},
            "standard_errors": float(gap),
        }
        by_name = {name: values.tolist() for name, values in predicted.items()} | {"simulated": seen.rho.tolist()}
        results.append(
            {
                "mean": mean,
                "std": std,
                "softmax": softmax,
                "regime": regime(predicted["exact"]),
                "rho": by_name,
                "largest_gap": {name: float(np.abs(values - seen.rho).max()) for name, values in predicted.items()},
                "four_standard_errors": float(4 * np.sqrt(0.25 / walks)),
            }
        )
        progress(0.5 + 0.5 * len(results) / len(spectra))
    return results


class _Counted(NamedTuple):
    """Of the last token's attention over simulated walks."""

    rho: Array  # (T,)
    weights: Array  # (T,)
    entropy: float
    entropy_error: float  # standard


def _count(
    eigenvalues: Array, walk: TokenProcess, temperature: float, walks: int, seed: int, progress: Callable[[float], None]
) -> list[_Counted]:
    """By the definitions alone: shares on the slope, weights and entropy, of every row in the same walks."""
    import numpy as np
    from scipy.special import entr

    from locater.theory import piecewise_softmax, softmax

    on_slope, weights = np.zeros((2, len(eigenvalues), walk.tokens))
    entropies: list[list[Array]] = [[] for _ in eigenvalues]
    done = 0
    for x in walk.sample_batches(walks, eigenvalues.shape[1], seed=seed):  # in the eigenbasis of W_QK
        for row, spectrum in enumerate(eigenvalues):
            logits = np.matmul(x, (spectrum * x[:, -1])[:, :, None])[:, :, 0] / temperature
            attended = softmax(logits)
            on_slope[row] += piecewise_softmax(logits).active.sum(0)
            weights[row] += attended.sum(0)
            entropies[row].append(entr(attended).sum(1))
        done += len(x)
        progress(done / walks)
    nats = [np.concatenate(parts) for parts in entropies]
    return [
        _Counted(slope / walks, weight / walks, float(each.mean()), float(each.std() / np.sqrt(walks - 1)))
        for slope, weight, each in zip(on_slope, weights, nats, strict=True)
    ]


_KAPPAS = (None, 1.0, 100.0)
"""LocAteR's κ₂ of the trained models; None is without it."""


def _config(steps: int | None = None) -> Config:
    """The laptop preset's, with so many updates."""
    from locater.lab import preset

    chosen = preset("laptop").config
    return chosen if steps is None else chosen.changed(steps=steps)


def _train_models(out: Path, config: Config, *, seed: int = 0, watch: Callable[[str, Any], None] | None = None) -> Path:
    """Trains the laptop preset's models, stacked; gives the folder of the sweep."""
    from locater.lab import members_for, preset, sweep

    members = members_for(config, _KAPPAS, seeds=[seed], learning_rate=preset("laptop").learning_rate)
    folder = out / f"laptop-seed-{seed}"
    sweep(config, members, folder, watch=watch, about={"preset": "laptop"})
    return folder


def _write_report(out: Path, results: Sequence[dict[str, Any]], runs: Path) -> Path:
    """A page of the predictions and of the trained models."""
    from locater.pages.report import report

    predictions = write_file(out / "predictions.json", json_bytes({"spectra": list(results)}) + b"\n")
    return report([predictions, runs]).write(out / "report.html")
