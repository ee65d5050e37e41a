"""The command `sweep`: a model for every κ₂ and seed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from locater.cli import _training as training
from locater.cli._terminal import JsonOption
from locater.errors import LocaterError

__all__ = ["sweep_command"]


def sweep_command(
    preset: training.PresetArgument,
    out: training.FolderOption = None,
    data: training.DataOption = None,
    kappa_2: Annotated[
        str | None, typer.Option("--kappa-2", help="κ₂ as in the paper, and none, with commas between.")
    ] = None,
    kappa_1: training.Kappa1Option = 100.0,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = "0",
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
    """Train a model for every κ₂ and seed, stacked; go on with what the folder holds."""
    from locater.lab import members_for, sweep

    chosen, config = training.configured(preset, data, steps, precision, settings)
    kappas = chosen.kappas if kappa_2 is None else tuple(training.kappa(word) for word in _words("--kappa-2", kappa_2))
    numbers = [_whole("--seeds", word) for word in _words("--seeds", seeds)]
    members = []
    for i, reading in enumerate(_words("--readings", readings)):
        # a model without LocAteR is the same under every reading
        wanted = [kappa for kappa in kappas if kappa is not None or i == 0]
        members += members_for(
            config,
            wanted,
            seeds=numbers,
            learning_rate=chosen.learning_rate if learning_rate is None else learning_rate,
            decay=decay,
            kappa_1=kappa_1,
            reading=reading,
        )
    folder = out or Path("runs") / preset
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
            about={"preset": preset},
        )
    training.show_results(folder, json_file)


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
