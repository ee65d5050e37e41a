"""The command `study`: the paper's statements put to the test."""

from __future__ import annotations

from typing import Annotated

import typer

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption, SeedOption
from locater.errors import LocaterError
from locater.io import nulled

__all__ = ["study_command"]


def study_command(
    name: Annotated[str | None, typer.Argument(help="Which; none lists them.")] = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Put one of the paper's statements to the test, as a table."""
    from locater.theory import STUDIES

    if name is None:
        rows = [{"study": key, "asks": study.question, "of": study.title} for key, study in STUDIES.items()]
        if json_file is not None:
            terminal.write_json(json_file, {"studies": rows})
        if json_file != "-":
            terminal.out().print(terminal.table(rows, "locater study NAME"))
        return
    if name not in STUDIES:
        raise LocaterError(f"study must be one of {', '.join(STUDIES)}, got {name!r}")
    study = STUDIES[name]
    with terminal.progress(name):
        result = study.run(seed)
    if json_file is not None:
        answer = {"study": name, "question": study.question, "seed": seed, "rows": nulled(result)}
        terminal.write_json(json_file, answer)
    if json_file != "-":
        terminal.out().print(terminal.table(result, f"{study.title}: {study.question}"))
