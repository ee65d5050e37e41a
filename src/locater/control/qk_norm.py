"""QK-norm on a model: queries and keys of every head are normalised where its linear layers put them out.

Legend: G key heads, R query heads for each, K head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from locater.control._numbers import checked_positive, checked_strength
from locater.control._parameters import (
    attentions_with_weights,
    owner_of,
    projections,
    refuse_computed,
    refuse_wrapped,
)
from locater.control._vectors import AddsVectors
from locater.control.apply import Installed
from locater.control.rules.qk_norm import EPS, normalised
from locater.errors import LocaterError
from locater.models import Attention, Projection

__all__ = ["QKNorm"]

_PART = "locater_qk_norm"  # the submodule of an attention module that holds the gains


class QKNorm(AddsVectors):
    """RMS-normalises q and k per head, with learned gains of the head's width (started at `initial_gain`) or none.

    With `queries=False` the keys alone, which then all have one length: half of the cost, and logits that may grow with
    the queries.

    The gains, one vector for the queries of a module and one for its keys, are parameters of the model under
    `<attention module>.locater_qk_norm`; they get a group of their own in the optimizer, without weight decay. A state
    dict with them is loaded into a model that QK-norm is applied to.
    """

    name = "QK-norm"
    at_start = "The output changes: the lengths of q and k are lost, and with them how sharp each head was."

    def __init__(self, *, queries: bool = True, gain: bool = True, eps: float = EPS, initial_gain: float = 1.0) -> None:
        self.queries, self.gain, self.eps = bool(queries), bool(gain), checked_strength("eps", eps)
        norms = "Two norms" if self.queries else "A norm"
        self.at_inference = f"{norms} a layer, which the model has to be run with."
        self.initial_gain = checked_positive("initial_gain", initial_gain)
        if not self.gain and self.initial_gain != 1:
            raise LocaterError("initial_gain is that of learned gains, which gain=False leaves out")

    def _install(self, model: nn.Module, optimizer: Optimizer | None, undo: ExitStack) -> Installed:
        if self.gain:
            self._refuse_muon(optimizer)
        known = attentions_with_weights(model, self.name)
        refuse_computed(known, self.name)
        parts = ("query", "key") if self.queries else ("key",)
        plans = [list(_plan(model, attention, parts)) for attention in known]  # all are checked before one is changed
        if self.gain:
            refuse_wrapped(model, known, self.name)
        modules: list[nn.Module] = []
        gains: list[nn.Parameter] = []
        for attention, plan in zip(known, plans, strict=True):
            module = model.get_submodule(attention.module)
            norm = _Norm(attention, self.eps, self.initial_gain if self.gain else None, parts)
            module.add_module(_PART, norm)
            undo.callback(delattr, module, _PART)
            for layer, names in plan:
                views = {name: projection.bias_view for name, projection in names.items()}
                hook = _Hook(norm, views)
                undo.callback(layer.register_forward_hook(hook).remove)
            modules.append(module)
            gains.extend(norm.parameters())
        if optimizer is not None and gains:
            self._train(gains, optimizer, model, known, undo)
        return Installed(modules, gains)


def _parts(attention: Attention) -> dict[str, Projection]:
    assert attention.query is not None
    return {"query": attention.query, "key": attention.key}


def _plan(
    model: nn.Module, attention: Attention, parts: Sequence[str]
) -> Iterator[tuple[nn.Module, dict[str, Projection]]]:
    """The linear layers whose outputs are, or contain, the queries and keys of a module."""
    module = model.get_submodule(attention.module)
    if hasattr(module, _PART):
        raise LocaterError(f"{attention.module} has a QK-norm already")
    if attention.query_norm is not None or attention.key_norm is not None:
        raise LocaterError(f"{attention.module} ({type(module).__name__}) normalises q and k itself already")
    if attention.query is None:
        raise LocaterError(f"{attention.module} trains W_QK itself: it has no queries and keys to normalise")
    layers: dict[int, tuple[nn.Module, dict[str, Projection]]] = {}
    for part in parts:
        projection = _parts(attention)[part]
        _, layer, name = owner_of(model, projection.tensor)
        if layer is module or name != "weight":
            raise LocaterError(
                f"{attention.module} ({type(module).__name__}) makes q, k and their product in one function, with no "
                "place for QK-norm in it; attention with linear layers for q and k has one"
            )
        layers.setdefault(id(layer), (layer, {}))[1][part] = projection
    yield from layers.values()


class _Norm(nn.Module):
    """The gains of one attention module."""

    def __init__(self, attention: Attention, eps: float, gain: float | None, parts: Sequence[str]) -> None:
        super().__init__()
        self.eps = eps
        weight = attention.key.tensor
        width = attention.key.shape[-2]
        trained = any(one.tensor.requires_grad for one in projections(attention))
        for part in parts:
            start = None if gain is None else torch.full((width,), gain, dtype=weight.dtype, device=weight.device)
            self.register_parameter(part, None if start is None else nn.Parameter(start, trained))

    def normalised(self, part: str, x: Tensor) -> Tensor:
        """x (G, R, K, …)."""
        return normalised(x.movedim(2, -1), getattr(self, part), self.eps).movedim(-1, 2)


class _Hook:
    """Normalises what a linear layer puts out, or the parts of it that are queries and keys."""

    def __init__(self, norm: _Norm, views: dict[str, Callable[[Tensor], Tensor]]) -> None:
        self.norm, self.views = norm, views  # both are copied with the model, and then are the copy's

    def __call__(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        del layer, args
        before, after = output.movedim(-1, 0), output.clone().movedim(-1, 0)  # views show rows, which come first
        for part, view in self.views.items():
            view(after).copy_(self.norm.normalised(part, view(before)))
        return after.movedim(0, -1)
