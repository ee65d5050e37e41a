"""The command `train`: one language model of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from locater.cli import _terminal as terminal
from locater.cli import _training as training
from locater.cli._terminal import JsonOption, SeedOption

__all__ = ["train_command"]


def train_command(
    preset: training.PresetArgument,
    out: training.FolderOption = None,
    data: training.DataOption = None,
    kappa_2: Annotated[str, typer.Option("--kappa-2", help="LocAteR's κ₂ as in the paper, or none.")] = "none",
    kappa_1: training.Kappa1Option = 100.0,
    learning_rate: training.RateOption = None,
    decay: training.DecayOption = 0.01,
    seed: SeedOption = 0,
    steps: training.StepsOption = None,
    precision: training.PrecisionOption = None,
    device: training.DeviceOption = None,
    settings: training.SetOption = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard's files too.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Train one language model of the paper, with or without LocAteR; go on if the folder holds its checkpoints."""
    from locater.lab import members_for, train

    chosen, config = training.configured(preset, data, steps, precision, settings)
    (member,) = members_for(
        config,
        [training.kappa(kappa_2)],
        seeds=[seed],
        learning_rate=chosen.learning_rate if learning_rate is None else learning_rate,
        decay=decay,
        kappa_1=kappa_1,
    )
    folder = out or Path("runs") / f"{preset}-{member.name}"
    terminal.check_folder(folder, ["run.json", "sweep.json"])
    with training.watching() as watch:
        train(
            config,
            [member],
            folder,
            device=device,
            tensorboard=tensorboard,
            watch=lambda progress: watch(preset, progress),
            about={"preset": preset},
        )
    training.show_results(folder, json_file)
