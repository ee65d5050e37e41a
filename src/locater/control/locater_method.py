"""LocAteR by the protocol that its rivals have."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack

from torch import nn
from torch.optim import Optimizer

from locater.control._clock import Schedule
from locater.control._numbers import checked_number, checked_strength
from locater.control.decoupled import DecoupledLocAteR
from locater.control.locater import LocAteR
from locater.control.method import Installed, Method

__all__ = ["DecoupledLocAteRMethod", "LocAteRMethod"]


class _Attached(Method):
    """A form of LocAteR, attached to the optimizer; `remove()` detaches it. One form at a time, whichever it is."""

    name = "LocAteR"
    at_inference = "Nothing: it acts in training only."
    at_start = "The output is unchanged, bitwise."

    @abstractmethod
    def _regulariser(self, model: nn.Module) -> LocAteR | DecoupledLocAteR: ...

    def _install(self, model: nn.Module, optimizer: Optimizer | None, undo: ExitStack) -> Installed:
        regulariser = self._regulariser(model)
        undo.callback(regulariser.detach)
        regulariser.attach(self._optimizer(optimizer))
        modules = [model.get_submodule(attention.module) for attention in regulariser.attentions]
        return Installed(modules, measure=regulariser.measure, state=regulariser)


class LocAteRMethod(_Attached):
    """`LocAteR(model, …).attach(optimizer)`, with the same settings."""

    def __init__(
        self, *, scale_strength: float, mean_strength: float, target: float = 1.0, schedule: Schedule | None = None
    ) -> None:
        self.scale_strength = checked_strength("scale_strength", scale_strength)
        self.mean_strength = checked_strength("mean_strength", mean_strength)
        self.target = checked_number("target", target)
        self.schedule = schedule

    def _regulariser(self, model: nn.Module) -> LocAteR:
        return LocAteR(
            model,
            scale_strength=self.scale_strength,
            mean_strength=self.mean_strength,
            target=self.target,
            schedule=self.schedule,
        )


class DecoupledLocAteRMethod(_Attached):
    """`DecoupledLocAteR(model, …).attach(optimizer)`, with the same settings."""

    def __init__(
        self,
        *,
        strength: float = 3.0,
        target: float | None = None,
        growing_only: bool = True,
        schedule: Schedule | None = None,
    ) -> None:
        self.strength = checked_strength("strength", strength)
        self.target = None if target is None else checked_number("target", target)
        self.growing_only = growing_only
        self.schedule = schedule

    def _regulariser(self, model: nn.Module) -> DecoupledLocAteR:
        return DecoupledLocAteR(
            model,
            strength=self.strength,
            target=self.target,
            growing_only=self.growing_only,
            schedule=self.schedule,
        )
