"""A step of the optimizer, bounded by `rules.decoupled`: weights are copied before it, compared after it, and mixed.

Modules that differ in nothing but numbers are stacked. For small ones on a GPU, launches take longer than the work:
they are recorded as CUDA graphs.

Legend: S modules, G key heads, R query heads for each, B sequences of a sample, n tokens of each, K head width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from locater._triton import on
from locater.control._kernels import supported
from locater.control._parameters import gathered, projections
from locater.control._sampled import Sample, logits_of
from locater.control._step_kernels import moments
from locater.control._weights import Copy, Weights, product_type, stored_of, without_repeats
from locater.control.rules.decoupled import Decoupled, Factors, initial_spread, logit_moments, part_of
from locater.models import Attention, Norm, Rope
from locater.names import plain_name

__all__ = ["Bounded", "Modules", "OneModule"]

Moved: TypeAlias = Callable[[Tensor], bool]
_Given: TypeAlias = tuple[Tensor | float, Tensor | None]  # the schedule's factor; GradScaler's found_inf

_SMALL = 256 << 20  # bytes of W_Q and W_K of a group up to which they are stacked, and steps recorded


class Bounded(ABC):
    """Attention modules of one shape in a step of their optimizer: `begin` before it, `measure` after it. If a bound is
    exceeded, `hold_back` once or more, which measures what remains, and `write`; else `settle`. Then `end`."""

    def __init__(self, members: Sequence[Attention], initial: Tensor, moved: Moved, *, missing: bool = False) -> None:
        """`moved`: whether the optimizer trains a tensor. `missing`: whether samples are still placeholders, which show
        what an update changes but not how sharp a head is."""
        self.names = [plain_name(member.module) for member in members]
        self.initial = initial  # the spread of every head before the first step (S, G, R); −1 where there was none yet
        self.missing = missing
        self._on_device = initial.is_cuda  # then no value is read on the host: kernels decide what is written
        self._settled = False  # whether all initial spreads are known
        self._moments: Tensor = initial.new_empty(0)
        parts = [[projections(member)[index] for member in members] for index in (0, 1)]
        self._parts, self._trained = parts, moved  # W_Q of every module, and W_K
        self.find_tensors()
        norms = members[0].query_norm, members[0].key_norm
        self.bilinear = norms == (None, None)  # whether logits are, in W_Q and W_K
        # multiplying W_Q or W_K changes nothing where a norm follows
        acts = [norms[i] is None and any(moved(t) for t in parts[i][0].tensors) for i in (0, 1)]
        self._acts = acts[0], acts[1]

    def find_tensors(self) -> None:
        """Looks up where the parameters are stored; again after a step that gave them other storage."""
        found = [one for index in (0, 1) for one in stored_of(self._parts[index], index, self._trained)]
        self._stored = without_repeats(found)

    @abstractmethod
    def begin(self, samples: Sequence[Sample]) -> None:
        """`samples`: one of each module, all with the same positions."""

    @abstractmethod
    def measure(self) -> Tensor:
        """`logit_moments` of every head (S, G, R, 3), which may be averaged in place before the rule reads them."""

    def within(self, rule: Decoupled, factor: float) -> bool:
        """Whether every head is known to be within both bounds. False on a GPU, which one would have to wait for."""
        return not self._on_device and rule.holds(self._moments, factor)

    @abstractmethod
    def hold_back(self, rule: Decoupled, factor: float, overflow: Tensor | None, every: int) -> Tensor:
        """Keeps the fraction of the step that the rule gives for the last moments, and measures what remains."""

    @abstractmethod
    def write(self, rule: Decoupled, factor: float, overflow: Tensor | None, every: int) -> None:
        """Writes the weights that the rule gives for the last moments; nothing where GradScaler skipped the step."""

    @abstractmethod
    def end(self) -> None:
        """Frees the copies."""

    @property
    def _shared(self) -> bool:
        """Whether query heads share a key."""
        return self._moments.shape[-2] > 1

    def _factors(self, rule: Decoupled, factor: Tensor | float, every: int) -> Factors:
        return rule.factors(self._moments, self.initial, factor, every=every, shared_keys=self._shared, acts=self._acts)

    def settle(self) -> None:
        """Sets the initial spreads that are not known yet; within the bounds nothing else is to be done."""
        if self._on_device or not self._settled:
            self.initial.copy_(initial_spread(self._moments, self.initial))
            self._settled = not self._on_device and not bool((self.initial < 0).any())

    def _marked(self, moments: Tensor) -> Tensor:
        """With NaN as the cross moment of placeholder samples: an average over ranks with one of them is NaN, too."""
        if self.missing:
            moments[..., 1] = math.nan
        return moments

    def _mix(self, old: Sequence[Copy], found: Factors, overflow: Tensor | float | None) -> None:
        if not self._on_device and all(bool((x == 1).all()) for x in found):
            return
        if isinstance(overflow, Tensor):
            found = Factors(*(torch.where(overflow.to(x.device) > 0, 1.0, x) for x in found))
        for one, copy in zip(self._stored, old, strict=True):
            one.mix_(copy, found.keep, (found.query, found.key)[one.index])


# ---------------------------------------------------------------------- together


class Modules(Bounded):
    """Those that differ in nothing but numbers."""

    def __init__(self, members: Sequence[Attention], initial: Tensor, moved: Moved, *, missing: bool = False) -> None:
        super().__init__(members, initial, moved, missing=missing)
        self._first = members[0]
        self._norms = [[one.query_norm for one in members], [one.key_norm for one in members]]
        self._dtype = product_type(self._parts[0][0].tensor)
        # LoRA's scaling and adapters may change
        self._recorded = self._small and self._linear and self._on_device
        self._steps = 0
        self._states: Tensor | None = None
        self._old: list[Copy] = []
        # W_Q and W_K times the sample, before and after the step. Those of a part of the step are between them, except
        # with LoRA, where it is the factors that are held back
        self._rows: list[Tensor] = []
        self._moved: list[Tensor] = []
        self._kept: Tensor | None = None  # the fraction of the step (S, G, 1) that is kept so far
        self._before: list[Tensor] = []  # q and k of the sample
        self._gains: list[Tensor | None] = []  # of norms, before the step: only what W_Q and W_K change is measured
        self._given = initial.new_tensor([1.0, 0.0])  # the schedule's factor, and whether the step was skipped
        self._given_factor, self._given_overflow = 1.0, False
        self._positions: Tensor | None = None
        self._rope: tuple[int, Rope] | None = None  # of sequences of this length
        self._rotation: tuple[Tensor, Tensor] | None = None

    def find_tensors(self) -> None:
        super().find_tensors()
        parts = self._parts
        plain = self._linear = not any(part[0].others for part in parts)
        views = [[one.view(one.tensor.detach()) for one in part] for part in parts] if plain else [[], []]
        self._kernels = plain and supported(views[0], views[1], None, None)
        size = sum(math.prod(part[0].shape) * part[0].tensor.itemsize for part in parts)  # bytes of a module
        self._small = 1 < len(parts[0]) <= _SMALL // size
        self._weights = [Weights(part, kernels=self._kernels, stacked=self._small) for part in parts]
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}

    def begin(self, samples: Sequence[Sample]) -> None:
        self._steps += 1
        states, positions, tokens = [one.states for one in samples], samples[0].positions, samples[0].tokens
        if self._states is None or self._positions is None:
            self._states, self._positions = torch.stack([x.to(self._dtype) for x in states]), positions.clone()
        else:
            torch._foreach_copy_(list(self._states.unbind(0)), list(states))
            self._positions.copy_(positions)
        self._rope_for(tokens, positions.device)
        self._run("begin", self._copy)

    def _rope_for(self, tokens: int, device: torch.device) -> None:
        """The frequencies on the device, so that angles can be computed there; some change with the length."""
        rope, known = self._first.rope, self._rope
        if rope is not None and (known is None or (rope.stretched is not None and known[0] != tokens)):
            frequencies = rope.frequencies if rope.stretched is None else rope.stretched(tokens)
            self._rope = tokens, replace(rope, frequencies=frequencies.to(device), stretched=None)

    def measure(self) -> Tensor:
        self._run("measure", self._compare)
        return self._moments

    def hold_back(self, rule: Decoupled, factor: float, overflow: Tensor | None, every: int) -> Tensor:
        def hold_back(given: _Given) -> None:
            keep = rule.keep(self._moments, given[0], shared_keys=self._shared, every=every)
            if self._linear:
                assert self._kept is not None
                self._kept.mul_(keep)
                pairs = zip(self._rows, self._moved, strict=True)
                rows = [part_of(self._kept, old, new) for old, new in pairs]
            else:
                one = torch.ones_like(keep)
                self._mix(self._old, Factors(keep, one, one), given[1])
                rows = self._multiplied()
            self._moments.copy_(self._moments_of(rows))

        self._call("hold back", hold_back, rule, factor, overflow, every)
        return self._moments

    def write(self, rule: Decoupled, factor: float, overflow: Tensor | None, every: int) -> None:
        def write(given: _Given) -> None:
            self.settle()
            found = self._factors(rule, given[0], every)
            if self._kept is not None:
                found = found._replace(keep=self._kept * found.keep)
            self._mix(self._old, found, given[1])

        self._call("write", write, rule, factor, overflow, every)

    def end(self) -> None:
        if not self._recorded:  # else the graphs write to them again
            self._old, self._before, self._gains, self._states = [], [], [], None
            self._rows, self._moved, self._kept = [], [], None

    def _call(
        self,
        name: str,
        function: Callable[[_Given], None],
        rule: Decoupled,
        factor: float,
        overflow: Tensor | None,
        every: int,
    ) -> None:
        """Calls it with the factor and the overflow, which a recorded step reads on the device."""
        if self._on_device:
            self._give(factor, overflow)
            self._run((name, rule, every), lambda: function((self._given[0], self._given[1])))
        else:
            function((factor, overflow))

    def _run(self, name: Any, function: Callable[[], None]) -> None:
        """As a CUDA graph from the third step on."""
        if self._recorded and self._steps > 2 and not torch.cuda.is_current_stream_capturing():
            with on(self.initial):
                if name not in self._graphs:
                    self._graphs[name] = torch.cuda.CUDAGraph()
                    # a stream of this device: torch's default one for graphs is of the device that captured first
                    stream = torch.cuda.Stream(self.initial.device)
                    with torch.cuda.graph(self._graphs[name], stream=stream, capture_error_mode="thread_local"):
                        function()
                self._graphs[name].replay()
        else:
            function()

    def _give(self, factor: float, overflow: Tensor | None) -> None:
        """Copies to the device what changed."""
        if factor != self._given_factor:
            self._given[0].fill_(factor)  # no copy from the host, which would wait
        if overflow is not None:
            self._given[1].copy_(overflow.reshape(()))
        elif self._given_overflow:
            self._given[1].zero_()
        self._given_factor, self._given_overflow = factor, overflow is not None

    def _copy(self) -> None:
        assert self._states is not None
        copied = [any(one.is_weight and one.index == index for one in self._stored) for index in (0, 1)]
        made = [one.rows(self._states, copied=wanted) for one, wanted in zip(self._weights, copied, strict=True)]
        self._gains = [_stacked(norms) for norms in self._norms]
        self._rows = [rows for rows, _ in made]
        self._before = self._normalised(self._rows)
        if self._rope is not None and self._positions is not None:
            self._rotation = self._rope[1].angles(self._positions, self._before[0].dtype)
        self._old = []
        for one in self._stored:
            copy = made[one.index][1] if one.is_weight else None
            self._old.append(one.copied() if copy is None else copy)

    def _compare(self) -> None:
        self._moved = self._multiplied()
        self._moments = self._moments_of(self._moved)
        self._kept = torch.ones_like(self._moments[..., :1, 0]) if self._linear else None

    def _multiplied(self) -> list[Tensor]:
        assert self._states is not None
        return [one.rows(self._states)[0] for one in self._weights]

    def _moments_of(self, rows: Sequence[Tensor]) -> Tensor:
        after = self._normalised(rows)
        if self._kernels:
            interleaved = self._first.rope is not None and self._first.rope.interleaved
            found = moments(self._before, after, self._first.scale, self._rotation, interleaved)
        else:
            found = logit_moments(self._logits(*self._before), self._logits(*after))
        return self._marked(found)

    def _normalised(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Queries and keys (S, G, R, B, n, K), with the gains of before the step."""
        made = []
        for x, norms, gains in zip(rows, self._norms, self._gains, strict=True):
            norm = norms[0]
            made.append(x if norm is None else replace(norm, stored=None if gains is None else gains.to(x.dtype))(x))
        return made

    def _logits(self, q: Tensor, k: Tensor) -> Tensor:
        """(S, G, R, B, n, n)."""
        if self._rotation is not None:
            assert self._first.rope is not None
            q, k = (self._first.rope.rotate_by(x, *self._rotation) for x in (q, k))
        return (self._first.scale * q) @ k.mT


