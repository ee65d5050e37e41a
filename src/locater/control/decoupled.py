"""LocAteR beside the optimizer: right after each step, what it did to attention is measured and bounded.

Adam divides a penalty's gradient by the size of the task's gradient, so that one strength means something else at each
layer and step. Bounds on logits, in nats, mean the same everywhere, and need no strength.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from locater.control._bounded import Bounded, Modules, OneModule
from locater.control._groups import Group, Groups
from locater.control._numbers import checked_count, checked_positive
from locater.control._parameters import HeldBy, gathered_attention, is_sharded, projections, refuse_computed
from locater.control._sampled import Sample, SampledStates, alike, stackable
from locater.control._steps import Schedule, around_step
from locater.control.apply import LocAteRForm, Regulariser, traces
from locater.control.rules.decoupled import VERSION, Decoupled
from locater.errors import LocaterError
from locater.models import Attention, Projection
from locater.names import plain_name

__all__ = ["DecoupledLocAteR", "DecoupledLocAteRMethod"]

_LOOKS = 3  # how often the rest of a step is measured again where queries and keys are normalised; once elsewhere

_Work: TypeAlias = tuple[Bounded, list[Callable[[], Sample]]]


@dataclass(eq=False)
class _Plan:
    """The modules bounded in the steps of one optimizer, and what gives the sample of each. Valid while `made_of` stays
    the same."""

    made_of: Any = None
    work: list[_Work] = field(default_factory=list)
    unseen: bool = True  # whether some module has no sample yet


class DecoupledLocAteR(Regulariser):
    """Keeps the attention of `model` from changing abruptly, and from freezing, whatever the learning rate.

    In every step of the optimizer, the logits of every head are computed on a sample of the states that entered its
    module in the last training forward (of 2 sequences 64 tokens each, from the first to the last, without padding
    where the module is given a mask), with the weights before the step and after it: q·k with biases, norms and rotary
    positions as the model has them, each query with the keys up to it.

    `change`: the most a step may move a head's logits, in nats, as a standard deviation over the keys of a query. What
    exceeds it of the update of W_Q and W_K is undone. `spread`: the largest standard deviation of the logits
    themselves; W_Q and W_K are shrunk to it. A checkpoint's head that exceeds it when training begins may have √2 times
    its initial spread, and is shrunk by at most `change` a step.

    Neither bound counts updates or depends on the batch, and under Muon both mean the same. Where query heads share a
    key, the head that moves most decides for all. Heads within both bounds stay bitwise as they are. Where a model
    normalises queries and keys itself, logits are not bilinear in the weights, so what remains of a step is measured
    up to three times, not once; the spread is then set by the norms, and is not bounded. Of LoRA, the trained factors
    are held back and shrunk, those of one module together.

    `every`: act in each n-th step only, for an n-th of the time. The steps between are assumed to change logits as
    much as the n-th; at most the whole n-th update is undone for that. `schedule`: a function of the number of steps
    taken that both bounds are divided by, to release heads at the end (at 0 nothing is done). On several ranks the
    moments of the logits are averaged over `group`, by default torch.distributed's default group.

    Frozen parameters stay as they are; nothing is left at inference. During the optimizer's step there is a second copy
    of the query and key weights (of small ones on a GPU, all the time). Where no states have entered a module yet, or
    its keys are made of other states than its queries, independent normal tokens are the sample; in the first case
    nothing is shrunk.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        change: float = 0.1,
        spread: float = 4.9,
        every: int = 1,
        schedule: Schedule | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rule = Decoupled(checked_positive("change", change), checked_positive("spread", spread))
        self.every, self.group = checked_count("every", every), group
        super().__init__(model, schedule)
        joint = [attention.module for attention in self.attentions if attention.query is None]
        if joint:
            raise LocaterError(f"{joint[0]} trains W_QK itself, not its factors: use LocAteR")
        refuse_computed(self.attentions, "DecoupledLocAteR", lora=True)
        self._states = SampledStates(model, self.attentions)
        self._groups = self._grouped()
        self._plans = weakref.WeakSet[_Plan]()
        self._initial: dict[str, Tensor] = {}  # the spread of every head (G, R) before the first step
        self._moments: list[tuple[list[str], Tensor]] = []  # modules, and theirs (S, G, R, 3), of the last step

    def _grouped(self) -> Groups[Group]:
        self._norms_known = self._states.norms()
        measured = [self._states.measured(one) for one in self.attentions]
        norms = [norm for one in measured for norm in (one.query_norm, one.key_norm)]
        self._gains = [norm.stored for norm in norms if norm is not None and norm.stored is not None]
        return Groups(measured, Group)

    @property
    def change(self) -> float:
        return float(self.rule.change)

    @property
    def spread(self) -> float:
        return self.rule.spread

    # ------------------------------------------------------------------ a step

    def _hook(self, optimizer: Optimizer, held: HeldBy, undo: ExitStack) -> None:
        self._groups = self._grouped()  # a QK-norm may have been applied since
        self._states.attach(undo)
        plan = _Plan()
        self._plans.add(plan)
        begun: list[Bounded] = []
        acts = False

        def before() -> None:
            nonlocal acts
            begun.clear()
            acts = (self.step + 1) % self.every == 0 and self._clock.factor() > 0
            if acts or self._is_unseen(plan):  # the initial spread is measured in any case
                begun.extend(self._begin(optimizer, held, plan))

        def after() -> None:
            if begun and plan.made_of[0] != self._storage():  # a step that sets p.data
                for one in begun:
                    one.find_tensors()
            self._end(begun, getattr(optimizer, "found_inf", None), self._clock.factor() if acts else 0.0)
            begun.clear()
            self._clock.tick(optimizer)

        # innermost: what other methods do to the weights is not part of the step
        around_step(optimizer, undo, before=before, after=after, once=True, innermost=True)

    @torch.no_grad()
    def _begin(self, optimizer: Optimizer, held: HeldBy, plan: _Plan) -> list[Bounded]:
        """Before a step: copies the weights that the optimizer trains, and computes queries and keys of the sample."""
        # a rate of 0 freezes, too; a rate that is a tensor is not read, which could wait for the device
        rates = (group.get("lr") for group in optimizer.param_groups)
        still = [isinstance(rate, int | float) and rate == 0 for rate in rates]
        unseen = self._is_unseen(plan)
        made_of = self._storage(), still, held.ids(), self._states.kinds(), unseen, self._states.norms()
        if plan.made_of != made_of:
            plan.made_of, plan.work = None, []  # frees the copies; if this fails, the next step builds the plan anew
            if made_of[-1] != self._norms_known:
                self._groups = self._grouped()
            held.refresh()
            plan.work = list(self._worked_on(held, still, unseen=unseen))
            plan.made_of = made_of
        plan.unseen = any(one.missing for one, _ in plan.work)
        for one, sources in plan.work:
            one.begin([sample() for sample in sources])
        return [one for one, _ in plan.work]

    def _storage(self) -> list[Any]:
        """Where the weights, biases and gains of all modules are stored, and how."""
        return [(t.data_ptr(), t.dtype, t.requires_grad) for t in (*self._groups.tensors, *self._gains)]

    def _is_unseen(self, plan: _Plan) -> bool:
        """On several ranks this may not depend on the states that one of them saw: all have to do the same."""
        return self.step < self.every if self._has_ranks() else plan.unseen

    def _has_ranks(self) -> bool:
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1

    def _worked_on(self, held: HeldBy, still: Sequence[bool], *, unseen: bool) -> Iterator[_Work]:
        """While some are `unseen`, also modules whose learning rate is 0, with which a warm-up may begin."""

        def moved(tensor: Tensor, but: Container[int] = ()) -> bool:
            index = held.group(tensor) if tensor.requires_grad and id(tensor) not in but else None
            return index is not None and not still[index]

        written = set[int]()
        for group in self._groups(held.group, held):
            if all(index is None or (still[index] and not unseen) for index in group.rates):
                continue
            for members, own in self._of_one_kind(group, written):
                initial = torch.stack([self._initial_of(member) for member in members])
                self._initial |= zip((plain_name(member.module) for member in members), initial, strict=True)
                kind = Modules if stackable(members[0]) else OneModule
                missing = self._states.is_missing(members[0])
                sources = [self._states.source(member) for member in members]
                parts = zip(projections(members[0]), own, strict=True)
                others = {id(part.tensor) for part, is_own in parts if not is_own}
                yield kind(members, initial, partial(moved, but=others), missing=missing), sources

    def _of_one_kind(self, group: Group, written: set[int]) -> Iterator[tuple[list[Attention], tuple[bool, ...]]]:
        """Lists of members that are alike, with samples of the same shape and positions, and whether W_Q and W_K are
        their own. Those that an earlier module has, too, are bounded as that one's."""
        found: list[tuple[Any, list[Attention], tuple[bool, ...]]] = []
        for member in group.members:
            where = [self._where(one) for one in projections(member)]
            own = tuple(one not in written for one in where)
            if not any(own):
                continue
            written.update(one for one in where if one is not None)
            sample = self._states.of(member)
            stack = re.split(r"\.\d+\.", member.module, maxsplit=1)[0]  # masks of encoder and decoder may differ
            sampled = sample.states.shape, sample.tokens, stack, self._states.is_missing(member), own
            together = (same for known, same, _ in found if known == sampled and alike(same[0], member))
            kind = next(together, None) if stackable(member) else None
            if kind is None:
                found.append((sampled, [member], own))
            else:
                kind.append(member)
        yield from ((members, own) for _, members, own in found)

    def _where(self, part: Projection) -> int | None:
        """What identifies a stored W_Q or W_K; None for one that is computed, as LoRA's."""
        if part.others or part.computed:
            return None
        return id(part.tensor) if is_sharded(part.tensor) else part.weight.data_ptr()

    def _initial_of(self, attention: Attention) -> Tensor:
        """(G, R); −1 where it is not known yet."""
        tensor, shape = attention.key.tensor, projections(attention)[0].shape[:2]
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        known = self._initial.get(plain_name(attention.module))
        if known is None:
            return torch.full(shape, -1.0, dtype=dtype, device=tensor.device)
        return known.to(tensor.device, dtype)

    @torch.no_grad()
    def _end(self, begun: Sequence[Bounded], overflow: Tensor | None, factor: float) -> None:
        self._moments = self._averaged([(one, one.measure()) for one in begun])
        if all(one.within(self.rule, factor) for one in begun):  # on all ranks or on none
            for one in begun:
                one.settle()
        else:
            self._moments = [(names, moments.clone()) for names, moments in self._moments]
            for look in range(_LOOKS):
                again = [one for one in begun if look == 0 or not one.bilinear]
                every = self.every if look == 0 else 1
                self._averaged([(one, one.hold_back(self.rule, factor, overflow, every)) for one in again])
            for one in begun:
                one.write(self.rule, factor, overflow, self.every)
        for one in begun:
            one.end()

    def _averaged(self, measured: Sequence[tuple[Bounded, Tensor]]) -> list[tuple[list[str], Tensor]]:
        """Names of modules and their moments, over the ranks, each of which has seen a sample of its own."""
        found = [(one.names, moments) for one, moments in measured]
        if not found or not self._has_ranks():
            return found
        named = {name: own for names, moments in found for name, own in zip(names, moments, strict=True)}
        ordered = [named[name] for name in sorted(named)]  # ranks may work on modules in another order
        together = torch.cat([one.flatten() for one in ordered])
        dist.all_reduce(together, group=self.group)
        together /= dist.get_world_size(self.group)
        for one, part in zip(ordered, together.split([one.numel() for one in ordered]), strict=True):
            one.copy_(part.view_as(one))
        return found

    # ------------------------------------------------------------------ logs and state

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """For logs: trace and scale, averaged over the heads of each module. Of the last step, the largest change of a
        head's logits before it was bounded and, where it is known, their largest spread."""
        values: dict[str, float] = {}
        last = {name: own for names, moments in self._moments for name, own in zip(names, moments, strict=True)}
        for attention in self.attentions:
            name = plain_name(attention.module)
            values |= traces(attention.module, gathered_attention(attention).qk())
            if name in last:
                before, cross, change = last[name].unbind(-1)
                values[f"{name}/change"] = float(change.sqrt().max())
                if bool(cross.isfinite().all()):  # NaN for a placeholder sample
                    values[f"{name}/spread"] = float((before + 2 * cross + change).clamp(min=0).sqrt().max())
        return values

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs: the step, the bounds, and every head's initial spread. A schedule is not in it."""
        initial = {
            name: value.tolist() for name, value in self._initial.items() if self.step and bool((value >= 0).all())
        }
        return {
            "step": self.step, "change": self.change, "spread": self.spread, "initial": initial, "version": VERSION
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        wrong = "this is not a state of DecoupledLocAteR for this model"
        given = state if isinstance(state, dict) else {}
        if "mean_strength" in given:
            raise LocaterError(f"{wrong}: it is of LocAteR, the penalty through the optimizer")
        if given and given.get("version", VERSION if "change" in given else None) != VERSION:
            raise LocaterError(
                f"{wrong}: it is of another version of locater, with another formula; go on without it, and "
                "initial spreads are measured anew"
            )
        missing = self.state_dict().keys() - given.keys()
        if missing:
            raise LocaterError(f"{wrong}: it lacks {', '.join(sorted(missing))}")
        heads = {plain_name(one.module): projections(one)[0].shape[:2] for one in self.attentions}
        initial, step = given["initial"], given["step"]
        if not isinstance(initial, dict) or not initial.keys() <= heads.keys():
            raise LocaterError(f"{wrong}: its modules are others")
        try:
            made = {name: torch.tensor(value, dtype=torch.float64) for name, value in initial.items()}
        except (TypeError, ValueError):
            made = {"": torch.tensor(float("nan"))}
        if not all(bool(((value >= 0) & value.isfinite()).all()) for value in made.values()):
            raise LocaterError(f"{wrong}: its initial spreads are no numbers, not finite, or negative")
        others = [name for name, value in made.items() if value.shape != heads[name]]
        if others:
            raise LocaterError(f"{wrong}: {others[0]} has other heads")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise LocaterError(f"{wrong}: its step is {step!r:.80}")
        self.rule = Decoupled(*(checked_positive(name, given[name]) for name in ("change", "spread")))
        self._initial = made
        for plan in self._plans:  # they have copies of the former initial spreads
            plan.made_of = None
        self.step = step

    def __repr__(self) -> str:
        return f"DecoupledLocAteR({len(self.attentions)} attention modules, {self.change:g} and {self.spread:g} nats)"


class DecoupledLocAteRMethod(LocAteRForm):
    """`DecoupledLocAteR(model, …).attach(optimizer)`, with the same settings."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def _regulariser(self, model: nn.Module) -> DecoupledLocAteR:
        return DecoupledLocAteR(model, **self.settings)
