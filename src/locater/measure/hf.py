"""Watching attention in a Hugging Face Trainer.

trainer = Trainer(model, args, train_dataset=data, callbacks=[ObserveCallback(every=50)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from locater.errors import require
from locater.measure.alarms import Alarm, Alarms
from locater.measure.logs import AttentionLog

require("transformers", "hf")

from transformers import TrainerCallback  # noqa: E402

__all__ = ["ObserveCallback"]


class ObserveCallback(TrainerCallback):
    """An `AttentionLog` of the Trainer's model, written by the first process.

    A line's step is how many updates the model had; with gradient accumulation all forwards of an update are
    averaged. A run that an exception ends leaves the model observed if the step was logged: `close` ends that.
    """

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

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control
        self.close()
        if state.is_world_process_zero:
            self.attention_log = AttentionLog(
                kwargs["model"], self.every, self.file, self.tensorboard, self.layers, self._alarms
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        if self.attention_log is not None:
            self.attention_log.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control, kwargs
        if self.attention_log is not None:
            self.attention_log.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control, kwargs
        self.close()

    def close(self) -> None:
        """Leaves the model as it was found, and ends the log."""
        if self.attention_log is not None:
            self.attention_log.close()
            self.attention_log = None
