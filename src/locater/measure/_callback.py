"""What the callbacks of both trainers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from locater.measure.alarms import Alarm, Alarms
from locater.measure.logs import AttentionLog


class LogCallback:
    """An `AttentionLog` that is open while a trainer runs."""

    def __init__(
        self,
        every: int = 50,
        file: str | Path | None = "attention.jsonl",
        tensorboard: str | Path | None = None,
        layers: Sequence[int] | None = None,
        alarms: Alarms | Callable[[Alarm], object] | None = None,
    ) -> None:
        self.every, self.file, self.tensorboard, self.layers = every, file, tensorboard, layers
        self._alarms = Alarms.of(alarms)
        self.attention_log: AttentionLog | None = None

    @property
    def alarms(self) -> list[Alarm]:
        """Those of the run so far, also when it is over."""
        return self._alarms.raised

    def open(self, model: Any) -> None:
        self.attention_log = AttentionLog(model, self.every, self.file, self.tensorboard, self.layers, self._alarms)

    def begin(self, step: int) -> None:
        if self.attention_log is not None:
            self.attention_log.begin(step)

    def end(self) -> None:
        if self.attention_log is not None:
            self.attention_log.end()

    def close(self) -> None:
        """Leaves the model as it was found, and ends the log."""
        if self.attention_log is not None:
            self.attention_log.close()
            self.attention_log = None
