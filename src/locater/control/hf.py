"""LocAteR in a Hugging Face Trainer.

trainer = Trainer(model, args, train_dataset=data, callbacks=[LocAteRCallback(LocAteR(model, ...))])
"""

from __future__ import annotations

from typing import Any

from locater.control.apply import check_is_regulariser
from locater.control.decoupled import DecoupledLocAteR
from locater.control.locater import LocAteR
from locater.errors import LocaterError, require
from locater.measure.trainers import ForHuggingFace

require("transformers", "hf")

from transformers import TrainerCallback  # noqa: E402

__all__ = ["LocAteRCallback"]


class LocAteRCallback(ForHuggingFace, TrainerCallback):
    """Attaches a LocAteR, or a DecoupledLocAteR, to the Trainer's optimizer while it trains, and logs what it does.

    Every log of the Trainer gains `locater/penalty` (the decoupled form has none), and with `per_module` also each
    attention module's `trace` and `scale`, averaged over its heads. A resumed run goes on at the Trainer's step.
    """

    def __init__(self, regulariser: LocAteR | DecoupledLocAteR, *, per_module: bool = True) -> None:
        check_is_regulariser(regulariser)
        self.regulariser = regulariser
        self.per_module = per_module

    def add_to(self, trainer: Any) -> LocAteRCallback:
        """Adds the callback in front of the Trainer's reporters."""
        if not hasattr(trainer, "callback_handler"):
            kind = type(trainer)
            raise LocaterError(f"add_to is for Hugging Face's Trainer, got {kind.__module__}.{kind.__name__}")
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs.get("optimizer")
        if optimizer is None:
            raise LocaterError("the Trainer has no optimizer of its own; attach LocAteR to yours with .attach")
        self.regulariser.step = state.global_step
        self.regulariser.attach(optimizer)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is None:
            return
        values = self.regulariser.measure()
        chosen = {name: value for name, value in values.items() if self.per_module or "/" not in name}
        named = {f"locater/{name}": value for name, value in chosen.items()}
        logs.update(named)
        state.log_history[-1].update(named)  # the Trainer has put a copy there already

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.regulariser.detach()
