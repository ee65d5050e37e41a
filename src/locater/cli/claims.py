"""The command `claims`: the paper's claims beside the numbers of a sweep."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption
from locater.errors import LocaterError
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
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the planned comparisons, .png or .svg.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Put the paper's claims to the test with the numbers of a sweep; or make the comparisons planned for it."""
    from locater.lab.claims import claims, claims_markdown, has_comparisons, seed_spread

    if has_comparisons(runs):
        if seeds_from is not None:
            raise LocaterError("--seeds-from is for the paper's claims; planned comparisons take their own seeds")
        _show_effects(runs, markdown, plot, json_file)
        return
    if plot is not None:
        raise LocaterError("--plot draws planned comparisons, which this sweep has none of; see locater figure 6 to 12")
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


def _show_effects(runs: list[Path], markdown: Path | None, plot: Path | None, json_file: str | None) -> None:
    from locater.figures import draw_effects
    from locater.lab.claims import effects, effects_markdown

    found = effects(runs)
    if plot is not None:
        draw_effects(found, ", ".join(folder.resolve().name for folder in runs), plot)
    if markdown is not None:
        write_file(markdown, effects_markdown(runs).encode())
    if json_file is not None:
        terminal.write_json(json_file, {"runs": [str(folder) for folder in runs], **found.to_json()})
    if json_file != "-":
        rows = [
            {"comparison": e.name, "condition": e.condition, "against": e.reference, "perplexity": e.measured}
            | {"": e.verdict}
            for e in found.effects
        ]
        note = "" if found.step >= found.steps else f"at step {found.step:,} of {found.steps:,}; "
        console = terminal.out()
        console.print(terminal.table(rows, f"{note}mean over seeds ± half of Student's 95% interval, paired by seed"))
        ends = [asdict(each) for each in found.conditions]
        console.print(terminal.table(ends, "where the conditions ended: means over seeds, layers and heads"))
