"""A log of attention from a Lightning Trainer.

trainer = lightning.Trainer(callbacks=[ObserveCallback(every=50)])
"""

from __future__ import annotations

from typing import Any

from torch import nn

from locater.errors import require
from locater.measure._callback import LogCallback
from locater.measure.trainers import ForLightning

require("lightning", "lightning")

import lightning  # noqa: E402

__all__ = ["ObserveCallback"]


class ObserveCallback(ForLightning, LogCallback, lightning.Callback):
    """An `AttentionLog`, whose arguments it takes, of the LightningModule, or of the `model` in it that is given,
    written by the first process.

    A line's step is Lightning's global_step, how many updates there were; with gradient accumulation the first batch
    of an update is observed. Validation is not.
    """

    def __init__(self, *log: Any, model: nn.Module | None = None, **options: Any) -> None:
        super().__init__(*log, **options)
        self.model = model

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.close()
        if trainer.is_global_zero:
            self.open(pl_module if self.model is None else self.model)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        del pl_module, batch, batch_idx
        self.begin(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        del trainer, pl_module, outputs, batch, batch_idx
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        del trainer, pl_module, exception
        self.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        del trainer, pl_module
        self.close()
