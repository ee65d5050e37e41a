"""The command arena: LocAteR against its rivals, where attention breaks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption
from locater.cli._training import DataOption, DeviceOption, SetOption, StepsOption, changed, watching
from locater.errors import LocaterError
from locater.io import nulled

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["arena_command"]

Number = TypeVar("Number", int, float)


def arena_command(
    name: Annotated[
        str, typer.Argument(metavar="ARENA", help="laptop, or on a GPU pre, post, rotary, words.")
    ] = "laptop",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write; a folder in runs if not given.")
    ] = None,
    data: DataOption = None,
    contenders: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only these, as `locater arena --list` names them.")
    ] = None,
    rates: Annotated[
        str | None, typer.Option("--rates", metavar="X,Y", help="These learning rates instead of the arena's.")
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", metavar="I,J", help="These seeds.")] = None,
    tuned: Annotated[
        bool | None, typer.Option("--tuned/--untuned", help="Other strengths besides the default, or only it.")
    ] = None,
    steps: StepsOption = None,
    settings: SetOption = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Train anew what another version of a method trained there, or was cut off.")
    ] = False,
    device: DeviceOption = None,
    listed: Annotated[bool, typer.Option("--list", help="Say what there is, and train nothing.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Train a decoder at rising learning rates with LocAteR and with its rivals; a table, and a figure."""
    from locater.figures import draw_arena
    from locater.lab.arena import ARENAS, finished, read_arena, run_arena, summary, to_renew

    if listed:
        _list(json_file)
        return
    if name not in ARENAS:
        raise LocaterError(f"there is no arena {name!r}; there are {', '.join(ARENAS)}")
    arena = ARENAS[name]
    about = f"{arena.about}, but {', '.join(settings)}" if settings else arena.about
    arena = replace(arena, about=about, config=changed(arena.config, settings, data=data, steps=steps))
    if arena.config.model.method != "none":
        raise LocaterError("an arena's methods are its contenders: name them with --contenders")
    if contenders is not None:
        words = dict.fromkeys(word.strip() for word in contenders.split(",") if word.strip())
        arena = replace(arena, contenders=tuple(words))
    if rates is not None:
        arena = replace(arena, learning_rates=_given(rates, float, "--rates", "positive numbers", 1e-300))
    if seeds is not None:
        arena = replace(arena, seeds=_given(seeds, int, "--seeds", "whole numbers from 0 on", 0))
    if tuned is not None:
        arena = replace(arena, tuned=tuned)
    folder = out or Path("runs") / f"arena-{name}"
    terminal.check_folder(folder, ["cost.json", "*/sweep.json"])
    if renew:
        due = to_renew(folder)
        arena = replace(arena, contenders=tuple(each for each in arena.contenders if each in due))
        if not arena.contenders:
            raise LocaterError(f"nothing to renew: {folder} holds none of these by another version of its method")
    with watching() as watch:
        run_arena(arena, folder, device=device, renew=renew, watch=watch)
    models = read_arena(folder, arena.contenders)
    tables = {which: summary(models, which) for which in (("default", "best") if arena.tuned else ("default",))}
    # those too that are there from other commands: the folder has one figure
    pictures = draw_arena(read_arena(folder, finished(folder)), arena.about, arena.config.unit, folder)
    if json_file is not None:
        value: dict[str, Any] = {"arena": name, "config": arena.config.to_json(), "folder": str(folder)}
        frames = {"models": models, **tables}
        terminal.write_json(json_file, value | {key: nulled(frame.to_dict("records")) for key, frame in frames.items()})
    if json_file != "-":
        bits = arena.config.unit == "bytes"
        for which, table in tables.items():
            title = "at the default strength" if which == "default" else "at the strength of the lowest area"
            terminal.out().print(terminal.table(_for_people(table, bits), title))
        for path in pictures:
            print(path)


def _list(json_file: str | None) -> None:
    from locater.lab.arena import ARENAS, CONTENDERS

    arenas = [{"arena": key, "is": one.about} for key, one in ARENAS.items()]
    contenders = [{"contender": key, "is": one.label, "strengths": _numbers(one)} for key, one in CONTENDERS.items()]
    if json_file is not None:
        terminal.write_json(json_file, {"arenas": arenas, "contenders": contenders})
    if json_file != "-":
        terminal.out().print(terminal.table(arenas, ""))
        terminal.out().print(terminal.table(contenders, ""))


def _given(text: str, kind: type[Number], option: str, what: str, least: float) -> tuple[Number, ...]:
    try:
        found = sorted({kind(word) for word in text.split(",") if word.strip()})
    except ValueError:
        found = []
    if not found or not all(least <= value < math.inf for value in found):
        raise LocaterError(f"{option} takes {what} with commas between them, got {text!r:.80}")
    return tuple(found)


def _numbers(contender: Any) -> str:
    return ", ".join(f"{strength:g}" for strength in contender.strengths) if any(contender.strengths) else ""


def _for_people(table: pd.DataFrame, bits: bool) -> list[dict[str, Any]]:
    per, unit = (math.log(2), "bits a byte") if bits else (1.0, "nats a word")
    rows = [
        {
            "": row["label"],
            "strength": row["strength"] or "",  # 0 is no protection's, which has none
            f"loss, {unit}": _cell(row["loss"] / per),
            "at rate": _cell(row["best_rate"]),
            "area": _cell(row["area"] / per),
            "trains to": _cell(row["trains_to"]),
            "holds to": _cell(row["holds_to"]),
            "max logit": _cell(row["max_logit"]),
            "lowest entropy": _cell(row["entropy"]),
            "rank residual": _cell(row["rank_residual"]),
            "ms a step": _cell(row["milliseconds"]),
            "× none": _cell(row["relative"]),
            "MB": _cell(row["bytes"] / 1e6),
            "at inference": row["at_inference"],
        }
        for row in table.to_dict("records")
    ]
    if table.bytes.isna().all():  # no GPU
        for row in rows:
            del row["MB"]
    return rows


def _cell(value: float) -> float | str:
    return "none" if math.isnan(value) else "∞" if math.isinf(value) else value
