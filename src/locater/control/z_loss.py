"""Attention z-loss on a model: a penalty for each attention module keeps the logsumexp of its logits near zero.

No loop has to change: the penalty's gradient joins the loss's inside backward.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from locater.control._numbers import checked_strength
from locater.control.apply import Installed, Method
from locater.control.rules.logsumexp import logsumexp
from locater.control.rules.z_loss import LossScale, penalised, squared
from locater.errors import LocaterError
from locater.hooks import Intercepted, Interceptor, attention_sites, intercept

__all__ = ["ZLoss"]


class ZLoss(Method):
    """strength · mean logsumexp² of the logits of each attention module, in every forward that records gradients.

    The logsumexp is of what softmax is given: scaled, capped, biased, masked. Queries that are padding, where the masks
    show it, do not count; calls of one module in several forwards each count, once: in the first backward.

    `loss_scale` is what the loss is multiplied by before backward, a number or a function that gives it: 1/n where
    the loop divides by n accumulated batches, `scaler.get_scale` with a GradScaler. The penalty's gradient is
    multiplied by it too. The penalty is not part of the loss that a loop prints; `measure()` gives it.
    """

    name = "attention z-loss"
    at_inference = "Nothing: the loss acts in training only."
    at_start = "The output is unchanged, bitwise."

    def __init__(self, strength: float = 1e-4, *, loss_scale: LossScale = 1.0) -> None:
        positive = isinstance(loss_scale, (int, float)) and loss_scale is not True and 0 < loss_scale < math.inf
        if not callable(loss_scale) and not positive:
            raise LocaterError(f"loss_scale must be a positive number, or a function that gives it, got {loss_scale!r}")
        self.strength, self.loss_scale = checked_strength("strength", strength), loss_scale

    def _install(self, model: nn.Module, optimizer: Optimizer | None, undo: ExitStack) -> Installed:
        del optimizer
        latest: dict[str, Tensor] = {}
        names: dict[int, str] = {}

        def wants(module: nn.Module) -> bool:
            del module
            return torch.is_grad_enabled()

        def handle(intercepted: Intercepted, result: Tensor) -> Tensor:
            mean = _mean_square(intercepted) if result.requires_grad else None
            if mean is None:
                return result
            latest[names[id(intercepted.module)]] = mean.detach()
            return penalised(result, self.strength * mean, self.loss_scale)

        found = attention_sites(model)
        intercept(found, Interceptor(wants, handle), undo)
        names.update({id(place.module): place.name for place in found})

        def measure() -> dict[str, float]:
            values = {f"{name}/logsumexp_square": float(value) for name, value in latest.items()}
            return {"penalty": self.strength * sum(values.values()), **values}

        return Installed([place.module for place in found], measure=measure)


def _mean_square(intercepted: Intercepted) -> Tensor | None:
    """Over heads and the queries that are no padding."""
    total, count = [], []
    for call in intercepted.calls:
        if intercepted.logits is not None:  # the module has them all anyway
            wide = torch.promote_types(intercepted.logits.dtype, torch.float32)
            lse, kept = intercepted.logits.to(wide).logsumexp(-1), call
        else:
            whole = call.without_empty()
            if whole is None:
                continue
            lse, kept = logsumexp(whole), whole
        square, counts = squared(lse, None if kept.real is None else kept.real[:, None])
        total.append(square.sum())
        count.append(counts.sum())
    return torch.stack(total).sum() / torch.stack(count).sum().clamp(min=1) if total else None
