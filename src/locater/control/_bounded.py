"""A step of the optimizer, as `rules.decoupled` bounds it: weights kept before it, compared after it, written back.

Modules that differ in nothing but numbers are worked on together. Small ones on a GPU wait for launches: what is done
to them is recorded as CUDA graphs, and replayed.

Legend: S modules, G key heads, R query heads for each, B sequences of a sample, n tokens of each, K head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from locater.control._kernels import supported
from locater.control._parameters import HeldBy, is_sharded, projections, sharded
from locater.control._sampled import logits_of
from locater.control._step_kernels import moments
from locater.control._weights import Copies, Weights, mixed_, product_type
from locater.control.rules.decoupled import Decoupled, Factors, initial_spread, logit_moments
from locater.models import Attention, Projection
from locater.names import plain_name

__all__ = ["Bounded", "Modules", "OneModule"]

_SMALL = 256 << 20  # bytes of W_Q and W_K of a group up to which they are stacked, and their steps recorded


class Bounded(ABC):
    """Attention modules of one shape in a step of their optimizer: `begin` before it, `measure` and `end` after it."""

    names: list[str]
    initial: Tensor  # the spread of every head before the first step (S, G, R); −1 where there was none yet

    @abstractmethod
    def begin(self, states: Sequence[Tensor]) -> None:
        """`states` (B, n, D) of each module."""

    @abstractmethod
    def measure(self) -> Tensor:
        """`logit_moments` of every head (S, G, R, 3)."""

    @abstractmethod
    def end(self, rule: Decoupled, factor: float, overflow: Tensor | None, every: int) -> None:
        """Writes what the rule makes of the step by the moments that `measure` gave; nothing where GradScaler skipped
        it."""


def _factors(
    rule: Decoupled, moments: Tensor, initial: Tensor, factor: Tensor | float, every: int, acts: tuple[bool, bool]
) -> Factors:
    """Sets the initial spreads that are not known."""
    initial.copy_(initial_spread(moments, initial))
    return rule.factors(moments, initial, factor, every=every, shared_keys=moments.shape[-2] > 1, acts=acts)


def _unless(overflow: Tensor | float, found: Factors) -> Factors:
    if isinstance(overflow, Tensor):
        return Factors(*(torch.where(overflow.to(x.device) > 0, 1.0, x) for x in found))
    return found


# ---------------------------------------------------------------------- together


class Modules(Bounded):
    """Those that differ in nothing but numbers."""

    def __init__(self, members: Sequence[Attention], trained: Sequence[bool], initial: Tensor) -> None:
        self.names, self.initial = [plain_name(member.module) for member in members], initial
        self._first, self._trained = members[0], trained  # of W_Q, W_K, and their biases
        parts = [[projections(member)[index] for member in members] for index in (0, 1)]
        views = [[one.view(one.tensor.detach()) for one in both] for both in parts]
        small = len(members) > 1 and sum(x.numel() * x.itemsize for both in views for x in both) <= _SMALL
        self._norms = [[one.query_norm for one in members], [one.key_norm for one in members]]
        self._kernels = supported(views[0], views[1], None, None)
        self._weights = [Weights(part, kernels=self._kernels, stacked=small) for part in parts]
        self._dtype = product_type(views[0][0])
        self._recorded = small and views[0][0].is_cuda
        self._begin, self._measure = _Recorded(self._copy), _Recorded(self._compare)
        self._write: dict[Any, _Recorded] = {}  # by rule and `every`
        self._states: Tensor | None = None
        self._old: list[Copies] = []
        self._before: list[Tensor] = []  # q and k of the sample
        self._moments: Tensor = initial.new_empty(0)
        self._given = initial.new_tensor([1.0, 0.0])  # the schedule's factor, and whether the step was skipped
        self._given_factor, self._given_overflow = 1.0, False
        self._rotation: tuple[Tensor, Tensor] | None = None

    def begin(self, states: Sequence[Tensor]) -> None:
        if self._states is None:
            self._states = torch.stack([x.to(self._dtype) for x in states])
        else:
            torch._foreach_copy_(list(self._states.unbind(0)), list(states))
        self._begin(self._recorded)

    def measure(self) -> Tensor:
        self._measure(self._recorded)
        return self._moments

    def end(self, rule: Decoupled, factor: float, overflow: Tensor | None, every: int) -> None:
        if not self._given.is_cuda:
            found = _unless(0.0 if overflow is None else overflow, self._rule(rule, factor, every))
            if any(bool((x != 1).any()) for x in found):
                self._mix(found)
            self._forget()
            return
        self._give(factor, overflow)
        key = rule, every
        if key not in self._write:

            def write() -> None:
                self._mix(_unless(self._given[1], self._rule(rule, self._given[0], every)))

            self._write[key] = _Recorded(write)
        self._write[key](self._recorded)
        self._forget()

    def _give(self, factor: float, overflow: Tensor | None) -> None:
        """To the device, what is not there yet."""
        if factor != self._given_factor:
            self._given[:1].copy_(torch.tensor([factor], pin_memory=True), non_blocking=True)
        if overflow is not None:
            self._given[1].copy_(overflow.reshape(()))
        elif self._given_overflow:
            self._given[1].zero_()
        self._given_factor, self._given_overflow = factor, overflow is not None

    def _forget(self) -> None:
        """Copies are held until the next step only where graphs write to them."""
        if not self._recorded:
            self._old, self._before, self._states = [], [], None

    def _rule(self, rule: Decoupled, factor: Tensor | float, every: int) -> Factors:
        # a norm takes out what its input is multiplied by
        acts = [trained and norms[0] is None for trained, norms in zip(self._trained, self._norms, strict=False)]
        return _factors(rule, self._moments, self.initial, factor, every, (acts[0], acts[1]))

    def _copy(self) -> None:
        assert self._states is not None
        both = [one.copy_and_project(self._states) for one in self._weights]
        self._old, self._before = [old for old, _ in both], self._normalised([rows for _, rows in both])

    def _compare(self) -> None:
        assert self._states is not None
        after = self._normalised([one.project(self._states) for one in self._weights])
        rope = self._first.rope
        if rope is not None and self._rotation is None:
            self._rotation = rope.angles(torch.arange(after[0].shape[-2], device=after[0].device), after[0].dtype)
        if self._kernels:
            interleaved = rope is not None and rope.interleaved
            self._moments = moments(self._before, after, self._first.scale, self._rotation, interleaved)
        else:
            self._moments = logit_moments(self._logits(*self._before), self._logits(*after))

    def _normalised(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Queries and keys (S, G, R, B, n, K), with the gains of now."""
        made = []
        for x, norms in zip(rows, self._norms, strict=True):
            if (norm := norms[0]) is not None:
                gains = [one.stored for one in norms if one is not None and one.stored is not None]
                stacked = torch.stack(gains)[:, None, None, None, None].to(x.dtype) if gains else None
                x = replace(norm, stored=stacked)(x)
            made.append(x)
        return made

    def _logits(self, q: Tensor, k: Tensor) -> Tensor:
        """(S, G, R, B, n, n)."""
        if self._rotation is not None:
            assert self._first.rope is not None
            q, k = (self._first.rope.rotate_by(x, *self._rotation) for x in (q, k))
        return self._first.scale * (q @ k.mT)

    def _mix(self, found: Factors) -> None:
        """W ← f · (old + keep · (W − old))."""
        for index, f in enumerate((found.query, found.key)):
            if self._trained[index]:
                new, was = f * found.keep, f * (1 - found.keep)
                self._weights[index].mix_(self._old[index], new, was, self._trained[2 + index])


