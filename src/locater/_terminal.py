"""What every command prints with: consoles, progress, tables, JSON, and the options they share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from locater.errors import LocaterError
from locater.files import write_file

__all__ = ["JsonOption", "OutOption", "SeedOption", "out", "progress", "table", "write_json"]

JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the numbers as JSON; - is standard output.")
]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files; made if missing.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]


def out() -> Console:
    """Standard output; a file or a pipe has no edge at which to fold tables."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=200)


@contextmanager
def progress(what: str) -> Iterator[Any]:
    """A bar on standard error that takes the share done; nothing where nobody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)  # until the first share is told, a pulse
        yield lambda share: bar.update(task, total=1.0, completed=share)


def write_json(target: str, value: Any) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError as error:
        raise LocaterError("the numbers overflow and JSON cannot hold them; use smaller values") from error
    if target == "-":
        print(text)
        return
    write_file(Path(target), (text + "\n").encode())


def _plain(value: Any) -> Any:
    """numpy's numbers and arrays as Python's."""
    return value.tolist()


def table(rows: list[dict[str, Any]], title: str, box: Box = HEAVY_HEAD) -> Table:
    made = Table(title=title or None, title_justify="left", box=box)
    names = list(dict.fromkeys(key for row in rows for key in row))
    for name in names:
        words = any(isinstance(row.get(name), str) for row in rows)
        made.add_column(name, justify="left" if words else "right", overflow="fold")
    for row in rows:
        cells = (row.get(name, "") for name in names)
        made.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    return made
