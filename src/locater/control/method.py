"""One protocol for all that acts on a model's attention: LocAteR and its rivals.

    applied = QKClip(threshold=100.0).apply(model, optimizer)
    ...                     # train as ever
    applied.remove()

A method is a few settings; `apply` puts it to work on a model and gives an `Applied`, which takes it off again. What
cannot be done is refused with one sentence, and the model is as it was.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import nn
from torch.optim import Optimizer

from locater.control._parameters import unwrapped
from locater.errors import LocaterError

__all__ = ["Applied", "Method", "applied"]


class Method(ABC):
    """A way to move where attention looks."""

    name: ClassVar[str]
    at_inference: str
    """What is left of the method in the forward pass of a trained model."""
    at_start: str
    """What applying it does to the output of a model that has been trained without it."""

    def apply(self, model: nn.Module, optimizer: Optimizer | None = None) -> Applied:
        """Puts the method to work; a method that fails leaves model and optimizer as they were.

        `optimizer` is the one that trains the query and key weights. Methods that add parameters take none, too: make
        the optimizer afterwards.
        """
        if not isinstance(model, nn.Module):
            raise LocaterError(f"{self.name} is applied to a torch module, got {type(model).__name__}")
        for other in applied(model):
            if other.name == self.name:
                raise LocaterError(f"{self.name} is applied to this model already; remove() that first")
            reason = self.contradicts(other) or other.contradicts(self)
            if reason is not None:
                raise LocaterError(f"{self.name} and {other.name} contradict each other: {reason}")
        with ExitStack() as undo:
            installed = self._install(model, None if optimizer is None else unwrapped(optimizer), undo)
            return Applied(self, undo.pop_all(), installed)

    def contradicts(self, other: Method) -> str | None:
        """Why the two cannot work together, if they cannot. Either of them may know."""
        del other
        return None

    @abstractmethod
    def _install(self, model: nn.Module, optimizer: Optimizer | None, undo: ExitStack) -> Installed:
        """Does the work; `undo` is told how to take back each step."""

    def _optimizer(self, optimizer: Optimizer | None) -> Optimizer:
        if optimizer is None:
            raise LocaterError(f"{self.name} acts in the optimizer's step: apply(model, optimizer) needs the optimizer")
        return optimizer


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass
class Installed:
    """What a method has done: the modules it acts on, the parameters it added, what it has to log and to remember."""

    modules: Sequence[nn.Module]
    parameters: Sequence[nn.Parameter] = ()
    measure: Callable[[], dict[str, float]] = field(default=dict)
    state: Stateful | None = None


class Applied:
    """A method at work on a model."""

    def __init__(self, method: Method, undo: ExitStack, installed: Installed) -> None:
        self.method = method
        self.at_inference, self.at_start = method.at_inference, method.at_start
        self.parameters = list(installed.parameters)
        """Parameters that the method added to the model."""
        self._undo, self._measure, self._state = undo, installed.measure, installed.state
        self._entry = _Entry(method)
        for module in installed.modules:
            _LEDGER.setdefault(module, []).append(self._entry)
        self._modules = weakref.WeakSet(installed.modules)

    def measure(self) -> dict[str, float]:
        """Numbers for a log, by the name of the module; may wait for the device."""
        return self._measure()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides the model's own state to go on; most methods need nothing."""
        return {} if self._state is None else self._state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._state is not None:
            self._state.load_state_dict(state)
        elif state:
            raise LocaterError(f"{self.method.name} has no state of its own, and was given one of {', '.join(state)}")

    def remove(self) -> None:
        """Takes the method off; what it has done to the weights so far stays."""
        if self._entry.removed:
            raise LocaterError(f"{self.method.name} is not applied any more: remove() has been called before")
        self._undo.close()
        self._entry.removed = True
        for module in self._modules:
            _LEDGER[module].remove(self._entry)

    def __repr__(self) -> str:
        return f"<{self.method.name} {'removed from' if self._entry.removed else 'on'} {len(self._modules)} modules>"


@dataclass(eq=False)
class _Entry:
    """Remembers a method at work; knows no module, so that modules can be forgotten."""

    method: Method
    removed: bool = False


_LEDGER: weakref.WeakKeyDictionary[nn.Module, list[_Entry]] = weakref.WeakKeyDictionary()


def applied(model: nn.Module) -> list[Method]:
    """The methods at work on a model or a part of it, in the order they came."""
    entries = dict.fromkeys(entry for module in model.modules() for entry in _LEDGER.get(module, ()))
    return [entry.method for entry in entries]
