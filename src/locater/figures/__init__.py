"""One function per figure of the paper and of softmax's law, and `draw`, which writes it as PNG, SVG and JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locater.errors import LocaterError
from locater.io import writable_folder, write_file

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from locater.figures._paper import Drawing, Progress
    from locater.lab.claims import Effects
    from locater.lab.claims.series import Folders
    from locater.measure import Prediction
    from locater.measure.reading import Reading
    from locater.models import Scan
    from locater.theory import TrainabilityMap

__all__ = [
    "FIGURES",
    "FROM_RUNS",
    "OF_SOFTMAX",
    "draw",
    "draw_arena",
    "draw_effects",
    "draw_initial",
    "draw_measure",
    "draw_predicted",
    "draw_run",
    "draw_scan",
]

FIGURES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
FROM_RUNS = (6, 7, 8, 9, 10, 11, 12)
"""Those that show trained models: they need the folder of a sweep."""
OF_SOFTMAX = ("spectra", "regimes")
"""What the paper does not have: softmax's own law, for six spectra and over all traces and scales."""

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "locater",
}


def draw(
    which: int | str,
    out: str | Path,
    progress: Callable[[float], None] | None = None,
    runs: Folders | None = None,
) -> list[Path]:
    """Draws a figure of the paper, by its number, or one of `OF_SOFTMAX` into the folder `out`: PNG, SVG and JSON.

    All three, or none. Figures 6 to 12 show the sweep in `runs`: a folder, or several that differ in their seeds alone.
    """
    if which not in (*FIGURES, *OF_SOFTMAX):
        raise LocaterError(f"figure must be one of {', '.join(map(str, (*FIGURES, *OF_SOFTMAX)))}, got {which}")
    make = _from_runs(which, runs) if isinstance(which, int) and which in FROM_RUNS else _from_theory(which)
    name = which if isinstance(which, str) else f"figure-{which}"

    def drawn() -> dict[str, Drawing]:
        drawing = make(progress or (lambda _: None))
        return {name: replace(drawing, data={"figure": which} | (drawing.data or {}))}

    return _write(out, drawn)


def draw_run(folder: str | Path, out: str | Path, name: str) -> list[Path]:
    """Draws any run or sweep as Figs. 6 and 7 draw the paper's: NAME-curves and NAME-rho, as PNG, SVG and JSON."""
    from locater.figures import _lab
    from locater.lab.claims.series import read_sweep

    sweep = read_sweep(folder)
    return _write(out, lambda: {f"{name}-curves": _lab.curves(sweep), f"{name}-rho": _lab.propagation(sweep)})


def draw_arena(models: pd.DataFrame, title: str, unit: str, out: str | Path) -> list[Path]:
    """Writes arena.png, .svg and .json, of what `locater.lab.arena.read_arena` gives, into the folder `out`."""
    from locater.figures import _arena

    return _write(out, lambda: {"arena": _arena.against_rate(models, title, unit)})


def draw_scan(scan: Scan, out: str | Path) -> list[Path]:
    """Writes scan-maps and, if the scan has them, scan-eigenvalues, as PNG and SVG, into the folder `out`."""
    from locater.figures._paper import Drawing
    from locater.figures.scan import clouds, maps

    makers = {"scan-maps": maps} | ({"scan-eigenvalues": clouds} if scan.eigenvalues else {})
    return _write(out, lambda: {name: Drawing(make(scan)) for name, make in makers.items()})


def draw_measure(seen: Reading, title: str, out: str | Path) -> list[Path]:
    """Writes measure-maps, measure-positions and, if the reading has predictions, measure-predicted, as PNG and SVG."""
    from locater.figures import _measure
    from locater.figures._paper import Drawing

    def drawn() -> dict[str, Drawing]:
        made = {"measure-maps": _measure.maps(seen, title), "measure-positions": _measure.positions(seen, title)}
        if seen.predicted:
            made["measure-predicted"] = _measure.predicted(seen.predicted, title)
        return {name: Drawing(figure) for name, figure in made.items()}

    return _write(out, drawn)


def draw_initial(found: TrainabilityMap, title: str, file: str | Path) -> Path:
    """Writes the trainability diagram into a `file`, .png or .svg."""
    from locater.figures import _initial

    return _write_one(file, lambda: _initial.diagram(found, title))


def draw_effects(found: Effects, title: str, file: str | Path) -> Path:
    """Writes the planned comparisons of a sweep, with their intervals, into a `file`, .png or .svg."""
    from locater.figures import _effects

    return _write_one(file, lambda: _effects.intervals(found, title))


def _write_one(file: str | Path, draw: Callable[[], Drawing]) -> Path:
    path = Path(file)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise LocaterError(f"a picture is a .png or an .svg file, got {path.name}")
    with style():
        return write_file(path, pictures(draw().figure)[kind])


def draw_predicted(predictions: Sequence[Prediction], title: str, out: str | Path) -> list[Path]:
    """Writes measure-predicted, predicted against measured entropy of every head, as PNG and SVG, into `out`."""
    from locater.figures import _measure
    from locater.figures._paper import Drawing

    return _write(out, lambda: {"measure-predicted": Drawing(_measure.predicted(predictions, title))})


def _from_theory(which: int | str) -> Callable[[Progress], Drawing]:
    from locater.figures import _paper, _softmax

    make: Callable[[Progress], Drawing] = (
        getattr(_softmax, which) if isinstance(which, str) else getattr(_paper, f"figure_{which}")
    )
    return make


def _from_runs(number: int, runs: Folders | None) -> Callable[[Progress], Drawing]:
    """Reads the runs, so that those which do not fit leave no folder behind."""
    if runs is None:
        raise LocaterError(
            "figures 6 to 12 need the folder of a sweep: --runs DIR, made by `locater sweep paper-d128-l1`"
        )
    from locater.figures import _lab

    sweep = _lab.sweep_for(number, runs)
    return lambda progress: _lab.figure(number, sweep, progress)


def _write(out: str | Path, draw: Callable[[], Mapping[str, Drawing]]) -> list[Path]:
    """Each drawing by its name, as PNG, SVG and, if it has data, JSON: all of these files, or none."""
    folder = writable_folder(Path(out))
    files: dict[str, bytes] = {}
    with style():
        for name, drawing in draw().items():
            files |= {f"{name}.{kind}": content for kind, content in pictures(drawing.figure).items()}
            if drawing.data is not None:
                files[f"{name}.json"] = json.dumps(drawing.data, allow_nan=False).encode()
    return [write_file(folder / name, content) for name, content in files.items()]


def style() -> AbstractContextManager[None]:
    """Of every picture the package makes."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def pictures(figure: Figure) -> dict[str, bytes]:
    """A figure as PNG and SVG."""
    contents: dict[str, bytes] = {}
    for kind, options in (("png", {"dpi": 200}), ("svg", {"metadata": {"Date": None}})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, **options)
        contents[kind] = buffer.getvalue()
    return contents
