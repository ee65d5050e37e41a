"""The pictures of docs/images that the package draws: python docs/_site/pictures.py

spectra.png is drawn here, figure-3 to -7 are those of `locater figure`, collapse.png is made by the code of
docs/tutorial.md. All are brought down to 256 colours, which a plot does not exceed by much; with the names of PNG
files, only that is done to them.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from locater.figures import draw, style
from locater.theory import TokenProcess, normal_spectrum, regime, rho

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
RUNS = ROOT / "results" / "paper-d128-l1"
BLUE, ORANGE = "#0072B2", "#E69F00"

SPECTRA = {  # mean and standard deviation of 128 eigenvalues
    "nothing there": (0.0, 0.002),
    "a mean above zero": (0.07, 0.03),
    "a larger mean": (0.4, 0.05),
    "a mean below zero": (-0.07, 0.03),
    "no mean, much spread": (0.0, 25.0),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spectra(folder / "spectra.png")
        figures = (3, None), (4, None), (5, None), (6, RUNS), (7, RUNS)
        for number, runs in figures:
            draw(number, folder, runs=runs)
        tutorial(folder)
        for picture in ("spectra", *(f"figure-{number}" for number, _ in figures), "collapse"):
            shrink(folder / f"{picture}.png", IMAGES / f"{picture}.png")


def spectra(path: Path, tokens: int = 40, dim: int = 128) -> None:
    """Above, eigenvalues; below, ρ of each token: the exact law, and counted in 2,000 walks."""
    walk, temperature = TokenProcess.random_walk(tokens), np.sqrt(dim)
    with style():
        figure = Figure(figsize=(9.6, 3.7), layout="constrained")
        axes = figure.subplots(2, len(SPECTRA), height_ratios=(1, 2.2), sharey="row")
        for (above, below), (title, (mean, std)) in zip(axes.T, SPECTRA.items(), strict=True):
            eigenvalues = normal_spectrum(mean, std, dim)
            law = rho(eigenvalues, walk, temperature)
            counted = rho(eigenvalues, walk, temperature, "montecarlo", samples=2000)
            reach = max(0.6, 1.1 * float(np.abs(eigenvalues).max()))
            above.hist(eigenvalues, bins=np.linspace(-reach, reach, 41), color=ORANGE)
            above.axvline(0, color="#555555", linewidth=0.7)
            above.set(title=title, yticks=(), xlim=(-reach, reach))
            below.plot(np.arange(1, tokens + 1), law, color=BLUE)
            below.plot(np.arange(1, tokens + 1), counted, "o", color=BLUE, markersize=2.5)
            below.set(xlabel="token", ylim=(-0.04, 1.04))
            below.set_title(str(regime(law)), weight="bold")
        axes[0, 0].set_ylabel("eigenvalues")
        axes[1, 0].set_ylabel(r"$\rho$: on the slope of" + "\nthe paper's softmax")
        figure.savefig(path, dpi=150)


def tutorial(folder: Path) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    here = Path.cwd()
    os.chdir(folder)
    try:
        names: dict[str, object] = {}
        for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
            exec(compile(block, "tutorial.md", "exec"), names)
    finally:
        os.chdir(here)


def shrink(source: Path, target: Path) -> None:
    image = Image.open(source).convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(target, optimize=True)
    print(f"{target.relative_to(ROOT)}  {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        shrink(Path(given), Path(given).resolve())
    if not sys.argv[1:]:
        main()
