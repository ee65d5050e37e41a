"""A log of attention from a Hugging Face Trainer.

trainer = Trainer(model, args, train_dataset=data, callbacks=[ObserveCallback(every=50)])
"""

from __future__ import annotations

from typing import Any

from locater.errors import require
from locater.measure._callback import LogCallback
from locater.measure.trainers import ForHuggingFace

require("transformers", "hf")

from transformers import TrainerCallback  # noqa: E402

__all__ = ["ObserveCallback"]


class ObserveCallback(ForHuggingFace, LogCallback, TrainerCallback):
    """An `AttentionLog` of the Trainer's model, written by the first process.

    A line's step is how many updates the model had; with gradient accumulation all forwards of an update are
    averaged. A run that an exception ends leaves the model observed if the step was logged: `close` ends that.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control
        self.close()
        if state.is_world_process_zero:
            self.open(kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        self.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control, kwargs
        self.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control, kwargs
        self.close()
