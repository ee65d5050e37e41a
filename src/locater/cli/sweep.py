"""The command `sweep`: a model for every κ₂ and seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from locater.cli import _terminal as terminal
from locater.cli import _training as training
from locater.cli._terminal import JsonOption
from locater.errors import LocaterError

if TYPE_CHECKING:
    from locater.lab import Config, Member

__all__ = ["sweep_command"]


def sweep_command(
    preset: training.PresetArgument,
    out: training.FolderOption = None,
    data: training.DataOption = None,
    kappa_2: Annotated[
        str | None, typer.Option("--kappa-2", help="κ₂ as in the paper, and none, with commas between.")
    ] = None,
    kappa_1: training.Kappa1Option = 100.0,
    seeds: Annotated[str | None, typer.Option(help="Seeds, with commas between; the preset's if not given.")] = None,
    readings: Annotated[
        str, typer.Option("--readings", help="Of the paper's objective: figures, trace-mean, scale-sum, printed.")
    ] = "figures",
    learning_rate: training.RateOption = None,
    decay: training.DecayOption = 0.01,
    steps: training.StepsOption = None,
    precision: training.PrecisionOption = None,
    device: training.DeviceOption = None,
    settings: training.SetOption = None,
    group_size: Annotated[int, typer.Option(help="How many members to train stacked.")] = 24,
    engine: Annotated[str, typer.Option(help="local, or ray.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster, as ray://HOST:10001 or HOST:6379.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Train a model for every κ₂ (or condition, in a preset of these) and seed; go on with what the folder holds."""
    from locater.lab import sweep

    chosen, config = training.configured(preset, data, steps, precision, settings)
    numbers = list(chosen.seeds) if seeds is None else [_whole("--seeds", word) for word in _words("--seeds", seeds)]
    rest = {"learning_rate": chosen.learning_rate if learning_rate is None else learning_rate, "decay": decay}
    about: dict[str, Any] = {"preset": preset}
    if chosen.design is None:
        kappas = chosen.kappas if kappa_2 is None else [training.kappa(each) for each in _words("--kappa-2", kappa_2)]
        members = _by_strength(config, kappas, numbers, _words("--readings", readings), kappa_1=kappa_1, **rest)
    elif kappa_2 is not None or readings != "figures":
        raise LocaterError(f"{preset} has conditions of its own: leave --kappa-2 and --readings out")
    else:
        members = chosen.design.members(config, numbers, kappa_1=kappa_1, **rest)
        about |= {"comparisons": chosen.design.to_json(), "planned_seeds": list(chosen.seeds)}
    folder = out or Path("runs") / preset
    terminal.check_folder(folder, ["sweep.json", "run.json"])
    with training.watching() as watch:
        sweep(
            config,
            members,
            folder,
            group_size=group_size,
            engine=engine,
            address=address,
            device=device,
            watch=watch,
            about=about,
        )
    training.show_results(folder, json_file)


def _by_strength(
    config: Config, kappas: Sequence[float | None], seeds: list[int], readings: list[str], **rest: float
) -> list[Member]:
    from locater.lab import members_for

    members: list[Member] = []
    for i, reading in enumerate(readings):
        # a model without LocAteR is the same under every reading
        wanted = [kappa for kappa in kappas if kappa is not None or i == 0]
        members += members_for(config, wanted, seeds=seeds, reading=reading, **rest)
    return members


def _words(option: str, value: str) -> list[str]:
    words = [word.strip() for word in value.split(",") if word.strip()]
    if not words:
        raise LocaterError(f"{option} needs at least one value, got {value!r}")
    if len(set(words)) < len(words):
        raise LocaterError(f"{option} names a value twice: {value!r}")
    return words


def _whole(option: str, word: str) -> int:
    try:
        return int(word)
    except ValueError as error:
        raise LocaterError(f"{option} takes whole numbers, got {word!r}") from error
