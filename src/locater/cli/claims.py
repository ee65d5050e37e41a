"""The command `claims`: the paper's claims beside the numbers of a sweep."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption
from locater.io import write_file

__all__ = ["claims_command"]


def claims_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="The folder of a sweep; several are one if only their seeds differ."),
    ],
    seeds_from: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A sweep of several seeds, for the spread where this one has a single seed."),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as Markdown.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Put the paper's claims to the test with the numbers of a sweep."""
    from locater.lab.claims import claims, claims_markdown, seed_spread

    noise = None if seeds_from is None else seed_spread(seeds_from)
    found = claims(runs, noise=noise)
    if markdown is not None:
        write_file(markdown, (claims_markdown(runs, noise=noise).rstrip() + "\n").encode())
    if json_file is not None:
        named = [str(folder) for folder in runs]
        terminal.write_json(json_file, {"runs": named, "claims": [asdict(claim) for claim in found]})
    if json_file != "-":
        rows = [{"the paper says": c.statement, "where": c.where, "measured": c.measured, "": c.verdict} for c in found]
        terminal.out().print(terminal.table(rows, ""))
