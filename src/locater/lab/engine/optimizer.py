"""AdamW for stacked models: each has its own learning rate, decay, count of updates, and right to skip one.

Legend: E stacked models, P parameters of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locater.lab.engine import _kernels

__all__ = ["AdamW", "Segment"]

BETAS, EPS = (0.9, 0.999), 1e-8


@dataclass
class Segment:
    """Parameters that are updated together, (E, …) each."""

    value: Tensor  # float32, or float64
    gradient: Tensor  # likewise
    first: Tensor  # Adam's moments
    second: Tensor
    low: Tensor  # what the products use: a half-precision copy of `value`, or `value` itself

    @classmethod
    def of(cls, value: Tensor, dtype: torch.dtype) -> Segment:
        gradient, first, second = (torch.zeros_like(value) for _ in range(3))
        return cls(value, gradient, first, second, value.to(dtype))  # itself, if that is its dtype

    def state(self) -> dict[str, Tensor]:
        return {"value": self.value, "first": self.first, "second": self.second}


class AdamW:
    """AdamW over segments; where there is no kernel for all members at once, PyTorch's own, member by member."""

    def __init__(self, segments: list[Segment], learning_rate: Tensor, decay: Tensor) -> None:
        self.segments, self.learning_rate, self.decay = segments, learning_rate, decay
        self._each: list[tuple[Segment, torch.optim.AdamW]] = []
        if not _kernels.available(learning_rate):
            self._each = [(segment, self._pytorchs(segment)) for segment in segments]

    def _pytorchs(self, s: Segment) -> torch.optim.AdamW:
        groups = [
            {"params": [value], "lr": float(rate), "weight_decay": float(decay)}
            for value, rate, decay in zip(s.value, self.learning_rate, self.decay, strict=True)
        ]
        made = torch.optim.AdamW(groups, betas=BETAS, eps=EPS, fused=True)
        for e, group in enumerate(made.param_groups):
            made.state[group["params"][0]] = {
                "step": torch.zeros((), device=s.value.device), "exp_avg": s.first[e], "exp_avg_sq": s.second[e]
            }  # fmt: skip
        return made

    @torch.no_grad()
    def update(self, updates: Tensor, active: Tensor, rate: Tensor | None = None) -> None:
        """One update of every model e with active[e]; `updates` (E,) counts them, this one included.

        `rate` (E,) is the learning rates where they are not those of the start.
        """
        rate = self.learning_rate if rate is None else rate
        for s in self.segments if not self._each else ():
            value, gradient, first, second = (a.flatten(1) for a in (s.value, s.gradient, s.first, s.second))
            _kernels.adamw_(
                value, gradient, first, second, None if s.low is s.value else s.low.flatten(1),
                learning_rate=rate, decay=self.decay, step=updates, active=active, betas=BETAS, eps=EPS,
            )  # fmt: skip
        for s, optimizer in self._each:
            for e, group in enumerate(optimizer.param_groups):
                (value,) = group["params"]
                value.grad, group["lr"] = s.gradient[e] if active[e] else None, float(rate[e])
                optimizer.state[value]["step"].fill_(updates[e] - 1)
            optimizer.step()
            if s.low is not s.value:
                s.low.copy_(s.value)
