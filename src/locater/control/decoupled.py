"""LocAteR beside the optimizer: a direct step on W_Q and W_K after each of its steps, as AdamW's decay is.

Through Adam, a penalty's gradient is divided by the size of the task's, so that a strength means something else at each
layer and step. Beside it, a step is learning rate × strength and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from locater.control._groups import Groups, RateOf
from locater.control._moves import MovedGroup, Now, Step, stacked_initial
from locater.control._numbers import checked_count, checked_number, checked_strength
from locater.control._parameters import HeldBy, refuse_computed
from locater.control.apply import LocAteRForm, Regulariser, Schedule, around_step, traces
from locater.control.heads import read_heads, write_heads
from locater.control.rules.decoupled import VERSION, Decoupled, baseline_scale
from locater.errors import LocaterError
from locater.names import plain_name

__all__ = ["DecoupledLocAteR", "DecoupledLocAteRMethod"]

Rate: TypeAlias = float | Tensor


class DecoupledLocAteR(Regulariser):
    """Raises the trace of every W_QK of `model`, and limits the scale of those that grow; no strength has to be chosen.

    After each step of the optimizer, W_Q and W_K of every head make a step of learning rate × strength down

        share · tr(W_QKᵀW_QK) + (tr W_QK − target)²

    `share` is clamp(scale/baseline − 1, 0, 1). The baseline is the initial scale, when this was made (or d_head / 8 if
    that is more, a logit's standard deviation of 0.35 between independent tokens), times (step / 250)² from the 250th
    step to the 2,000th, for heads that learn do grow: where nothing grows abruptly, nothing is shrunk. And no effective
    scale exceeds three times its baseline, whatever the learning rate does. The effective scale has the gain and shift
    of the norm before attention, where the registry knows one, and the queries' bias folded in; W_Q, W_K and their
    biases are shrunk. A bias that the optimizer does not train beside its weight stays, and does not count. `target` is
    2 / (the logits' scale) unless given, tr W_QK = 2 √d_head: a value chosen by training, with no theory behind it for
    tokens that are normalised. A trace above it is left alone. With `growing_only=False` share is 1, there is no limit,
    and a trace is lowered to its target, too. `schedule`, if given, multiplies the strength: a function of the number
    of steps taken, to release heads at the end (at 0 nothing is done). With `every` it acts after each n-th step only,
    by a step n times as large: for a n-th of the time, heads may grow for n steps before they are shrunk or limited.

    With rotary positions, W_QK is what acts at offset 0, and another matrix at each other offset. A head is then judged
    and limited by the largest scale that any offset can give it (a bound of that, `Rope.largest_product`), the keys'
    bias and shift included; it is the mean of the scale at offset 0 and of its mean over all rotary angles that is
    stepped down. The trace, that at offset 0, says nothing of other offsets, and is left alone unless `target` is
    given. Where keys are made of states of another width, W_QK has no trace, and the scale alone is stepped down.

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
        every: int = 1,
        schedule: Schedule | None = None,
    ) -> None:
        self.strength = checked_strength("strength", strength)
        self.every = checked_count("every", every)
        if not isinstance(growing_only, bool):
            raise LocaterError(f"growing_only must be true or false, got {growing_only!r:.80}")
        self.rule = Decoupled(None if target is None else checked_number("target", target), growing_only)
        super().__init__(model, schedule)
        joint = [attention.module for attention in self.attentions if attention.query is None]
        if joint:
            raise LocaterError(f"{joint[0]} trains W_QK itself, not its factors: use LocAteR")
        refuse_computed(self.attentions, "DecoupledLocAteR")
        self._groups = Groups(self.attentions, MovedGroup)
        # (G, R, 2)
        self._initial = {
            plain_name(one.module): self.rule.start(read_heads([one]).grams())[0] for one in self.attentions
        }

    @property
    def target(self) -> float | None:
        return self.rule.target

    @target.setter
    def target(self, target: float | None) -> None:
        self.rule = Decoupled(None if target is None else checked_number("target", target), self.growing_only)

    @property
    def growing_only(self) -> bool:
        return self.rule.growing_only

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
        for group in self._groups(rate_of, rate_of):
            own, of_biases = (
                [0.0 if index is None else rates[index] for index in indices] for indices in (group.rates, group.biases)
            )
            # a rate of 0 freezes, too; on a device, it is not asked for
            trained, biases_trained = (
                (isinstance(q, Tensor) or q > 0, isinstance(k, Tensor) or k > 0) for q, k in (own, of_biases)
            )
            if not any(trained):
                continue
            step = Step(self.rule, self.strength, trained, biases_trained, group.rates[0] == group.rates[1])
            work = group.on_device(step, self._initial)
            if work is not None:
                work(own, factor, self.step + 1)
                continue
            for members in group.stacks():
                heads = read_heads(members, trained, biases_trained)
                initial = stacked_initial(self._initial, members).to(heads.qk.w_q)
                grams = heads.grams(pulled=self.rule.pulls(heads.rope, heads.qk.square))
                q, k = (heads.qk.w_q.new_zeros(1, 1, 1) + rate for rate in own)
                move = step.of(grams, heads.logit_scale, initial, Now((q, k), factor, self.step + 1))
                write_heads(members, heads, heads.moved(move))

    def _hook(self, optimizer: Optimizer, held: HeldBy, undo: ExitStack) -> None:
        def after() -> None:
            if (self.step + 1) % self.every == 0:
                overflow = getattr(optimizer, "found_inf", None)
                rates = [self.every * group["lr"] for group in optimizer.param_groups]
                self._act(rates if overflow is None else [rate * (1 - overflow.float()) for rate in rates], held.group)
            self._clock.tick(optimizer)

        around_step(optimizer, undo, after=after)

    # ------------------------------------------------------------------ logs and state

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Trace, scale and growth, averaged over the heads of each module: for logs.

        Growth is in units of the baseline, W_QK's own or that of the effective scale, whichever has grown more.
        """
        values: dict[str, float] = {}
        for attention in self.attentions:
            heads = read_heads([attention])
            values |= traces(attention.module, heads.qk)
            name = plain_name(attention.module)
            baseline = baseline_scale(self._initial[name].to(heads.qk.w_q), attention.scale, self.step)
            values[f"{name}/growth"] = float((self.rule.start(heads.grams())[0] / baseline).amax(-1).mean())
        return values

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on: the step, the settings, and every head's initial scale (a schedule is yours)."""
        initial = {name: value.tolist() for name, value in self._initial.items()}
        return {
            "step": self.step, "strength": self.strength, "target": self.target, "initial": initial, "version": VERSION
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        wrong = "this is not a state of DecoupledLocAteR for this model"
        if isinstance(state, dict):  # as earlier versions named them
            state = {{"first": "initial", "rule": "version"}.get(name, name): value for name, value in state.items()}
        missing = self.state_dict().keys() - state.keys() if isinstance(state, dict) else {"everything"}
        if missing == {"version"} or (not missing and state["version"] != VERSION):
            raise LocaterError(
                f"{wrong}: it is of another version of locater, whose formula was another; go on without it, and "
                "initial scales are those of now"
            )
        if missing:
            raise LocaterError(f"{wrong}: it lacks {', '.join(sorted(missing))}")
        initial = state["initial"]
        if isinstance(initial, dict):  # earlier versions named the modules of a compiled model otherwise
            initial = {plain_name(str(name)): value for name, value in initial.items()}
        if not isinstance(initial, dict) or initial.keys() != self._initial.keys():
            raise LocaterError(f"{wrong}: its modules are others")
        try:
            made = {
                name: torch.tensor(initial[name], dtype=value.dtype, device=value.device)
                for name, value in self._initial.items()
            }
        except (TypeError, ValueError):
            raise LocaterError(f"{wrong}: its initial scales are no numbers") from None
        others = [name for name, value in made.items() if value.shape != self._initial[name].shape]
        if others:
            raise LocaterError(f"{wrong}: {others[0]} has other heads")
        self.strength, self.target = checked_strength("strength", state["strength"]), state["target"]
        self._initial, self.step = made, int(state["step"])

    def __repr__(self) -> str:
        return f"DecoupledLocAteR({len(self.attentions)} attention modules, strength={self.strength:g})"


def _the_only(tensor: Tensor) -> int:
    del tensor
    return 0


class DecoupledLocAteRMethod(LocAteRForm):
    """`DecoupledLocAteR(model, …).attach(optimizer)`, with the same settings."""

    def __init__(
        self,
        *,
        strength: float = 3.0,
        target: float | None = None,
        growing_only: bool = True,
        every: int = 1,
        schedule: Schedule | None = None,
    ) -> None:
        self.settings: dict[str, Any] = {
            "strength": checked_strength("strength", strength),
            "target": None if target is None else checked_number("target", target),
            "growing_only": growing_only,
            "every": checked_count("every", every),
            "schedule": schedule,
        }

    def _regulariser(self, model: nn.Module) -> DecoupledLocAteR:
        return DecoupledLocAteR(model, **self.settings)