class _Recorded:
    """A function that is called anew and anew on the same tensors: as a CUDA graph, from the third call on."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function, self._calls = function, 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, recorded: bool) -> None:
        self._calls += 1
        if not recorded or self._calls < 3 or torch.cuda.is_current_stream_capturing():
            self._function()
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._function()
        self._graph.replay()


# ---------------------------------------------------------------------- one by one


class OneModule(Bounded):
    """Any module: sharded, with norms of its own, adapted by LoRA."""

    def __init__(self, attention: Attention, trained: Sequence[bool], initial: Tensor, held: HeldBy) -> None:
        self.names, self.initial = [plain_name(attention.module)], initial
        self._attention, self._trained = attention, trained
        self._parts: list[_Part] = []
        for index, one in enumerate(projections(attention)):
            if trained[index]:
                self._parts += _parts_of(one, index, held)

    def begin(self, states: Sequence[Tensor]) -> None:
        self._states = states[0]
        self._old = [part.tensor.detach().clone() for part in self._parts]
        self._before = logits_of(self._attention, self._states)

    def measure(self) -> Tensor:
        self._moments = logit_moments(self._before, logits_of(self._attention, self._states))
        return self._moments

    def end(self, rule: Decoupled, factor: float, overflow: Tensor | None, every: int) -> None:
        one = self._attention
        acts = (self._trained[0] and one.query_norm is None, self._trained[1] and one.key_norm is None)
        found = _factors(rule, self._moments, self.initial, factor, every, acts)
        found = _unless(0.0 if overflow is None else overflow, found)
        if found.keep.is_cuda or any(bool((x != 1).any()) for x in found):
            done: set[int] = set()
            for part, old in zip(self._parts, self._old, strict=True):
                # LoRA's factors of a fused layer are those of queries and of keys
                if not part.whole or id(part.tensor) not in done:
                    part.write(old, found.keep[0], (found.query, found.key)[part.index][0])
                done.add(id(part.tensor))
        self._old = []
        del self._before, self._states


@dataclass(frozen=True)
class _Part:
    """A trained tensor of W_Q (index 0) or W_K (1), and how factors of heads meet it."""

    tensor: Tensor
    index: int
    view: Callable[[Tensor], Tensor]
    dims: int  # of the view behind (G, R); 0 where factors are one number
    whole: bool = False  # all heads of a module share it, as they do a factor of LoRA's
    root: float = 1.0  # of the factor: where several tensors are multiplied, each takes its part

    def write(self, old: Tensor, keep: Tensor, factor: Tensor) -> None:
        """`keep` and `factor` are (G, R or 1)."""
        if self.whole:
            keep, factor = keep.amin(), factor.amin() ** self.root
        new, was = factor * keep, factor * (1 - keep)
        new, was = (x[(..., *[None] * self.dims)] for x in (new, was))
        stored = self.tensor.detach()
        if is_sharded(stored):
            by, add = (_placed(x, self.view, stored) for x in (new - 1, was))
            stored += by * stored + add * old
        else:
            mixed_(self.view(stored), self.view(old), new, was)


def _parts_of(one: Projection, index: int, held: HeldBy) -> Iterator[_Part]:
    """What the optimizer trains of a projection."""

    def trained(tensor: Tensor | None) -> bool:
        return tensor is not None and tensor.requires_grad and held(tensor)

    if trained(one.bias_tensor):
        assert one.bias_tensor is not None
        yield _Part(one.bias_tensor, index, one.bias_view, 1)
    if not one.others:
        if trained(one.tensor):
            yield _Part(one.tensor, index, one.view, 2)
        return
    if trained(one.tensor):
        yield _Part(one.tensor, index, _itself, 0, whole=True)
    for a, b in zip(one.others[::2], one.others[1::2], strict=True):  # LoRA's factors
        pair = [factor for factor in (a, b) if trained(factor)]
        yield from (_Part(factor, index, _itself, 0, whole=True, root=1 / len(pair)) for factor in pair)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _placed(value: Tensor, view: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Where `view` shows a part of a sharded tensor, the value; elsewhere 0."""
    whole = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    shown = view(whole)
    shown.copy_(value.expand_as(shown))
    return sharded(whole, like)
