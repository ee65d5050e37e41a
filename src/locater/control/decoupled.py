"""LocAteR beside the optimizer: a direct step on W_Q and W_K after each of its steps, as AdamW's decay is.

Through Adam, a penalty's gradient is divided by the size of the task's, so that a strength means something else at each
layer and step. Beside it, a step is learning rate × strength and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from locater.control._clock import Clock, Clocked, Schedule
from locater.control._closed_form import projections, shapes
from locater.control._dense import gathered, is_sharded
from locater.control._numbers import checked_number, checked_strength
from locater.control._parameters import HeldBy, scale_, spread, unwrapped
from locater.control.stacked import RULE, decoupled_step, ordinary_scale, seen_scale, within_limit
from locater.errors import LocaterError
from locater.models import Attention, Norm, Projection, Rope, attentions
from locater.qk import QK

__all__ = ["DecoupledLocAteR"]

Rate: TypeAlias = float | Tensor
RateOf: TypeAlias = Callable[[Tensor], int | None]  # which of some rates a parameter has; None, it stays as it is

_STACK_BYTES = 64 << 20  # modules up to this size are worked on together: small ones wait for launches


class DecoupledLocAteR(Clocked):
    """Raises the trace of every W_QK of `model`, and holds the scale of those that grow; no strength has to be chosen.

    After each step of the optimizer, W_Q and W_K of every head make a step of learning rate × strength down

        share · tr(W_QKᵀW_QK) + (tr W_QK − target)²

    `share` is 0 while a head's scale is ordinary: at most what it was when this was made (or d_head / 8 if that is
    more, a logit's standard deviation of 0.35 between independent tokens), times (step / 250)² from the 250th step to
    the 2,000th, for heads that learn do grow. It is 1 from twice the ordinary scale on: where nothing grows abruptly,
    nothing is pressed; and no scale goes beyond three times the ordinary, whatever the learning rate does. For that
    limit, the scale is the one that tokens meet, with the gain and shift of the norm before attention, where the
    registry knows one, and the queries' bias in it; W_Q, W_K and their biases are shrunk. A bias that the optimizer
    does not train beside its weight stays, and does not count. `target`, 2 / (the logits' scale) unless given, is where
    ρ of the paper's random walk begins to localise, tr W_QK = 2 √d_head; a trace above it is left alone. With
    `growing_only=False` share is 1, there is no such limit, and a trace is lowered to its target, too. `schedule`, if
    given, multiplies the strength: a function of the number of steps taken, to let go at the end (at 0 nothing is
    done).

    With rotary positions, W_QK is what acts at distance 0, and another matrix at each other distance. A head is then
    judged and limited by the largest scale that turns can give it (a bound of that, `Rope.largest_product`), the keys'
    bias and shift included; it is the mean of the scale at distance 0 and of its mean over all turns that is stepped
    down. The trace, that at distance 0, says nothing of other distances, and is left alone unless `target` is given.

    Frozen parameters stay as they are; nothing is left at inference. Parameters in half precision round small steps
    away, as they do an optimizer's.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: float = 3.0,
        target: float | None = None,
        growing_only: bool = True,
        schedule: Schedule | None = None,
    ) -> None:
        self.strength = checked_strength("strength", strength)
        self.target = None if target is None else checked_number("target", target)
        if not isinstance(growing_only, bool):
            raise LocaterError(f"growing_only must be true or false, got {growing_only!r:.80}")
        self.growing_only = growing_only
        self._clock = Clock(schedule)
        self.attentions: list[Attention] = attentions(model)
        joint = [attention.module for attention in self.attentions if attention.query is None]
        if joint:
            raise LocaterError(f"{joint[0]} trains W_QK itself, not its factors: use LocAteR")
        self._tensors = [projection.tensor for attention in self.attentions for projection in projections(attention)]
        self._biases = [
            bias
            for attention in self.attentions
            for projection in projections(attention)
            if (bias := projection.bias_tensor) is not None
        ]
        # (G, R, 2)
        self._first = {attention.module: _Heads.of([attention]).scales()[0] for attention in self.attentions}
        self._known_groups: dict[RateOf, tuple[list[Any], list[_Group]]] = {}
        self._handles: dict[int, RemovableHandle] = {}

    # ------------------------------------------------------------------ a step

    def step_(self, learning_rate: Rate) -> None:
        """One step on every head; not for one that is attached."""
        self._act([learning_rate], _the_only)
        self.step += 1

    @torch.no_grad()
    def _act(self, rates: Sequence[Rate], rate_of: RateOf) -> None:
        """One step, each parameter at its rate."""
        factor = self._clock.factor()
        if factor == 0 or self.strength == 0:
            return
        for group in self._groups(rate_of):
            self._step_together(group, rates, factor)

    def _groups(self, rate_of: RateOf) -> list[_Group]:
        """Found again only when a parameter has changed."""
        state = [(t.requires_grad, t.dtype, t.device, rate_of(t)) for t in (*self._tensors, *self._biases)]
        known = self._known_groups.get(rate_of)
        if known is None or known[0] != state:
            known = self._known_groups[rate_of] = (state, self._find_groups(rate_of))
        return known[1]

    def _find_groups(self, rate_of: RateOf) -> list[_Group]:
        """Modules of one shape with something to move, up to a size; one that shares a parameter is alone."""
        kinds: dict[Any, _Group] = {}
        for attention in self.attentions:
            parts = projections(attention)
            tensors = [part.tensor for part in parts]
            rates = [rate_of(tensor) if tensor.requires_grad else None for tensor in tensors]
            if rates == [None, None]:
                continue
            biases = [part.bias_tensor for part in parts]
            bias_rates = [rate_of(bias) if bias is not None and bias.requires_grad else None for bias in biases]
            alone = attention.module if is_sharded(tensors[0]) else ""
            kind = (
                shapes(attention), tensors[0].dtype, tensors[0].device, attention.scale, *rates, *bias_rates, alone,
                *(bias is None for bias in biases), _kind(attention.input_norm), _turns(attention.rope),
            )  # fmt: skip
            group = _Group([], (rates[0], rates[1]), (bias_rates[0], bias_rates[1]))
            kinds.setdefault(kind, group).members.append(attention)
        found = []
        for group in kinds.values():
            bytes_each = sum(projection.weight.numel() * 4 for projection in projections(group.members[0]))
            ids = [
                {id(t) for one in projections(member) for t in (one.tensor, one.bias_tensor) if t is not None}
                for member in group.members
            ]
            tied = len(set().union(*ids)) < sum(map(len, ids))
            count = 1 if tied else max(1, _STACK_BYTES // (2 * bytes_each))
            starts = range(0, len(group.members), count)
            found += [replace(group, members=group.members[start : start + count]) for start in starts]
        return found

    def _step_together(self, group: _Group, rates: Sequence[Rate], factor: float) -> None:
        own, of_biases = ([None if i is None else rates[i] for i in indices] for indices in (group.rates, group.biases))
        moves, bias_moves = (
            [isinstance(rate, Tensor) or bool(rate) for rate in some] for some in (own, of_biases)
        )  # a rate of 0 freezes, too
        if not any(moves):
            return
        members = group.members
        heads = _Heads.of(members)
        # a bias that is not shrunk with its weight would have the weight shrunk for it, and again
        heads = heads.without_biases([weight and not bias for weight, bias in zip(moves, bias_moves, strict=True)])
        old = heads.qk
        w_q, w_k = old.w_q, old.w_k
        each = [w_q.new_zeros(1, 1, 1) + (0.0 if rate is None else rate) for rate in own]
        rate = torch.maximum(*each)  # one factor's may be smaller
        step = rate * self.strength * factor
        pull, target = self._trace_step(step, members[0])
        ordinary = None
        if self.growing_only:
            first = torch.stack([self._first[member.module].to(w_q) for member in members])
            ordinary, ordinary_seen = ordinary_scale(first, members[0].scale, self.step + 1).unbind(-1)
        new = decoupled_step(old, step, pull, target, ordinary, heads.rope)
        if group.rates[0] != group.rates[1]:
            parts = [torch.where(rate > 0, one / rate, 0.0)[..., None, None] for one in each]
            new = (w_q.lerp(new[0], parts[0]), w_k.lerp(new[1], parts[1]))
        factors = None
        if self.growing_only:
            growth = heads.seen(QK(*new)) / ordinary_seen
            shared = w_k.shape[-3] < w_q.shape[-3]
            limit = within_limit(growth, min(factor, 1.0), (moves[0], moves[1]), shared=shared)
            factors = [torch.where(rate > 0, one, 1.0) for one in limit]  # a skipped step has rates of 0 on the device
            new = (new[0] * factors[0][..., None, None], new[1] * factors[1][..., None, None])
        for i, member in enumerate(members):
            for part, projection in enumerate(projections(member)):
                if moves[part]:
                    _set(projection, (w_q, w_k)[part][i], new[part][i])
                if moves[part] and bias_moves[part] and factors is not None:
                    assert projection.bias_tensor is not None
                    scale_(projection.bias_tensor, projection.bias_view, factors[part][i][..., None])

    def _trace_step(self, step: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
        """The step that a trace makes, and its target."""
        if self.target is not None:
            return step, torch.full_like(step, self.target)
        return step if attention.rope is None else torch.zeros_like(step), torch.full_like(step, 2 / attention.scale)

    # ------------------------------------------------------------------ at work in a training loop

    def attach(self, optimizer: Optimizer) -> DecoupledLocAteR:
        """Runs a step after every step of `optimizer`, at its learning rates, on the parameters it holds.

        A step that GradScaler skips is skipped here too. Several optimizers: attach each.
        """
        optimizer = unwrapped(optimizer)
        held = HeldBy(optimizer, self._tensors)
        self._clock.join(optimizer)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            del args, kwargs
            overflow = getattr(optimizer, "found_inf", None)
            rates = [group["lr"] for group in optimizer.param_groups]
            self._act(rates if overflow is None else [rate * (1 - overflow.float()) for rate in rates], held.group)
            self._clock.tick(optimizer)

        if id(optimizer) in self._handles:  # attached twice, it acts once
            self._handles[id(optimizer)].remove()
        self._handles[id(optimizer)] = optimizer.register_step_post_hook(after_step)
        return self

    def detach(self) -> None:
        """Undoes every `attach`."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._known_groups.clear()

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Trace, scale and growth, averaged over the heads of each module: for logs.

        Growth is in units of the ordinary scale, W_QK's or that which tokens meet, whichever has grown more.
        """
        values = {}
        for attention in self.attentions:
            heads = _Heads.of([attention])
            values[f"{attention.module}/trace"] = float(heads.qk.trace().mean())
            values[f"{attention.module}/scale"] = float(heads.qk.scale().mean())
            ordinary = ordinary_scale(self._first[attention.module].to(heads.qk.w_q), attention.scale, self.step)
            values[f"{attention.module}/growth"] = float((heads.scales()[0] / ordinary).amax(-1).mean())
        return values

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on: the step, the settings, and every head's first scale (a schedule is yours)."""
        first = {name: value.tolist() for name, value in self._first.items()}
        return {"step": self.step, "strength": self.strength, "target": self.target, "first": first, "rule": RULE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        wrong = "this is not a state of DecoupledLocAteR for this model"
        missing = self.state_dict().keys() - state.keys() if isinstance(state, dict) else {"everything"}
        if missing == {"rule"} or (not missing and state["rule"] != RULE):
            raise LocaterError(
                f"{wrong}: it is of another version of locater, whose rule was another; without it, first scales are "
                "today's"
            )
        if missing:
            raise LocaterError(f"{wrong}: it lacks {', '.join(sorted(missing))}")
        first = state["first"]
        if not isinstance(first, dict) or first.keys() != self._first.keys():
            raise LocaterError(f"{wrong}: its modules are others")
        try:
            made = {
                name: torch.tensor(first[name], dtype=value.dtype, device=value.device)
                for name, value in self._first.items()
            }
        except (TypeError, ValueError):
            raise LocaterError(f"{wrong}: its first scales are no numbers") from None
        others = [name for name, value in made.items() if value.shape != self._first[name].shape]
        if others:
            raise LocaterError(f"{wrong}: {others[0]} has other heads")
        target = state["target"]
        self.strength = checked_strength("strength", state["strength"])
        self.target = None if target is None else checked_number("target", target)
        self._first, self.step = made, int(state["step"])

    def __repr__(self) -> str:
        return f"DecoupledLocAteR({len(self.attentions)} attention modules, strength={self.strength:g})"


def _the_only(tensor: Tensor) -> int:
    del tensor
    return 0


@dataclass(frozen=True)
class _Group:
    """Modules that are worked on together; at which of the rates W_Q and W_K move, None where they do not; and their
    biases."""

    members: list[Attention]
    rates: tuple[int | None, int | None]
    biases: tuple[int | None, int | None]


@dataclass(frozen=True)
class _Heads:
    """The heads of modules of one shape as they are now, of sharded parameters too, in float32 at least."""

    qk: QK  # (S, G, R, K, D) and (S, G, 1, K, D)
    biases: tuple[Tensor | None, Tensor | None]  # (S, G, R or 1, K)
    norm: Norm | None  # before them, (S, 1, 1, 1, D)
    rope: Rope | None

    @classmethod
    @torch.no_grad()
    def of(cls, members: Sequence[Attention]) -> _Heads:
        def stacked(tensors: Sequence[Tensor]) -> Tensor:
            whole = torch.stack([gathered(tensor.detach()) for tensor in tensors])
            return whole.to(torch.promote_types(whole.dtype, torch.float32))

        def part(i: int) -> tuple[Tensor, Tensor | None]:
            """Of W_Q or W_K, which may be rows of one tensor."""
            own = [projections(member)[i] for member in members]
            weight = stacked([one.view(gathered(one.tensor.detach())) for one in own])
            biases = [one.bias_view(gathered(t.detach())) for one in own if (t := one.bias_tensor) is not None]
            return weight, stacked(biases) if biases else None

        (w_q, b_q), (w_k, b_k) = part(0), part(1)
        norms = [norm for member in members if (norm := member.input_norm) is not None]
        norm = None
        if norms:
            gains, shifts = [[getattr(one, name) for one in norms] for name in ("gain", "bias")]
            gain, shift = (None if x[0] is None else stacked(x)[:, None, None, None] for x in (gains, shifts))
            norm = Norm(gain, norms[0].eps, norms[0].centred, shift)
        return cls(QK(w_q, w_k), (b_q, b_k), norm, members[0].rope)

    def without_biases(self, left_out: Sequence[bool]) -> _Heads:
        b_q, b_k = (None if out else bias for out, bias in zip(left_out, self.biases, strict=True))
        return replace(self, biases=(b_q, b_k))

    def seen(self, qk: QK) -> Tensor:
        """The scale of these weights (S, G, R) as tokens meet it."""
        return seen_scale(qk, self.norm, self.biases, self.rope)

    def scales(self) -> Tensor:
        """(S, G, R, 2): W_QK's own, and as tokens meet it."""
        own = seen_scale(self.qk, None, (None, None), self.rope)
        return torch.stack([own, self.seen(self.qk)], dim=-1)


def _kind(norm: Norm | None) -> tuple[bool, ...]:
    return () if norm is None else (norm.centred, norm.stored is None, norm.bias is None)


def _turns(rope: Rope | None) -> tuple[int, bool] | None:
    return None if rope is None else (rope.pairs, rope.interleaved)


def _set(projection: Projection, old: Tensor, new: Tensor) -> None:
    """Writes a weight in place; of a sharded one each rank its own part."""
    tensor = projection.tensor.detach()
    if not is_sharded(tensor):
        projection.view(tensor).copy_(new)
        return
    change = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    projection.view(change).copy_(new - old)
    tensor.add_(spread(change, tensor))
