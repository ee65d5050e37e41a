"""Host one: a method at work on a model and its optimizer. LocAteR and its rivals share all of this.

    applied = QKClip(threshold=100.0).apply(model, optimizer)
    ...                     # train as ever
    applied.remove()

A method is a few settings; `apply` puts it to work on a model and gives an `Applied`, which takes it off again. A
`Regulariser`, as LocAteR is, belongs to a model already, and is put to work by `attach(optimizer)`. What cannot be done
is refused with one sentence, and the model is as it was.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import nn
from torch.optim import Optimizer

from locater.control._groups import Groups
from locater.control._parameters import (
    HeldBy,
    attentions_with_weights,
    held_by,
    projections,
    refuse_frozen,
    unwrapped,
)
from locater.control._steps import Clock, Schedule
from locater.errors import LocaterError
from locater.hooks import make_hooks_noticed
from locater.models import Attention
from locater.names import plain_name
from locater.qk import QK

__all__ = ["Applied", "Installed", "LocAteRForm", "Method", "Regulariser", "applied", "check_is_regulariser"]


class Method(ABC):
    """A way to move where attention looks."""

    name: ClassVar[str]
    at_inference: str
    """What is left of the method in the forward pass of a trained model."""
    at_start: str
    """What applying it does to the output of a model that has been trained without it."""

    def apply(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> Applied:
        """Puts the method to work; a method that fails leaves model and optimizer as they were.

        `optimizer` is the one that trains the query and key weights, or a list of all that train the model, as Muon and
        AdamW do together. Methods that add parameters take none, too: make the optimizer afterwards.
        """
        if not isinstance(model, nn.Module):
            raise LocaterError(f"{self.name} is applied to a torch module, got {type(model).__name__}")
        if isinstance(optimizer, Sequence):
            optimizer = self._chosen(model, [unwrapped(one) for one in optimizer])
        optimizer = None if optimizer is None else unwrapped(optimizer)
        for entry in _entries(model):
            self._refuse_repeat(entry, optimizer)
            reason = self.contradicts(entry.method) or entry.method.contradicts(self)
            if reason is not None:
                raise LocaterError(f"{self.name} and {entry.method.name} contradict each other: {reason}")
        make_hooks_noticed()
        with ExitStack() as undo:
            installed = self._install(model, optimizer, undo)
            return Applied(self, optimizer, undo.pop_all(), installed)

    def _chosen(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Optimizer:
        """Of several optimizers, the one that the method works with."""
        tensors = [
            t for each in attentions_with_weights(model, self.name) for one in projections(each) for t in one.tensors
        ]
        found = [one for one in optimizers if any(id(t) in held_by(one) for t in tensors if t.requires_grad)]
        if len(found) != 1:
            raise LocaterError(
                f"{len(found)} of the optimizers hold query and key weights; {self.name} takes one that holds them all"
            )
        return found[0]

    def contradicts(self, other: Method) -> str | None:
        """Why the two cannot work together, if they cannot. Either of them may know."""
        del other
        return None

    def _refuse_repeat(self, entry: _Entry, optimizer: Optimizer | None) -> None:
        del optimizer
        if entry.method.name == self.name:
            raise LocaterError(f"{self.name} is applied to this model already; remove() that first")

    @abstractmethod
    def _install(self, model: nn.Module, optimizer: Optimizer | None, undo: ExitStack) -> Installed:
        """Does the work; `undo` is given what takes back each step."""

    def _optimizer(self, optimizer: Optimizer | None) -> Optimizer:
        if optimizer is None:
            raise LocaterError(f"{self.name} acts in the optimizer's step: apply(model, optimizer) needs the optimizer")
        return optimizer


@dataclass
class Installed:
    """What a method has done: the modules it acts on, the parameters it added, what it has to log and to remember."""

    modules: Sequence[nn.Module]
    parameters: Sequence[nn.Parameter] = ()
    measure: Callable[[], dict[str, float]] = field(default=dict)
    state: Regulariser | None = None


class Applied:
    """A method at work on a model."""

    def __init__(self, method: Method, optimizer: Optimizer | None, undo: ExitStack, installed: Installed) -> None:
        self.method = method
        self.at_inference, self.at_start = method.at_inference, method.at_start
        self.parameters = list(installed.parameters)
        """Parameters that the method added to the model."""
        self._undo, self._measure, self._state = undo, installed.measure, installed.state
        self._entry = _Entry(method, None if optimizer is None else weakref.ref(optimizer))
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
    """Remembers a method at work; holds no module and no optimizer, so that they can be forgotten."""

    method: Method
    optimizer: Callable[[], Optimizer | None] | None
    removed: bool = False

    def is_over(self) -> bool:
        """Whether it acted in the steps of an optimizer only, and that is no more."""
        return isinstance(self.method, _Attachment) and self.optimizer is not None and self.optimizer() is None


_LEDGER: weakref.WeakKeyDictionary[nn.Module, list[_Entry]] = weakref.WeakKeyDictionary()


def _entries(model: nn.Module) -> list[_Entry]:
    found = dict.fromkeys(entry for module in model.modules() for entry in _LEDGER.get(module, ()))
    return [entry for entry in found if not entry.is_over()]


def applied(model: nn.Module) -> list[Method]:
    """The methods at work on a model or a part of it, in the order they came."""
    return list(dict.fromkeys(entry.method for entry in _entries(model)))


# ---------------------------------------------------------------------- what belongs to a model, and is attached


class Regulariser(ABC):
    """Acts on the query and key weights of one model, in the steps of the optimizers that it is attached to.

    Its strength may follow a schedule: a function of the number of optimizer steps taken.
    """

    _groups: Groups[Any]

    def __init__(self, model: nn.Module, schedule: Schedule | None) -> None:
        self._clock = Clock(schedule)
        self._model = model
        self.attentions: list[Attention] = attentions_with_weights(model, type(self).__name__)
        self._tensors = [tensor for each in self.attentions for one in projections(each) for tensor in one.tensors]
        self._attached: dict[int, Applied] = {}

    @property
    def step(self) -> int:
        """Optimizer steps taken, which a schedule is given."""
        return self._clock.step

    @step.setter
    def step(self, step: int) -> None:
        self._clock.step = step

    @property
    def schedule(self) -> Schedule | None:
        return self._clock.schedule

    def attach(self, optimizer: Optimizer | Sequence[Optimizer]) -> Self:
        """Acts in every step of `optimizer`, on the parameters it holds; a step that GradScaler skips is skipped.

        Several optimizers that train the model together, as Muon and AdamW do, are given as a list: those that hold
        query or key weights are attached to. Attached twice to one, it acts once.
        """
        if isinstance(optimizer, Sequence):
            for one in self._training(optimizer):
                self.attach(one)
            return self
        optimizer = unwrapped(optimizer)
        HeldBy(optimizer, self._tensors)  # refuses one of other weights
        if (before := self._attached.pop(id(optimizer), None)) is not None:
            before.remove()
        self._attached[id(optimizer)] = _Attachment(self).apply(self._model, optimizer)
        return self

    def _training(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Those of the optimizers that train query and key weights: together all that are trained, each by one."""
        refuse_frozen(self._tensors)
        holders = {id(one): held_by(one) for one in map(unwrapped, optimizers)}
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for tensor in self._tensors:
            count = sum(id(tensor) in held for held in holders.values())
            if tensor.requires_grad and count != 1:
                which = "none" if count == 0 else f"{count}"
                raise LocaterError(
                    f"{names.get(id(tensor), 'a query or key weight')} is held by {which} of the optimizers"
                )
        wanted = {id(tensor) for tensor in self._tensors if tensor.requires_grad}
        return [one for one in optimizers if wanted & holders[id(unwrapped(one))]]

    def detach(self) -> None:
        """Undoes every `attach`."""
        for attached in self._attached.values():
            attached.remove()
        self._attached.clear()
        self._groups.forget()

    @abstractmethod
    def _hook(self, optimizer: Optimizer, held: HeldBy, undo: ExitStack) -> None:
        """Makes the optimizer's steps do the work."""

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """Numbers for a log, by the name of the module."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on (a schedule is yours to give again)."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def traces(module: str, qk: QK) -> dict[str, float]:
    """Trace, where there is one, and scale averaged over the heads of a module: for logs."""
    values = {"trace": qk.trace()} if qk.square else {}
    return {
        f"{plain_name(module)}/{name}": float(value.mean()) for name, value in (values | {"scale": qk.scale()}).items()
    }


def check_is_regulariser(given: Any) -> None:
    """For the callbacks of trainers."""
    if not isinstance(given, Regulariser):
        kind = type(given).__name__
        raise LocaterError(f"LocAteRCallback takes a LocAteR(model, …) or a DecoupledLocAteR(model), got {kind}")


class LocAteRForm(Method):
    """A form of LocAteR as a method. One form at a time, whichever it is."""

    name = "LocAteR"
    at_inference = "Nothing: it acts in training only."
    at_start = "The output is unchanged, bitwise."

    @abstractmethod
    def _regulariser(self, model: nn.Module) -> Regulariser: ...

    def _install(self, model: nn.Module, optimizer: Optimizer | None, undo: ExitStack) -> Installed:
        optimizer = self._optimizer(optimizer)
        regulariser = self._regulariser(model)
        held = HeldBy(optimizer, regulariser._tensors)
        regulariser._clock.join(optimizer)
        regulariser._hook(optimizer, held, undo)
        modules = [model.get_submodule(attention.module) for attention in regulariser.attentions]
        return Installed(modules, measure=regulariser.measure, state=regulariser)


class _Attachment(LocAteRForm):
    """A regulariser that `attach` puts to work: on several optimizers, but not beside one of its kind on the same."""

    def __init__(self, regulariser: Regulariser) -> None:
        # the optimizer's hook holds it: what remembers this must not hold the model
        self._bound = weakref.ref(regulariser)

    def _regulariser(self, model: nn.Module) -> Regulariser:
        del model
        regulariser = self._bound()
        assert regulariser is not None
        return regulariser

    def _refuse_repeat(self, entry: _Entry, optimizer: Optimizer | None) -> None:
        other = entry.method
        if not isinstance(other, _Attachment):
            super()._refuse_repeat(entry, optimizer)
            return
        if entry.optimizer is None or entry.optimizer() is not optimizer:
            return
        mine, theirs = self._bound(), other._bound()
        if mine is not theirs and type(mine) is type(theirs):
            kind = type(mine).__name__
            raise LocaterError(f"another {kind} is attached to this optimizer already; detach() that first")
