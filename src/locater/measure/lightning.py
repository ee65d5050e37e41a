"""Watching attention in a Lightning Trainer.

trainer = lightning.Trainer(callbacks=[ObserveCallback(every=50)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from locater.errors import require
from locater.measure.alarms import Alarm, Alarms
from locater.measure.logs import AttentionLog

require("lightning", "lightning")

import lightning  # noqa: E402

__all__ = ["ObserveCallback"]


class ObserveCallback(lightning.Callback):
    """An `AttentionLog` of the LightningModule, or of the `model` in it that is given, written by the first process.

    A line's step is Lightning's global_step, how many updates there were; with gradient accumulation the first batch
    of an update is observed. Validation is not.
    """

    def __init__(
        self,
        every: int = 50,
        file: str | Path | None = "attention.jsonl",
        tensorboard: str | Path | None = None,
        layers: Sequence[int] | None = None,
        model: nn.Module | None = None,
        alarms: Alarms | Callable[[Alarm], object] | None = None,
    ) -> None:
        self.every, self.file, self.tensorboard, self.layers = every, file, tensorboard, layers
        self._alarms = Alarms.of(alarms)
        self.model = model
        self.attention_log: AttentionLog | None = None

    @property
    def alarms(self) -> list[Alarm]:
        """Those of the run so far, also when it is over."""
        return self._alarms.raised

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.close()
        if trainer.is_global_zero:
            model = pl_module if self.model is None else self.model
            self.attention_log = AttentionLog(model, self.every, self.file, self.tensorboard, self.layers, self._alarms)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        del pl_module, batch, batch_idx
        if self.attention_log is not None:
            self.attention_log.begin(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        del trainer, pl_module, outputs, batch, batch_idx
        if self.attention_log is not None:
            self.attention_log.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        del trainer, pl_module, exception
        self.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        del trainer, pl_module
        self.close()

    def close(self) -> None:
        """Leaves the model as it was found, and ends the log."""
        if self.attention_log is not None:
            self.attention_log.close()
            self.attention_log = None
