"""The command `figure`: the paper's figures, and those of softmax's own law."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption, OutOption

__all__ = ["figure_command"]


def figure_command(
    which: Annotated[str, typer.Argument(help="1 to 12, the paper's numbering; of softmax: spectra, regimes.")],
    out: OutOption = Path("figures"),
    runs: Annotated[
        list[Path] | None,
        typer.Option("--runs", metavar="DIR", help="For 6 to 12: the folder of a sweep; again for its other seeds."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Draw a figure of the paper, or of softmax's law: PNG, SVG and the data as JSON."""
    from locater.figures import draw

    figure = int(which) if which.isdecimal() and len(which) < 9 else which
    with terminal.progress(f"figure {which}") as progress:
        written = draw(figure, out, progress, runs=runs or None)
    if json_file is not None:
        terminal.write_json(json_file, {"figure": figure, "files": [str(path) for path in written]})
    if json_file != "-":
        for path in written:
            print(path)
