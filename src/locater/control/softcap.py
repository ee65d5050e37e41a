"""Softcap on a model: no logit beyond ±c (`rules.softcap`).

Paths that can take it, of Hugging Face's attention interface: eager (computed here, since only a few families' own
eager functions cap), flash_attention (its kernels cap) and flex_attention (as a score_mod). torch's
scaled_dot_product_attention, nn.MultiheadAttention and modules that compute their logits themselves have no place for
it.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from locater.control._numbers import checked_positive
from locater.control.apply import Installed, Method
from locater.control.rules.softcap import softcapped
from locater.errors import LocaterError
from locater.hooks import AttentionSite, Patch, implementation_of, interface_site, patch, reads_attribute
from locater.models.proof import may_be_attention

__all__ = ["Softcap"]

_OWN = "attn_logit_softcapping"  # the attribute of modules that know of softcaps


class Softcap(Method):
    """c · tanh(s / c) on the scaled logits q·k, before position biases and masks; 50 is Gemma 2's."""

    name = "softcap"
    at_inference = "The cap, in every attention call: the model has to be run with it, on a path that takes it."
    at_start = "The output changes: a logit s by about s³/(3c²), nothing while logits are far below the cap."

    def __init__(self, cap: float = 50.0) -> None:
        self.cap = checked_positive("cap", cap)

    def _install(self, model: nn.Module, optimizer: Optimizer | None, undo: ExitStack) -> Installed:
        del optimizer
        found = _capable(model)
        for place in found:
            module = place.module
            if reads_attribute(module, _OWN):
                setattr(module, _OWN, self.cap)
                undo.callback(setattr, module, _OWN, None)
                continue
            eager = [patch(*where) for implementation, *where in place.functions() if implementation == "eager"]
            for one in eager:
                one.replace(module, capped_attention, undo)
            hook = _HandOn(self.cap, eager)
            undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        return Installed([place.module for place in found])


def _capable(model: nn.Module) -> list[AttentionSite]:
    """The attention modules of the model, if all of them can take a cap."""
    found = []
    for name, module in model.named_modules():
        place = interface_site(name, module)
        if place is not None:
            _check_path(name, module)
            own = getattr(module, _OWN, None) if reads_attribute(module, _OWN) else None
            if own is not None:
                raise LocaterError(f"{name} caps its logits at {own:g} already; change that in its configuration")
            found.append(place)
        elif may_be_attention(module) and not any(interface_site(n, part) for n, part in module.named_modules()):
            kind = type(module).__name__
            raise LocaterError(
                f"{name or kind} ({kind}) computes its attention by itself, where a softcap has no place; modules that "
                "use transformers' attention interface can take one"
            )
    if not found:
        raise LocaterError(
            f"no attention in {type(model).__name__} takes a softcap; modules that use transformers' interface do"
        )
    return found


def _check_path(name: str, module: nn.Module) -> None:
    used = implementation_of(module)
    if used == "eager" and getattr(module, "reorder_and_upcast_attn", False):
        used = "reorder_and_upcast_attn"
    if used not in ("eager", "flex_attention") and "flash" not in used:
        raise LocaterError(
            f"{name} ({type(module).__name__}) runs on {used!r}, which cannot cap logits; "
            'model.set_attn_implementation("eager"), "flex_attention" or "flash_attention_2" can'
        )


class _HandOn:
    """Gives a module the cap to hand on to its attention function, having made sure that it heeds it.

    A copy of the model shares it, and is capped as long as the model is.
    """

    def __init__(self, cap: float, eager: list[Patch]) -> None:
        self._cap, self._eager = cap, eager

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kind = type(module).__name__
        _check_path(kind, module)
        if implementation_of(module) == "eager" and any(one.instead is None for one in self._eager):
            raise LocaterError(f"this {kind} is a copy of one whose softcap has been removed; it cannot be run")
        return args, {**kwargs, "softcap": self._cap}

    def __deepcopy__(self, memo: dict[int, Any]) -> _HandOn:
        return self


def capped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float = math.inf,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Eager attention as transformers' families have it, with a cap: (B, Tq, H, K) and the probabilities.

    Sinks `s_aux` (H,) are logits without a key, and are not capped.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    s = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    s = softcapped(s, softcap)
    if position_bias is not None:
        s = s + position_bias
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[2]]
        s = s.masked_fill(~mask, torch.finfo(s.dtype).min) if mask.dtype == torch.bool else s + mask
    if s_aux is not None:
        s = torch.cat([s, s_aux.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)
    p = functional.softmax(s, dim=-1, dtype=torch.promote_types(s.dtype, torch.float32)).to(query.dtype)
    p = p[..., : key.shape[2]]
    p = functional.dropout(p, dropout, training=module.training)
    return (p @ value).transpose(1, 2).contiguous(), p
