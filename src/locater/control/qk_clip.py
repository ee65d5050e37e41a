"""QK-clip, as MuonClip does it: after a step, heads whose largest logit was above τ have W_Q and W_K scaled down.

    γ = min(1, τ / S),  S the largest scale · q·k of the head since the last step;   W_Q ← √γ W_Q,   W_K ← √γ W_K

and their biases with them, so that each logit of those tokens is multiplied by γ. A key head that several query heads
share is left alone, and W_Q takes all of γ: what belongs to several heads is not changed because of one. So it is where
only W_Q is trained.

Legend: G key heads, R query heads for each.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from locater.control._dense import is_sharded
from locater.control._parameters import held_by, scale_projection_
from locater.control.method import Installed, Method
from locater.errors import LocaterError
from locater.hooks import Call, Intercepted, Interceptor, attention_sites, in_backward, intercept, visible
from locater.measure import attention_statistics
from locater.models import Attention, attentions

__all__ = ["QKClip"]


class QKClip(Method):
    """No head's largest logit above `threshold`, on the batch that set it.

    S is of q·k alone, before softcaps and position biases, over the visible pairs of all forwards in training mode
    since the last step, on all ranks of `group` (torch.distributed's default group where there is one). It is of the
    weights before the step: the step's own change comes on top, as does what clipping a layer does to the inputs of
    the next.

    A step without a finite S, as after an overflow, clips nothing. The optimizer's moments are left alone.
    """

    name = "QK-clip"
    at_inference = "Nothing: the weights themselves are scaled."
    at_start = "The output is unchanged, bitwise, until a step clips."

    def __init__(self, threshold: float = 100.0, *, group: dist.ProcessGroup | None = None) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 < threshold < math.inf:
            raise LocaterError(f"threshold must be a positive, finite number, got {threshold!r:.80}")
        self.threshold, self.group = float(threshold), group

    def contradicts(self, other: Method) -> str | None:
        if other.name in ("QK-norm", "σReparam"):
            return f"{other.name} divides out again what QK-clip scales"
        return None

    def _install(self, model: nn.Module, optimizer: Optimizer | None, undo: ExitStack) -> Installed:
        optimizer = self._optimizer(optimizer)
        known, held = attentions(model), held_by(optimizer)
        heads = {attention.module: _Heads.of(attention, held) for attention in known}
        by_module: dict[int, _Heads] = {}

        def wants(module: nn.Module) -> bool:
            return module.training and id(module) in by_module and not in_backward()

        def tell(intercepted: Intercepted, result: Tensor) -> Tensor:
            by_module[id(intercepted.module)].add(intercepted)
            return result

        found = attention_sites(model)
        intercept(found, Interceptor(wants, tell), undo)
        for place in found:
            if place.name in heads:
                by_module[id(place.module)] = heads[place.name]
        deaf = sorted(heads.keys() - {one.attention.module for one in by_module.values()})
        if deaf:
            raise LocaterError(f"QK-clip cannot hear the logits of {deaf[0]}: its attention is computed elsewhere")

        def after_step(*_: Any) -> None:
            self._clip(list(heads.values()))

        undo.callback(optimizer.register_step_post_hook(after_step).remove)

        def measure() -> dict[str, float]:
            return {f"{name}/max_logit": float(one.clipped_at.max()) for name, one in heads.items()}

        return Installed([model.get_submodule(name) for name in heads], measure=measure)

    @torch.no_grad()
    def _clip(self, heads: list[_Heads]) -> None:
        device = heads[0].largest.device
        largest = torch.cat([one.largest.to(device).flatten() for one in heads])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        above = (largest > self.threshold) & largest.isfinite()
        gamma = torch.where(above, self.threshold / largest, 1.0)
        # scaling by 1 costs less than asking a device; for shards, the factors have to be built whole first
        quiet = is_sharded(heads[0].attention.key.tensor) and not bool(above.any())
        sizes = [one.largest.numel() for one in heads]
        for one, top, factor in zip(heads, largest.split(sizes), gamma.split(sizes), strict=True):
            one.clipped_at = top.view_as(one.largest).to(one.largest.device)
            one.largest = torch.full_like(one.largest, -math.inf)
            if not quiet:
                one.scale_(factor.view_as(one.largest).to(one.largest.device))


@dataclass
class _Heads:
    """The heads of one module, the largest logit of each so far, and which of its weights may be scaled."""

    attention: Attention
    moves: tuple[bool, bool]  # query, key
    largest: Tensor  # (G, R) since the last step
    clipped_at: Tensor  # at the last step

    @classmethod
    def of(cls, attention: Attention, held: set[int]) -> _Heads:
        if attention.query_norm is not None or attention.key_norm is not None:
            raise LocaterError(f"{attention.module} normalises q and k itself, so QK-clip's scaling would do nothing")
        key = attention.key
        parts = (attention.query, key)
        moves = tuple(p is not None and p.tensor.requires_grad and id(p.tensor) in held for p in parts)
        if not any(moves):
            raise LocaterError(
                f"the optimizer trains neither W_Q nor W_K of {attention.module}; apply QK-clip with the one that does"
            )
        shape = key.view(torch.empty(key.tensor.shape, device="meta")).shape
        if attention.query is not None:
            shape = attention.query.view(torch.empty(attention.query.tensor.shape, device="meta")).shape
        largest = torch.full(shape[:2], -math.inf, device=key.tensor.device)
        return cls(attention, (moves[0], moves[1]), largest, largest.clone())

    @torch.no_grad()
    def add(self, intercepted: Intercepted) -> None:
        for call in _products(intercepted, self.attention):
            statistics = attention_statistics(call.q, call.k, **call.options())
            top = statistics.max_logit.float()  # (B, H, Tq)
            if call.real is not None:
                top = top.masked_fill(~call.real[:, None], -math.inf)
            found = top.amax((0, 2))
            if found.numel() != self.largest.numel():
                raise LocaterError(
                    f"{self.attention.module} has {self.largest.numel()} heads and computed {found.numel()}; QK-clip "
                    "does not work with heads spread over ranks (tensor parallelism)"
                )
            self.largest = torch.maximum(self.largest.to(found.device), found.view_as(self.largest))

    def scale_(self, gamma: Tensor) -> None:
        """Multiplies every logit of head (g, r) by gamma (G, R)."""
        query, key = self.attention.query, self.attention.key
        if query is not None and self.moves[0]:
            both = self.moves[1] and gamma.shape[1] == 1
            scale_projection_(query, gamma.sqrt() if both else gamma, bias=True)
            if both:
                scale_projection_(key, gamma.sqrt(), bias=True)
        else:  # the query is frozen, or W_QK one matrix: a shared key follows the largest of its heads
            scale_projection_(key, gamma.amin(1, keepdim=True), bias=True)


def _products(intercepted: Intercepted, attention: Attention) -> list[Call]:
    """The calls with nothing but q·k in their logits; masks become what is visible."""
    calls = [call for one in intercepted.calls if (call := one.without_empty()) is not None]
    if intercepted.logits is None:
        return [_bare(call, call.q, call.k, call.scale) for call in calls]
    call = intercepted.calls[0]
    b, h, tq, tk = call.sizes
    if intercepted.product is not None:
        q, k = (x.detach() for x in intercepted.product)
        q, k = (x.reshape(b, -1, *x.shape[-2:]) for x in (q, k))
        if q.shape[1:3] == (h, tq) and k.shape[2] == tk and h % k.shape[1] == 0 and q.shape[3] == k.shape[3]:
            whole = _bare(call, q, k, attention.scale).without_empty()
            return [] if whole is None else [whole]
    if attention.position_bias is not None:
        raise LocaterError(f"QK-clip cannot tell q·k from the position bias in the logits of {attention.module}")
    return calls


def _bare(call: Call, q: Tensor, k: Tensor, scale: float | None) -> Call:
    bias = None if call.bias is None else visible(call.bias)
    return Call(q.detach(), k.detach(), scale, None, call.causal, call.window, call.key_mask, bias, call.real)
