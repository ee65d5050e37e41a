"""The command arena: LocAteR against its rivals, where attention breaks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from locater import _terminal as terminal
from locater._lab_commands import DataOption, DeviceOption, StepsOption, watching
from locater._terminal import JsonOption
from locater.errors import LocaterError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("arena")(arena_command)


def arena_command(
    name: Annotated[str, typer.Argument(metavar="ARENA", help="laptop, or on a GPU pre, post, words.")] = "laptop",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write; a folder in runs if not given.")
    ] = None,
    data: DataOption = None,
    contenders: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only these, as `locater arena --list` names them.")
    ] = None,
    steps: StepsOption = None,
    device: DeviceOption = None,
    listed: Annotated[bool, typer.Option("--list", help="Say what there is, and train nothing.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Train a decoder at rising learning rates with LocAteR and with its rivals; a table, and a figure."""
    from locater.figures import draw_arena
    from locater.lab.arena import ARENAS, CONTENDERS, read_arena, run_arena, summary

    if listed:
        terminal.out().print(terminal.table([{"arena": key, "is": one.about} for key, one in ARENAS.items()], ""))
        listing = [{"contender": key, "is": one.label, "strengths": _numbers(one)} for key, one in CONTENDERS.items()]
        terminal.out().print(terminal.table(listing, ""))
        return
    if name not in ARENAS:
        raise LocaterError(f"there is no arena {name!r}; there are {', '.join(ARENAS)}")
    arena = ARENAS[name]
    changes = {key: value for key, value in {"data": data, "steps": steps}.items() if value is not None}
    arena = replace(arena, config=arena.config.changed(**changes))
    if contenders is not None:
        arena = replace(arena, contenders=tuple(word.strip() for word in contenders.split(",") if word.strip()))
    folder = out or Path("runs") / f"arena-{name}"
    with watching() as watch:
        run_arena(arena, folder, device=device, watch=watch)
    models = read_arena(folder)
    tables = {which: summary(models, which) for which in (("default", "best") if arena.tuned else ("default",))}
    pictures = draw_arena(models, arena.about, arena.config.unit, folder)
    if json_file is not None:
        value: dict[str, Any] = {"arena": name, "folder": str(folder), "models": _plain(models)}
        terminal.write_json(json_file, value | {which: _plain(table) for which, table in tables.items()})
    if json_file != "-":
        bits = arena.config.unit == "bytes"
        for which, table in tables.items():
            title = "at the default strength" if which == "default" else "at the strength of the lowest area"
            terminal.out().print(terminal.table(_for_people(table, bits), title))
        for path in pictures:
            print(path)


def _numbers(contender: Any) -> str:
    return ", ".join(f"{strength:g}" for strength in contender.strengths) if any(contender.strengths) else ""


def _for_people(table: pd.DataFrame, bits: bool) -> list[dict[str, Any]]:
    per, unit = (math.log(2), "bits a byte") if bits else (1.0, "nats a word")
    rows = []
    for row in _plain(table):
        memory = row["bytes"]
        rows.append(
            {
                "": row["label"],
                "strength": row["strength"] or "",
                f"loss, {unit}": row["loss"] / per,
                "at rate": row["best_rate"],
                "area": row["area"] / per,
                "trains to": row["trains_to"] or "none",
                "holds to": row["holds_to"] or "none",
                "max logit": row["max_logit"] or "",
                "lowest entropy": row["entropy"] or "",
                "rank residual": row["rank_residual"],
                "ms a step": row["milliseconds"],
                **({"MB": memory / 1e6} if memory is not None else {}),
                "at inference": row["at_inference"],
            }
        )
    return rows


def _plain(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows for JSON: None where there is no finite number."""

    def number(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return [{str(key): number(value) for key, value in row.items()} for row in table.to_dict("records")]
