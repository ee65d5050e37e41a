"""The command `presets`: what can be trained."""

from __future__ import annotations

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption

__all__ = ["presets_command"]


def presets_command(json_file: JsonOption = None) -> None:
    """List what `train` and `sweep` know by name."""
    from locater.lab import PRESETS

    if json_file is not None:
        terminal.write_json(json_file, {name: {"about": p.about, **p.config.to_json()} for name, p in PRESETS.items()})
    if json_file != "-":
        terminal.out().print(terminal.table([{"preset": name, "is": p.about} for name, p in PRESETS.items()], ""))
