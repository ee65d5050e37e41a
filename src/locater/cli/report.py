"""The command `report`: files that other commands wrote, as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption
from locater.errors import LocaterError

__all__ = ["report_command"]


def report_command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE_OR_FOLDER...", help="What scan, measure, sweep, train and logs of attention wrote."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path("report.html"),
    seeds_from: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A sweep of several seeds, for claims about one that has a single seed."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Write one page, complete in itself, with interactive plots of sweeps, scans and measurements."""
    from locater.pages.report import report

    terminal.check_file(out)
    written = {path.resolve() for path in (out, Path(json_file or "-")) if str(path) != "-"}
    if read := next((path for path in paths if path.resolve() in written), None):
        raise LocaterError(f"{read} is read: give another file to write to")
    with terminal.progress("reading"):
        made = report(paths, seeds_from=seeds_from)
    made.write(out)
    size = len(made.html.encode())
    if json_file is not None:
        sections = [{key: section[key] for key in ("kind", "title", "source", "notes")} for section in made.sections]
        terminal.write_json(
            json_file, {"report": str(out), "bytes": size, "sections": sections, "passed_over": made.passed}
        )
    if json_file != "-":
        console = terminal.out()
        for section in made.sections:
            console.print(f"{section['kind']}: {section['source']}", highlight=False, markup=False)
            for note in section["notes"]:
                console.print(f"  {note}", highlight=False, markup=False)
        for sentence in made.passed:
            console.print(f"passed over: {sentence}", highlight=False, markup=False)
        console.print(f"{out}  ({size / 1e6:.1f} MB)", highlight=False, markup=False)
