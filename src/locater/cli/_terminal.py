"""What every command prints with: consoles, progress, tables, JSON, and the options they share."""

from __future__ import annotations

import codecs
import json
import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from locater.errors import LocaterError
from locater.io import json_bytes, write_file


def check_file(target: str | Path | None) -> None:
    """Refuses, before the work, a file that could not be written after it; `-` is standard output."""
    if target is None or target == "-":
        return
    path = Path(target)
    if path.is_dir():
        raise LocaterError(f"cannot write {path}: it is a folder; give a file in it")
    if not path.absolute().parent.is_dir():
        raise LocaterError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise LocaterError(f"cannot write {path}: permission denied")


def check_folder(folder: Path, own: Sequence[str]) -> None:
    """Refuses, before the work, to write among files that are no run's; patterns say which are."""
    others = folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())
    if others and not any(path for pattern in own for path in folder.glob(pattern)):
        raise LocaterError(f"{folder} holds other files, and no run to go on with: give a new folder")


def _checked(target: str | None) -> str | None:
    check_file(target)
    return target


JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", callback=_checked, help="Write the numbers as JSON; - is standard output."),
]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files; made if missing.")]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", metavar="REV", help="Of a model on the hub: a branch, a tag or a commit.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]


def out() -> Console:
    """Standard output; a file or a pipe has no edge at which to fold tables."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=200)


@contextmanager
def progress(what: str) -> Iterator[Any]:
    """A bar on standard error that takes the share done; nothing without a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)  # until the first share is known, a pulse
        yield lambda share: bar.update(task, total=1.0, completed=share)


def write_json(target: str, value: Any) -> None:
    try:
        content = json_bytes(value)
        if target == "-" and not _is_utf8(sys.stdout):
            content = json.dumps(json.loads(content)).encode()  # in ASCII
    except ValueError as error:
        raise LocaterError("the numbers overflow and JSON cannot hold them; use smaller values") from error
    if target == "-":
        print(content.decode())
        return
    write_file(Path(target), content + b"\n")


def _is_utf8(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "").replace("_", "") == "utf8"


def encode_what_can_be() -> None:
    """Where the terminal has no Greek letters, their names; what else it cannot show becomes a question mark."""
    codecs.register_error("locater", _spelt)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="locater")  # type: ignore[union-attr]


def _spelt(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_spelt_letter, error.object[error.start : error.end])), error.end


def _spelt_letter(letter: str) -> str:
    name = unicodedata.name(letter, "")
    if name.startswith("GREEK"):
        return name.split()[-1].lower().replace("lamda", "lambda")  # as Unicode spells it
    plain = unicodedata.normalize("NFKD", letter)
    return (
        plain
        if plain.isascii()
        else {"−": "-", "±": "+-", "×": "x", "√": "sqrt ", "…": "...", "█": "#"}.get(letter, "?")
    )


def discard_output() -> None:
    """Nothing more goes to standard output: its reader is gone, or its disk is full, and Python would say so again."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        try:
            sys.stdout.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
