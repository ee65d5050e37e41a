"""The command `figure`: the paper's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption, OutOption

__all__ = ["figure_command"]


def figure_command(
    number: Annotated[int, typer.Argument(help="1 to 12, the paper's numbering.")],
    out: OutOption = Path("figures"),
    runs: Annotated[
        Path | None, typer.Option("--runs", metavar="DIR", help="For 6 to 12: the folder of a sweep.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Draw a figure of the paper: PNG, SVG and the data as JSON."""
    from locater.figures import draw

    with terminal.progress(f"figure {number}") as progress:
        written = draw(number, out, progress, runs=runs)
    if json_file is not None:
        terminal.write_json(json_file, {"figure": number, "files": [str(path) for path in written]})
    if json_file != "-":
        for path in written:
            print(path)
