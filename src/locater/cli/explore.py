"""The command `explore`: the theory as a page with sliders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption
from locater.errors import LocaterError

__all__ = ["explore_command"]


def explore_command(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path("explorer.html"),
    json_file: JsonOption = None,
) -> None:
    """A page with sliders for the spectrum, d, T, λ and the tokens: ρ by every formula, computed in the browser."""
    from locater.pages.explore import write_explorer

    if out.is_dir():
        raise LocaterError(f"cannot write {out}: it is a folder; name a file in it, as in {out / 'explorer.html'}")
    if not out.parent.is_dir():
        raise LocaterError(f"cannot write {out}: there is no folder {out.parent}")
    written = write_explorer(out)
    if json_file is not None:
        terminal.write_json(json_file, {"file": str(written), "bytes": written.stat().st_size})
    if json_file != "-":
        print(written)
