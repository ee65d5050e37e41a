"""Weight decay on W_Q and W_K of a model alone, or none on them (`rules.decay`).

It is decoupled, whatever the optimizer does, and finds its part of fused layers. (Decaying both factors is a
nuclear-norm penalty on W_QK in disguise.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from locater.control._numbers import checked_strength
from locater.control._parameters import (
    add_part_,
    attentions_with_weights,
    held_by,
    projections,
    refuse_computed,
    scale_,
)
from locater.control._steps import around_step
from locater.control.apply import Installed, Method
from locater.control.rules.decay import decay_factor
from locater.errors import LocaterError
from locater.models import Projection

__all__ = ["QKDecay"]

_DECOUPLED = {"AdamW", "Muon", "Adafactor"}
_COUPLED = {"SGD", "Adam", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "ASGD", "RMSprop", "SparseAdam"}


class QKDecay(Method):
    """Decays W_Q and W_K by lr · `decay` a step, and by nothing else; 0 takes them out of the optimizer's decay.

    Biases stay with the optimizer. A weight without a gradient is not decayed, as in torch's optimizers.
    """

    name = "QK weight decay"
    at_inference = "Nothing: the weights themselves are smaller."
    at_start = "The output is unchanged, bitwise."

    def __init__(self, decay: float) -> None:
        self.decay = checked_strength("decay", decay)

    def contradicts(self, other: Method) -> str | None:
        return "σReparam divides the scale of the weights out again" if other.name == "σReparam" else None

    def _install(self, model: nn.Module, optimizer: Optimizer | None, undo: ExitStack) -> Installed:
        optimizer = self._optimizer(optimizer)
        known, held = attentions_with_weights(model, self.name), held_by(optimizer)
        refuse_computed(known, self.name, arranged=True)
        parts: dict[tuple[int, str], Projection] = {}  # a parameter that modules share is decayed once
        for attention in known:
            for name, projection in zip(("key", "query"), reversed(projections(attention)), strict=False):
                if id(projection.tensor) in held and projection.tensor.requires_grad:
                    parts[id(projection.tensor), name] = projection
        if not parts:
            raise LocaterError(
                f"this {type(optimizer).__name__} holds none of the query and key weights of the model; "
                "apply QK weight decay with the optimizer that trains them"
            )
        for group, _ in _groups(optimizer, parts.values()):
            _decoupled(optimizer, group)  # refuses what it does not know
            if not isinstance(rate := group.get("lr"), (Real, Tensor)):  # transformers' Adafactor may make its own
                name = type(optimizer).__name__
                raise LocaterError(f"this {name} has no learning rate that QK weight decay could go by: lr is {rate}")

        decayed = list(parts.values())
        # LBFGS evaluates its closure several times a step
        around_step(optimizer, undo, before=lambda: self._decay_(optimizer, decayed), once=True)
        return Installed([model.get_submodule(attention.module) for attention in known])

    @torch.no_grad()
    def _decay_(self, optimizer: Optimizer, parts: list[Projection]) -> None:
        overflow = getattr(optimizer, "found_inf", None)  # a fused optimizer under GradScaler skips its step by itself
        for group, mine in _groups(optimizer, parts):
            rate, own = group["lr"], group.get("weight_decay", 0.0)
            decoupled = _decoupled(optimizer, group)
            if decoupled and not isinstance(rate, Tensor) and rate * own >= 1:
                raise LocaterError(
                    f"a learning rate of {rate:g} with a weight_decay of {own:g} leaves nothing of the weights"
                )
            factor = decay_factor(rate, self.decay, own if decoupled else 0.0)
            for projection in mine:
                tensor = projection.tensor
                if tensor.grad is None:
                    continue
                dtype = torch.promote_types(tensor.dtype, torch.float32)
                factors = torch.ones(1, 1, 1, dtype=dtype, device=tensor.device) * factor
                if overflow is not None:
                    factors = torch.where(overflow.to(tensor.device) > 0, torch.ones_like(factors), factors)
                scale_(projection.tensor, projection.view, factors[..., None], computed=projection.computed)
                if own and not decoupled:  # it will add own · W to the gradient next: that is taken from it
                    grad_scale = getattr(optimizer, "grad_scale", None)
                    amount = own * (1.0 if grad_scale is None else grad_scale)
                    sign = 1 if group.get("maximize") else -1
                    add_part_(tensor.grad, projection, sign * amount)


def _groups(optimizer: Optimizer, parts: Iterable[Projection]) -> Iterator[tuple[dict[str, Any], list[Projection]]]:
    for group in optimizer.param_groups:
        ids = {id(parameter) for parameter in group["params"]}
        mine = [one for one in parts if id(one.tensor) in ids]
        if mine:
            yield group, mine


def _decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the optimizer decays the weights themselves rather than adding to their gradients."""
    if not group.get("weight_decay", 0.0):
        return False
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    for kind in type(optimizer).__mro__:
        # other libraries' of the same name may decay in another way, as transformers' Adafactor does
        if getattr(torch.optim, kind.__name__, None) is kind and kind.__name__ in _DECOUPLED | _COUPLED:
            return kind.__name__ in _DECOUPLED
    raise LocaterError(
        f"how {type(optimizer).__name__} applies its weight_decay is not known; set it to 0 for the group that holds "
        "the query and key weights, and QK weight decay will decay them"
    )
