"""LocAteR in a Lightning Trainer.

    trainer = lightning.Trainer(callbacks=[LocAteRCallback(LocAteR(model, ...))])

Lightning runs backward inside the optimizer's step; the gradient is added at the point Lightning offers for this,
after backward and before clipping: here the penalty is clipped with the rest.
"""

from __future__ import annotations

from typing import Any

from locater.control.decoupled import DecoupledLocAteR
from locater.control.locater import LocAteR
from locater.errors import require
from locater.measure.trainers import ForLightning

require("lightning", "lightning")

import lightning  # noqa: E402

__all__ = ["LocAteRCallback"]


class LocAteRCallback(ForLightning, lightning.Callback):
    """Adds a LocAteR's gradient before every optimizer step, and logs what it does every `log_every_n_steps`.

    Each optimizer's step adds the gradient of the parameters that optimizer holds; a DecoupledLocAteR makes its own
    step after it. The state goes into checkpoints and comes back with them.
    """

    def __init__(self, regulariser: LocAteR | DecoupledLocAteR, *, per_module: bool = True) -> None:
        self.regulariser = regulariser
        self.per_module = per_module
        self._chosen: dict[int, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        del pl_module
        if isinstance(self.regulariser, DecoupledLocAteR):
            for optimizer in trainer.optimizers:
                self.regulariser.attach(optimizer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        del trainer, pl_module
        self.regulariser.detach()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if isinstance(self.regulariser, LocAteR):
            self._add_gradient(self.regulariser, trainer, optimizer)
        if trainer.global_step % trainer.log_every_n_steps == 0:
            values = self.regulariser.measure()
            chosen = {name: value for name, value in values.items() if self.per_module or "/" not in name}
            pl_module.log_dict({f"locater/{name}": value for name, value in chosen.items()})

    def _add_gradient(self, regulariser: LocAteR, trainer: Any, optimizer: Any) -> None:
        if id(optimizer) not in self._chosen:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            self._chosen[id(optimizer)] = lambda tensor: id(tensor) in held
        # the gradients of a fused optimizer are still scaled here: it divides inside its kernel
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
        multiplier = 1.0 if scaler is None or not scaled else float(scaler.get_scale())
        regulariser.add_gradient_to(self._chosen[id(optimizer)], multiplier)
        regulariser.step = trainer.global_step + 1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.regulariser.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.regulariser.load_state_dict(state_dict)
