"""LocAteR in a Lightning Trainer.

    trainer = lightning.Trainer(callbacks=[LocAteRCallback(LocAteR(model, ...))])

Lightning runs backward inside the optimizer's step; the gradient is added at the point Lightning offers for this,
after backward and before clipping: here the penalty is clipped with the rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch.optim import Optimizer

from locater.control._parameters import HeldBy, held_by, unwrapped
from locater.control._steps import around_step
from locater.control.apply import check_is_regulariser
from locater.control.decoupled import DecoupledLocAteR
from locater.control.locater import LocAteR
from locater.errors import LocaterError, require
from locater.measure.trainers import ForLightning
from locater.names import plain_name

require("lightning", "lightning")

import lightning  # noqa: E402

__all__ = ["LocAteRCallback"]


class LocAteRCallback(ForLightning, lightning.Callback):
    """Adds a LocAteR's gradient before every optimizer step, and logs what it does every `log_every_n_steps`.

    Each optimizer's step adds the gradient of the parameters that optimizer holds; a DecoupledLocAteR makes its own
    step after it. Weights that are unfrozen later are held from then on. The state goes into checkpoints and comes back
    with them. Of several callbacks each logs under the name that its model has in the LightningModule.
    """

    def __init__(self, regulariser: LocAteR | DecoupledLocAteR, *, per_module: bool = True) -> None:
        check_is_regulariser(regulariser)
        self.regulariser = regulariser
        self.per_module = per_module
        self._held: dict[int, HeldBy] = {}
        self._undo = ExitStack()
        self._place = str(id(self))  # the model's name in the module, which a Trainer that is made does not have yet
        self._prefix = "locater/"

    @property
    def state_key(self) -> str:
        return str(self._generate_state_key(form=type(self.regulariser).__name__, model=self._place))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        del stage
        mine, model = self.regulariser, self.regulariser._model
        others = [one for one in trainer.callbacks if isinstance(one, LocAteRCallback) and one is not self]
        if any(type(one.regulariser) is type(mine) and one.regulariser._model is model for one in others):
            raise LocaterError(f"another LocAteRCallback holds a {type(mine).__name__} of this model already")
        names = (plain_name(name) for name, module in pl_module.named_modules() if module is model)
        self._place = next(names, self._place)
        self._prefix = f"locater/{self._place}/" if others and self._place else "locater/"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        del pl_module
        self._leave()
        self._join(trainer.optimizers)
        if not self._held:
            kind = type(self.regulariser).__name__
            warnings.warn(f"all query and key weights are frozen: {kind} waits until one is trained", stacklevel=2)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        del trainer, pl_module
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        del trainer, pl_module, exception
        self._leave()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        del batch
        self._join(trainer.optimizers)
        # in the first batch of an update; Lightning's own callbacks, too, ask in this way whether it is written
        if trainer._logger_connector.should_update_logs and batch_idx % trainer.accumulate_grad_batches == 0:
            values = self.regulariser.measure()
            chosen = {name: value for name, value in values.items() if self.per_module or "/" not in name}
            pl_module.log_dict({f"{self._prefix}{name}": value for name, value in chosen.items()})

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        del pl_module
        held = self._held.get(id(unwrapped(optimizer)))
        if held is not None and isinstance(self.regulariser, LocAteR):
            # the gradients of a fused optimizer are still scaled here: it divides inside its kernel
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
            self.regulariser.add_gradient_to(held, float(scaler.get_scale()) if scaler is not None and scaled else 1.0)

    def _join(self, optimizers: Sequence[Optimizer]) -> None:
        """Acts in the steps of all that train query and key weights by now."""
        mine, optimizers = self.regulariser, [unwrapped(one) for one in optimizers]
        trained = {id(tensor) for tensor in mine._tensors if tensor.requires_grad}
        others = [one for one in optimizers if id(one) not in self._held]
        if not trained or (self._held and not any(trained & held_by(one) for one in others)):
            return
        for one in optimizers if len(optimizers) == 1 else mine._training(optimizers):
            if id(one) in self._held:
                continue
            self._held[id(one)] = HeldBy(one, mine._tensors)  # refuses one of other weights
            if isinstance(mine, DecoupledLocAteR):
                mine.attach(one)
            else:
                mine._clock.join(one)
                around_step(one, self._undo, after=partial(mine._clock.tick, one))

    def _leave(self) -> None:
        self._undo.close()
        self._held.clear()
        self.regulariser.detach()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.regulariser.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.regulariser.load_state_dict(state_dict)