def _stacked(norms: Sequence[Norm | None]) -> Tensor | None:
    """Their gains (S, 1, 1, 1, 1, K)."""
    gains = [one.stored for one in norms if one is not None and one.stored is not None]
    return torch.stack(gains)[:, None, None, None, None] if gains else None


# ---------------------------------------------------------------------- one by one


class OneModule(Bounded):
    """Any module, alone: with sharded weights, or of a kind that cannot be stacked."""

    def __init__(self, members: Sequence[Attention], initial: Tensor, moved: Moved, *, missing: bool = False) -> None:
        super().__init__(members, initial, moved, missing=missing)
        (self._attention,) = members

    def begin(self, samples: Sequence[Sample]) -> None:
        (self._sample,) = samples
        self._old = [one.copied() for one in self._stored]
        norms = {name: getattr(self._attention, name) for name in ("query_norm", "key_norm")}
        kept = {name: norm and norm.mapped(lambda x: gathered(x.detach()).clone()) for name, norm in norms.items()}
        self._with_old_gains = replace(self._attention, **kept)
        self._before = logits_of(self._with_old_gains, self._sample)

    def measure(self) -> Tensor:
        self._moments = self._marked(logit_moments(self._before, logits_of(self._with_old_gains, self._sample)))
        return self._moments

    def hold_back(self, rule: Decoupled, factor: float, overflow: Tensor | None, every: int) -> Tensor:
        keep = rule.keep(self._moments, factor, shared_keys=self._shared, every=every)
        one = torch.ones_like(keep)
        self._mix(self._old, Factors(keep, one, one), overflow)
        return self.measure()

    def write(self, rule: Decoupled, factor: float, overflow: Tensor | None, every: int) -> None:
        self.settle()
        self._mix(self._old, self._factors(rule, factor, every), overflow)

    def end(self) -> None:
        self._old = []
        del self._before, self._sample, self._with_old_gains
