"""Steps of a rule on weights, on a GPU: all modules of one shape in a few launches, and no wait for the device.

The weights are read once and written once (`_move_kernels`); what lies between is small matrices of every head. Where
those are few, they wait for launches: the whole step is recorded as a CUDA graph then, and replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from locater._triton import available
from locater.control import _move_kernels
from locater.control._groups import Group
from locater.control._parameters import is_sharded, projections
from locater.control.grams import Grams, Move
from locater.control.rules.decoupled import Decoupled
from locater.models import Attention, Projection
from locater.names import plain_name

Rate: TypeAlias = float | Tensor

_TOGETHER = 64 << 20  # bytes of the small matrices of modules that are worked on together
_RECORDED = 32 << 20  # and up to which a step is recorded: they stay allocated


class Now(NamedTuple):
    """What changes from one step to the next."""

    rates: tuple[Tensor, Tensor]
    factor: Tensor | float
    update: Tensor | int


@dataclass(frozen=True)
class Step:
    """What a step is made of, but for that."""

    rule: Decoupled
    strength: float
    trained: tuple[bool, bool]
    biases_trained: tuple[bool, bool]
    one_rate: bool  # of W_Q and W_K

    def of(self, grams: Grams, logit_scale: float, initial: Tensor, now: Now) -> Move:
        rates = (now.rates[0], now.rates[0]) if self.one_rate else now.rates
        given = logit_scale, initial, now.update, rates, self.strength, now.factor
        return self.rule.step(grams, *given, self.trained)


def stacked_initial(initial: Mapping[str, Tensor], members: Sequence[Attention]) -> Tensor:
    """The initial scales of modules (S, G, R, 2)."""
    return torch.stack([initial[plain_name(member.module)] for member in members])


@dataclass(eq=False)
class MovedGroup(Group):
    """Modules of one shape, and what is made ready for them on their device."""

    _ready: tuple[Any, list[_OnDevice] | None] | None = field(default=None, init=False)

    def on_device(self, step: Step, initial: Mapping[str, Tensor]) -> _All | None:
        """Steps of all members by kernels; None where those do not apply."""
        tensor = self.members[0].key.tensor
        if not available(tensor) or is_sharded(tensor):  # a shard has no address of its own
            return None
        key = step, id(initial), [x.data_ptr() for member in self.members for x in _stored(member)]
        if self._ready is None or self._ready[0] != key:
            self._ready = key, self._made(step, initial)
        return None if self._ready[1] is None else _All(self._ready[1])

    def _made(self, step: Step, initial: Mapping[str, Tensor]) -> list[_OnDevice] | None:
        first = self.members[0]
        parts = [one for member in self.members for one in projections(member)]
        if len(parts) < 2 * len(self.members) or not first.one_input:
            return None
        if any(one.computed for one in parts):
            return None
        pulls, shared = step.rule.pulls(first.rope, True), parts[0].shape[1] > 1
        if pulls and shared:  # what a pull does to a shared key depends on all query heads together
            return None
        groups, each, k, _ = parts[0].shape
        size = 4 * groups * (each + 1) * 3 * k * k
        count, made = max(1, _TOGETHER // size), []
        for members in (self.members[start : start + count] for start in range(0, len(self.members), count)):
            one = _OnDevice.of(
                members, step, stacked_initial(initial, members), recorded=size * len(members) < _RECORDED
            )
            if one is None:
                return None
            made.append(one)
        return made


@dataclass(frozen=True)
class _All:
    parts: list[_OnDevice]

    def __call__(self, rates: Sequence[Rate], factor: float, update: int) -> None:
        for part in self.parts:
            part(rates, factor, update)


@dataclass(eq=False)
class _OnDevice:
    members: Sequence[Attention]
    step: Step
    modules: _move_kernels.Modules
    initial: Tensor
    given: Tensor  # (4,): both rates, the factor, the number of the update
    recorded: bool
    _calls: int = 0
    _graph: torch.cuda.CUDAGraph | None = None

    @classmethod
    def of(cls, members: Sequence[Attention], step: Step, initial: Tensor, *, recorded: bool) -> _OnDevice | None:
        queries, keys = ([projections(member)[i] for member in members] for i in (0, 1))
        w_q, w_k = ([one.view(one.tensor.detach()) for one in parts] for parts in (queries, keys))
        norms = [norm for member in members if (norm := member.input_norm) is not None]
        modules = _move_kernels.Modules.of(w_q, w_k, norms)
        if modules is None:
            return None
        device = w_q[0].device
        given = torch.zeros(4, device=device)
        return cls(members, step, modules, initial.to(device, torch.float32), given, recorded and device.type == "cuda")

    def __call__(self, rates: Sequence[Rate], factor: float, update: int) -> None:
        values = [*rates, factor, float(update)]
        captured = self.given.is_cuda and torch.cuda.is_current_stream_capturing()  # by the user
        if not captured:
            on_host = torch.tensor([0.0 if isinstance(x, Tensor) else x for x in values], pin_memory=self.given.is_cuda)
            self.given.copy_(on_host, non_blocking=True)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                self.given[index].copy_(value)
            elif captured:  # nothing is copied from the host
                self.given[index].fill_(value)
        self._calls += 1
        if self._graph is not None and not captured:
            self._graph.replay()
        elif not self.recorded or self._calls < 2 or captured:
            self._run()  # kernels are compiled at the first
        else:
            self._record()

    def _record(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._run()
        self._graph.replay()

    def _run(self) -> None:
        rope, rule = self.members[0].rope, self.step.rule
        q, k, factor, update = self.given.view(4, 1, 1, 1)
        biases = [self._biases(i) for i in (0, 1)]
        stacked = [None if not one else torch.stack(one).float() for one in biases]
        grams = self.modules.grams((stacked[0], stacked[1]), rope, pulled=rule.pulls(rope, True))
        move = self.step.of(grams, self.members[0].scale, self.initial, Now((q, k), factor, update[..., None]))
        self.modules.move_(move, self.step.trained)
        for own, trained, factors in zip(biases, self.step.trained, move.factors or (), strict=False):
            if own and trained:
                by = factors.expand(len(own), *own[0].shape[:-1])[..., None]
                torch._foreach_copy_(own, list((torch.stack(own) * by).unbind(0)))

    def _biases(self, index: int) -> list[Tensor]:
        """Those that count, as `read_heads` counts them."""
        if self.step.trained[index] and not self.step.biases_trained[index]:
            return []
        parts: list[Projection] = [projections(member)[index] for member in self.members]
        return [one.bias_view(one.bias_tensor.detach()) for one in parts if one.bias_tensor is not None]


def _stored(member: Attention) -> list[Tensor]:
    """All tensors that a step reads."""
    found = [x for one in projections(member) for x in (one.tensor, one.bias_tensor)]
    norm = member.input_norm
    found += [] if norm is None else [norm.stored, norm.bias]
    return [x for x in found if x is not None]
