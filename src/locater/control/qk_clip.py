"""QK-clip on a model: after a step, heads whose largest logit was above τ have W_Q and W_K scaled down.

`rules.qk_clip` has the formula; here the largest logit of each head since the last step is recorded.

Legend: G key heads, R query heads for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from locater.control._numbers import checked_positive
from locater.control._parameters import (
    attentions_with_weights,
    held_by,
    is_sharded,
    projections,
    refuse_computed,
    scale_,
)
from locater.control._steps import around_step
from locater.control.apply import Installed, Method
from locater.control.rules.qk_clip import clip_factors
from locater.errors import LocaterError
from locater.hooks import Call, Intercepted, Interceptor, attention_sites, in_backward, intercept, visible
from locater.measure import attention_statistics
from locater.models import Attention
from locater.names import plain_name

__all__ = ["QKClip"]


class QKClip(Method):
    """No head's largest logit above `threshold`, on the batch that set it.

    S is of q·k alone, before softcaps and position biases, over the visible pairs of all forwards since the last step
    that record gradients or are in training mode, on all ranks of `group` (torch.distributed's default group where
    there is one). It is of the weights before the step: the step's own change comes on top, as does what clipping a
    layer does to the inputs of the next.

    In latent attention (MLA) all heads share a rotary key: it stays, the queries' rotary rows take all of γ, and the
    other rows of queries and keys √γ each, as Kimi K2 does.

    A step without a finite S, as after an overflow, clips nothing. The optimizer's moments are left alone.
    """

    name = "QK-clip"
    at_inference = "Nothing: the weights themselves are scaled."
    at_start = "The output is unchanged, bitwise, until a step clips."

    def __init__(self, threshold: float = 100.0, *, group: dist.ProcessGroup | None = None) -> None:
        self.threshold, self.group = checked_positive("threshold", threshold), group

    def contradicts(self, other: Method) -> str | None:
        if other.name in ("QK-norm", "σReparam"):
            return f"{other.name} divides out again what QK-clip scales"
        return None

    def _install(self, model: nn.Module, optimizer: Optimizer | None, undo: ExitStack) -> Installed:
        optimizer = self._optimizer(optimizer)
        known, held = attentions_with_weights(model, self.name), held_by(optimizer)
        refuse_computed(known, self.name, arranged=True)
        known = [each for each in known if any(one.tensor.requires_grad for one in projections(each))]
        if not known:
            raise LocaterError("all query and key weights of the model are frozen; QK-clip has none to scale")
        heads = {plain_name(attention.module): _Largest.of(attention, held) for attention in known}
        by_module: dict[int, _Largest] = {}

        def wants(module: nn.Module) -> bool:
            # gradients are not recorded where checkpointing is to compute a forward again in backward
            trains = torch.is_grad_enabled() or module.training
            return trains and id(module) in by_module and not in_backward()

        def handle(intercepted: Intercepted, result: Tensor) -> Tensor:
            by_module[id(intercepted.module)].add(intercepted)
            return result

        found = attention_sites(model)
        intercept(found, Interceptor(wants, handle), undo)
        for place in found:
            if place.name in heads:
                by_module[id(place.module)] = heads[place.name]
        not_hooked = sorted(heads.keys() - {plain_name(one.attention.module) for one in by_module.values()})
        if not_hooked:
            raise LocaterError(
                f"QK-clip cannot intercept the logits of {not_hooked[0]}: its attention is computed elsewhere"
            )

        around_step(optimizer, undo, after=lambda: self._clip(list(heads.values())))

        def measure() -> dict[str, float]:
            return {f"{name}/max_logit": float(one.clipped_at.max()) for name, one in heads.items()}

        return Installed([model.get_submodule(attention.module) for attention in known], measure=measure)

    @torch.no_grad()
    def _clip(self, heads: list[_Largest]) -> None:
        device = heads[0].largest.device
        largest = torch.cat([one.largest.to(device).flatten() for one in heads])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        # scaling by 1 costs less than asking a device; for shards, the factors have to be built whole first
        quiet = is_sharded(heads[0].attention.key.tensor) and not bool((largest > self.threshold).any())
        for one, top in zip(heads, largest.split([one.largest.numel() for one in heads]), strict=True):
            one.clipped_at = top.view_as(one.largest).to(one.largest.device)
            one.largest = torch.full_like(one.largest, -math.inf)
        if not quiet:
            self._scale_(heads)

    def _scale_(self, heads: list[_Largest]) -> None:
        """What several share is scaled once, as the largest of their logits asks."""
        asked: dict[tuple[int, int], tuple[_Part, Tensor]] = {}
        for one in heads:
            factors = one.factors(self.threshold)
            for place, part in one.parts.items():
                factor = factors[part.which][..., None]
                least = torch.minimum(factor, asked[place][1]) if place in asked else factor
                asked[place] = part, least
        for part, factor in asked.values():
            scale_(part.tensor, part.view, factor, computed=part.computed)


class _Part(NamedTuple):
    """Entries of a parameter, which `view` shows as (G, R or 1, K, ·)."""

    which: int  # 0 where they are scaled as queries, 1 as keys
    tensor: Tensor
    view: Callable[[Tensor], Tensor]
    computed: bool = False

    def place(self) -> tuple[int, int]:
        """Where the entries are: the same for two parts that are the same entries."""
        shown = self.view(torch.empty(self.tensor.shape, device="meta"))
        return id(self.tensor), int(shown.storage_offset())


def _parts(attention: Attention, trained: tuple[bool, bool]) -> Iterator[_Part]:
    """What is scaled: not keys that several query heads share, where there are queries to scale."""
    shared = (attention.query or attention.key).shape[1] > 1
    changed = (trained[0], trained[1] and not (trained[0] and shared))
    for index, projection in enumerate((attention.query, attention.key)):
        if projection is not None and changed[index]:
            yield _Part(index, projection.tensor, projection.view, projection.computed)
            if projection.bias_tensor is not None:
                yield _Part(index, projection.bias_tensor, partial(_column, projection.bias_view))
    content = getattr(attention.position_keys, "content", None)
    if content is not None and trained[0] and content.requires_grad:  # a bias of the queries, too
        yield _Part(0, content, lambda bias: bias[..., None])


def _column(view: Callable[[Tensor], Tensor], bias: Tensor) -> Tensor:
    return view(bias)[..., None]


@dataclass
class _Largest:
    """The heads of one module, the largest logit of each so far, and which of its weights may be scaled."""

    attention: Attention
    trained: tuple[bool, bool]  # query, key
    largest: Tensor  # (G, R) since the last step
    clipped_at: Tensor  # at the last step
    parts: dict[tuple[int, int], _Part] = field(default_factory=dict)  # what is scaled, by its place
    product_scale: float | None = None  # of a product that is seen by itself, once one was

    @classmethod
    def of(cls, attention: Attention, held: set[int]) -> _Largest:
        if attention.query_norm is not None or attention.key_norm is not None:
            raise LocaterError(f"{attention.module} normalises q and k itself, so QK-clip's scaling would do nothing")
        key = attention.key
        parts = (attention.query, key)
        trained = tuple(p is not None and p.tensor.requires_grad and id(p.tensor) in held for p in parts)
        if not any(trained) or (attention.shared_key_rows and not trained[0]):
            missing = "no W_Q" if any(trained) else "neither W_Q nor W_K"
            raise LocaterError(
                f"the optimizer trains {missing} of {attention.module}; apply QK-clip with the one that does"
            )
        shape = (attention.query or key).shape
        largest = torch.full(shape[:2], -math.inf, device=key.tensor.device)
        both = (trained[0], trained[1])
        scaled = {part.place(): part for part in _parts(attention, both)}
        return cls(attention, both, largest, largest.clone(), scaled)

    @torch.no_grad()
    def add(self, intercepted: Intercepted) -> None:
        for call in self._products(intercepted):
            statistics = attention_statistics(call.q, call.k, rho=False, **call.options())
            top = statistics.max_logit  # (B, H, Tq)
            if call.real is not None:
                top = top.masked_fill(~call.real[:, None], -math.inf)
            found = top.amax((0, 2))
            if found.numel() != self.largest.numel():
                raise LocaterError(
                    f"{self.attention.module} has {self.largest.numel()} heads and computed {found.numel()}; QK-clip "
                    "does not work with heads spread over ranks (tensor parallelism)"
                )
            self.largest = torch.maximum(self.largest.to(found.device), found.view_as(self.largest))

    def _products(self, intercepted: Intercepted) -> list[Call]:
        """The calls with nothing but q·k in their logits; masks become what is visible."""
        attention = self.attention
        calls = [call for one in intercepted.calls if (call := one.without_empty()) is not None]
        if intercepted.logits is None or not calls:
            return [_bare(call, call.q, call.k, call.scale) for call in calls]
        call = intercepted.calls[0]
        b, h, tq, tk = call.sizes
        if intercepted.product is not None:
            q, k = (x.detach() for x in intercepted.product)
            q, k = (x.reshape(b, -1, *x.shape[-2:]) for x in (q, k))
            if q.shape[1:3] == (h, tq) and k.shape[2] == tk and h % k.shape[1] == 0 and q.shape[3] == k.shape[3]:
                if self.product_scale is None:
                    self.product_scale = _scale_between(q[0, 0], k[0, 0], intercepted.logits[0, 0], attention.scale)
                whole = _bare(call, q, k, self.product_scale).without_empty()
                return [] if whole is None else [whole]
        if attention.position_bias is not None or attention.position_keys is not None:
            raise LocaterError(f"QK-clip cannot tell q·k from the position bias in the logits of {attention.module}")
        return calls

    def factors(self, threshold: float) -> tuple[Tensor, Tensor]:
        """Of queries and keys (G, R or 1, K or 1), by what the last step's largest logits (G, R) ask for."""
        shared = self.clipped_at.shape[1] > 1
        f_q, f_k = (one[..., None] for one in clip_factors(self.clipped_at, threshold, self.trained, shared))
        if fixed := self.attention.shared_key_rows:  # the queries' rows take the keys' part of those that stay
            own = torch.arange(self.attention.key.shape[-2], device=f_q.device) >= fixed
            f_q, f_k = torch.where(own, f_q, f_q * f_k), torch.where(own, f_k, 1.0)
        return f_q, f_k


def _bare(call: Call, q: Tensor, k: Tensor, scale: float | None) -> Call:
    bias = None if call.bias is None else visible(call.bias)
    return Call(q.detach(), k.detach(), scale, None, call.causal, call.window, call.key_mask, bias, call.real)


def _scale_between(q: Tensor, k: Tensor, logits: Tensor, scale: float) -> float:
    """What a product q·k is multiplied by on its way to logits: `scale`, or 1 where it is in the queries already."""
    product, logits = (q @ k.mT).float(), logits.detach().float()
    seen = logits > logits.amax(-1, keepdim=True) - 50
    x, y = (each[seen] - each[seen].mean() for each in (product, logits))
    slope = float((x * y).sum() / x.square().sum())
    return min((scale, 1.0), key=lambda one: abs(math.log(slope / one))) if slope > 0 else scale
