"""Σ as a model sees it: the covariance of the states that enter each attention module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.models.registry import attentions

__all__ = ["covariances"]


@torch.no_grad()
def covariances(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Covariance (D, D) of the hidden states entering each attention module, over all tokens of `batches`.

    Each batch is passed to the model as keyword arguments. About the mean, in float64; padding is not told apart:
    give batches without it. For cross attention it is that of the queries.
    """
    sums: dict[str, tuple[int, Tensor, Tensor]] = {}

    def hook(name: str) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            states = args[0] if args else kwargs.get("hidden_states", kwargs.get("query"))
            if not isinstance(states, Tensor):
                raise LocaterError(f"{name} was called without hidden states")
            x = states.detach().reshape(-1, states.shape[-1]).double()
            count, total, square = sums.get(name, (0, 0.0, 0.0))
            sums[name] = (count + len(x), total + x.sum(0), square + x.T @ x)

        return before

    names = {attention.module for attention in attentions(model)}
    handles = [
        module.register_forward_pre_hook(hook(name), with_kwargs=True)
        for name, module in model.named_modules()
        if name in names
    ]
    try:
        for batch in batches:
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    if not sums:
        raise LocaterError("no batch reached an attention module; give at least one")
    return {
        name: square / count - torch.outer(total / count, total / count)
        for name, (count, total, square) in sums.items()
    }
