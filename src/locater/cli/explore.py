"""The command `explore`: the theory as a page with sliders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption

__all__ = ["explore_command"]


def explore_command(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path("explorer.html"),
    json_file: JsonOption = None,
) -> None:
    """A page with sliders for the spectrum, d, T, λ and the tokens: ρ by every formula, and softmax's weights.

    All is computed in the browser.
    """
    from locater.pages.explore import write_explorer

    terminal.check_file(out)
    written = write_explorer(out)
    if json_file is not None:
        terminal.write_json(json_file, {"file": str(written), "bytes": written.stat().st_size})
    if json_file != "-":
        print(written)
