"""LocAteR: hold the trace of every W_QK, shrink its scale.

    penalty = Σ over layers and query heads of  scale_strength · tr(W_QKᵀW_QK) + mean_strength · (tr W_QK − target)²

The gradient has a closed form in the factors (the paper's, with its misprint mended):

    ∂/∂W_Q = 2 scale_strength (W_K W_Kᵀ) W_Q + 2 mean_strength (tr W_QK − target) W_K,      and with Q and K exchanged;

a key matrix shared by several query heads collects their sum. It needs d_head × d_head products only: no graph, no
d_model × d_model matrix. A weight that is computed from parameters, as with LoRA, hands its gradient on to them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from locater.control._closed_form import Coefficients, GradientGroup
from locater.control._groups import Groups
from locater.control._numbers import checked_number, checked_strength
from locater.control._parameters import HeldBy, gathered_attention
from locater.control._steps import Schedule, around_step
from locater.control.apply import LocAteRForm, Regulariser, traces
from locater.control.rules.locater import paper_strengths, penalty
from locater.errors import LocaterError

__all__ = ["LocAteR", "LocAteRMethod"]


class LocAteR(Regulariser):
    """The regulariser on every attention module of `model` that `locater.models` finds.

    Strengths are the coefficients of the penalty above. `schedule`, if given, multiplies both: a function of the
    number of optimizer steps taken. Use one of

    * `penalty()`, a differentiable scalar to add to the loss (clipped and scaled with the rest of it),
    * `add_gradient_()`, the closed form added into `.grad`,
    * `attach(optimizer)`, which runs `add_gradient_` before every optimizer step, and with a closure after each of
      its evaluations. It runs after gradient clipping, so that the penalty's gradient is not clipped; with GradScaler
      and a fused optimizer the gradient is scaled as the others are.

    Where queries and keys are made of different states, as in cross attention to another width or of latents, W_QK has
    no trace: its scale counts, and there is no mean term. Frozen parameters are counted in the penalty and left alone.
    A module that a model uses in several places counts once. Make it when the parameters are in place: one that is
    replaced afterwards is not followed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        scale_strength: float,
        mean_strength: float,
        target: float = 1.0,
        schedule: Schedule | None = None,
    ) -> None:
        self._set(scale_strength, mean_strength, target)
        super().__init__(model, schedule)
        self._groups = Groups(self.attentions, GradientGroup)

    def _set(self, scale_strength: float, mean_strength: float, target: float) -> None:
        self.scale_strength = checked_strength("scale_strength", scale_strength)
        self.mean_strength = checked_strength("mean_strength", mean_strength)
        self.target = checked_number("target", target)

    @classmethod
    def from_paper(
        cls,
        model: nn.Module,
        *,
        kappa_1: float = 100.0,
        kappa_2: float = 1.0,
        tokens_per_batch: int = 4096,
        schedule: Schedule | None = None,
    ) -> LocAteR:
        """The reading of the paper's κ₁ and κ₂ that shows the trends of its figures.

        Section 6 prints κ₁ on the scale and κ₂ on the trace. With κ₁ = 100 and rising κ₂, as in Fig. 6, that objective
        would raise the scale; the figures, where it falls, fit the reverse: κ₁ holds the trace, κ₂ shrinks the
        scale. And the paper trained with fairseq, whose loss is a sum over the tokens of a batch, divided by their
        number only after the gradient is taken: a penalty added to it acts with κ/tokens_per_batch on a loss that is
        averaged per token, as here. 4,096 is its batch of 64 sequences of 64 tokens.
        """
        if isinstance(tokens_per_batch, bool) or not isinstance(tokens_per_batch, int) or tokens_per_batch < 1:
            raise LocaterError(f"tokens_per_batch must be a positive whole number, got {tokens_per_batch!r:.80}")
        kappas = checked_strength("kappa_1", kappa_1), checked_strength("kappa_2", kappa_2)
        scale, mean = paper_strengths(*kappas, tokens_per_batch)
        return cls(model, scale_strength=scale, mean_strength=mean, schedule=schedule)

    # ------------------------------------------------------------------ the penalty and its gradient

    def penalty(self) -> Tensor:
        """The penalty, differentiable."""
        factor = self._clock.factor()
        total: Tensor | None = None
        for attention in self.attentions:
            qk = gathered_attention(attention).qk()
            value = penalty(qk, self.scale_strength, self.mean_strength, self.target).sum()
            total = value if total is None else total + value.to(total.device)
        assert total is not None
        return factor * total

    def add_gradient_(self) -> None:
        """Adds the gradient of `penalty()` into the `.grad` of the parameters."""
        self.add_gradient_to(_every)

    @torch.no_grad()
    def add_gradient_to(self, chosen: Callable[[Tensor], bool], multiplier: float | Tensor = 1.0) -> None:
        """`add_gradient_` for the parameters that `chosen` picks, times `multiplier` (a loss scale)."""
        factor = self._clock.factor()
        if factor == 0 or self.scale_strength == self.mean_strength == 0:
            return
        by = factor * multiplier
        coefficients = Coefficients(by * self.scale_strength, by * self.mean_strength, self.target)
        for group in self._groups(lambda tensor: 0 if chosen(tensor) else None, chosen):
            group.add_gradient_(coefficients)

    def _hook(self, optimizer: Optimizer, held: HeldBy, undo: ExitStack) -> None:
        def before() -> None:
            # GradScaler leaves the gradients of a fused optimizer scaled: it divides inside its kernel
            scale = getattr(optimizer, "grad_scale", None)
            self.add_gradient_to(held, 1.0 if scale is None else scale)

        around_step(optimizer, undo, before=before, after=lambda: self._clock.tick(optimizer))

    # ------------------------------------------------------------------ logs and state

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Trace and scale averaged over the heads of each module, and the penalty: for logs."""
        values = {"penalty": float(self.penalty())}
        for attention in self.attentions:
            values |= traces(attention.module, gathered_attention(attention).qk())
        return values

    def state_dict(self) -> dict[str, float]:
        """What is needed to go on: the step, the strengths and the target (a schedule is yours to give again)."""
        return {
            "step": self.step,
            "scale_strength": self.scale_strength,
            "mean_strength": self.mean_strength,
            "target": self.target,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        wrong = "this is not a state of LocAteR"
        missing = self.state_dict().keys() - (state.keys() if isinstance(state, dict) else ())
        if missing:
            raise LocaterError(f"{wrong}: it lacks {', '.join(sorted(missing))}")
        step = state["step"]
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise LocaterError(f"{wrong}: its step is {step!r:.80}")
        self._set(state["scale_strength"], state["mean_strength"], state["target"])
        self.step = step

    def __repr__(self) -> str:
        return (
            f"LocAteR({len(self.attentions)} attention modules, scale_strength={self.scale_strength:g}, "
            f"mean_strength={self.mean_strength:g}, target={self.target:g})"
        )


def _every(tensor: Tensor) -> bool:
    del tensor
    return True


class LocAteRMethod(LocAteRForm):
    """`LocAteR(model, …).attach(optimizer)`, with the same settings."""

    def __init__(
        self, *, scale_strength: float, mean_strength: float, target: float = 1.0, schedule: Schedule | None = None
    ) -> None:
        self.settings: dict[str, Any] = {
            "scale_strength": checked_strength("scale_strength", scale_strength),
            "mean_strength": checked_strength("mean_strength", mean_strength),
            "target": checked_number("target", target),
            "schedule": schedule,
        }

    def _regulariser(self, model: nn.Module) -> LocAteR:
        return LocAteR(model, **self.settings)
