"""One attention module, taken apart: W_Q, W_K and everything else its logits depend on.

Legend: B batch, T tokens, G key heads (groups), R query heads per group, K head width, D model width.
Query heads are numbered g·R + r, as every library does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.models.rope import Rope
from locater.qk import QK

__all__ = ["Alibi", "Attention", "Norm", "Projection", "RelativeBias", "TableBias"]


@dataclass(frozen=True)
class Projection:
    """A projection's weight inside the tensor that stores it.

    `view` maps the stored tensor, or its gradient, to (G, R or 1, K, D) without copying: what is written
    there is written into the model. Where the weight is `computed`, it makes it of `tensor` and `others` instead:
    gradients reach them through autograd. Without others, it arranges entries of `tensor`, each at most once, among
    constants.
    """

    tensor: Tensor
    view: Callable[..., Tensor]
    bias_tensor: Tensor | None = None
    bias_view: Callable[[Tensor], Tensor] = lambda tensor: tensor
    others: tuple[Tensor, ...] = ()
    computed: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every parameter of the weight."""
        return (self.tensor, *self.others)

    @property
    def weight(self) -> Tensor:
        return self.view(*self.tensors)

    @property
    def shape(self) -> torch.Size:
        """The weight's, none of which is made."""
        return self.view(*(torch.empty(tensor.shape, device="meta") for tensor in self.tensors)).shape

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Projection:
        """Made of what the function makes of each parameter."""
        return replace(self, tensor=function(self.tensor), others=tuple(map(function, self.others)))

    @property
    def bias(self) -> Tensor | None:
        """(G, R or 1, K)."""
        return None if self.bias_tensor is None else self.bias_view(self.bias_tensor)


@dataclass(frozen=True)
class Norm:
    """RMSNorm or LayerNorm with its gain, over the last dimension."""

    stored: Tensor | None  # the gain, or what is added to `base` to give it
    eps: float
    centred: bool = False  # LayerNorm subtracts the mean
    bias: Tensor | None = None
    base: float = 0.0
    joint: bool = False  # over all heads (B, G, R, T, K) of a token together
    after_rope: bool = False

    @property
    def gain(self) -> Tensor | None:
        """As it is now: what is stored may be trained."""
        return self.stored if self.stored is None or not self.base else self.base + self.stored

    def __call__(self, x: Tensor) -> Tensor:
        over = (-4, -3, -1) if self.joint else (-1,)
        if self.centred:
            x = x - x.mean(over, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(over, keepdim=True) + self.eps)
        if (gain := self.gain) is not None:
            x = x * gain
        return x if self.bias is None else x + self.bias

    def fold(self, weight: Tensor) -> Tensor:
        """The linear part of the norm (gain, centring) folded into a weight (..., D) that follows it."""
        if (gain := self.gain) is not None:
            weight = weight * gain.to(weight.dtype)
        return weight - weight.mean(-1, keepdim=True) if self.centred else weight


@dataclass(frozen=True)
class Alibi:
    """slope · key position, added to the logits."""

    slopes: Tensor  # (heads,)
    rounded: bool = False  # Falcon multiplies in bfloat16

    @classmethod
    def of(cls, heads: int, *, rounded: bool = False) -> Alibi:
        """2^(−8h/n) for a power of two n; the heads beyond one take every other slope of 2n."""
        power = 1 << (heads.bit_length() - 1)
        slopes = 2.0 ** (-8.0 * torch.arange(1, power + 1) / power)
        between = 2.0 ** (-8.0 * torch.arange(1, 2 * (heads - power) + 1, 2) / (2 * power))
        return cls(torch.cat([slopes, between]), rounded)

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        del query  # a shift by the query's position does not change a softmax
        slopes = self.slopes.bfloat16() if self.rounded else self.slopes
        return (slopes[:, None] * key[None].to(slopes.device))[:, None, :].to(torch.float32)


@dataclass(frozen=True)
class RelativeBias:
    """T5's learned bias per bucket of relative position."""

    table: Tensor  # (buckets, heads)
    bidirectional: bool
    max_distance: int

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        relative = key[None, :] - query[:, None]
        buckets, start = len(self.table), torch.zeros_like(relative)
        if self.bidirectional:
            buckets //= 2
            start = (relative > 0).long() * buckets
            distance = relative.abs()
        else:
            distance = (-relative).clamp(min=0)
        exact = buckets // 2
        large = exact + (
            torch.log(distance.float().clamp(min=1) / exact)
            / math.log(self.max_distance / exact)
            * (buckets - exact)
        ).long().clamp(max=buckets - exact - 1)  # fmt: skip
        bucket = start + torch.where(distance < exact, distance, large)
        return self.table[bucket].permute(2, 0, 1)  # (heads, T_q, T_k)


@dataclass(frozen=True)
class TableBias:
    """A learned bias for every pair of places in a window, as rows of a table."""

    table: Tensor  # (rows, heads)
    index: Tensor  # (T_q, T_k)

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        del query, key  # a window has its own places
        return self.table[self.index.to(self.table.device)].permute(2, 0, 1)


PositionBias = Callable[[Tensor, Tensor], Tensor]
States = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Attention:
    """One attention module of a model."""

    module: str  # its dotted name
    layer: int
    kind: str  # self, cross; encoder and decoder where a model has both
    query: Projection | None  # None where W_QK is trained itself, as `key`
    key: Projection
    scale: float  # of the logits, commonly 1/√K
    rope: Rope | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    softcap: float | None = None
    position_bias: PositionBias | None = None
    bias_scale: float = 1.0  # of position_bias
    input_norm: Norm | None = field(default=None, repr=False)
    # what W_Q and W_K act on, made of the states that enter the module; those states themselves where None
    query_input: States | None = field(default=None, repr=False)
    key_input: States | None = field(default=None, repr=False)
    inner: str = ""  # a layer of the module's own that makes the states W_Q or W_K acts on, where one does
    layers: tuple[int, ...] = ()  # those that use the module, where several do
    shared_key_rows: int = 0  # the first rows of every head's keys are constants: they pass on a key that heads share

    @property
    def heads(self) -> int:
        return math.prod(self.qk().shape)

    @property
    def one_input(self) -> bool:
        """Whether W_Q and W_K act on states of one space."""
        return self.query_input is None and self.key_input is None and not self.inner

    def per_layer(self) -> list[Attention]:
        """The module as each of the layers that share it uses it, under its name and the layer's number."""
        return [replace(self, module=f"{self.module}@{n}", layer=n, layers=()) for n in self.layers] or [self]

    def qk(self) -> QK:
        """W_QK of every head, leading shape (G, R): of the weights alone, without norms and rotation."""
        if self.query is None:
            return QK.from_joint(self.key.weight)
        return QK(self.query.weight, self.key.weight, one_input=self.one_input)

    def qk_at(self, offset: float = 0.0, *, fold_norm: bool = False) -> QK:
        """W_QK as it acts on a query and a key `offset` positions after it (negative for causal attention).

        With `fold_norm`, the gain (and centring) of the norm before attention is folded in: into W_Q alone where keys
        are made of other states.
        """
        qk = self.qk()
        w_q, w_k = qk.w_q, qk.w_k
        if fold_norm:
            if self.input_norm is None:
                raise LocaterError(f"{self.module} has no norm before it to fold in")
            w_q, w_k = self.input_norm.fold(w_q), self.input_norm.fold(w_k) if qk.square else w_k
        if self.rope is not None and (offset != 0 or self.rope.gain != 1):
            w_q = w_q if self.rope.gain == 1 else self.rope.rotate_rows(w_q, 0.0)
            w_k = self.rope.rotate_rows(w_k, offset)
        return QK(w_q, w_k, one_input=self.one_input)

    def qk_mean(self, offsets: int, *, fold_norm: bool = False) -> QK:
        """W_QK averaged over the offsets 0, −1, …, 1 − `offsets`: what is left of it when positions vary."""
        qk = self.qk_at(0.0, fold_norm=fold_norm)
        if self.rope is None:
            return qk
        rope = replace(self.rope, gain=1.0)  # which is in the factors already
        w_k = torch.stack([rope.rotate_rows(qk.w_k, -float(offset)) for offset in range(offsets)]).mean(0)
        return QK(qk.w_q, w_k, one_input=self.one_input)

    def project(
        self, query_states: Tensor, key_states: Tensor, positions: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """q (B, G, R, T_q, K) and k (B, G, 1, T_k, K) as the head compares them: biases, norms and RoPE applied."""
        if self.query is None:
            raise LocaterError(f"{self.module} trains W_QK itself: it has no separate queries and keys")
        query_states = query_states if self.query_input is None else self.query_input(query_states)
        key_states = key_states if self.key_input is None else self.key_input(key_states)
        q = self._apply(self.query, query_states, self.query_norm, positions[0])
        return q, self._apply(self.key, key_states, self.key_norm, positions[1])

    def _apply(self, projection: Projection, states: Tensor, norm: Norm | None, position: Tensor) -> Tensor:
        x = torch.einsum("btd,grkd->bgrtk", states, projection.weight)
        if projection.bias is not None:
            x = x + projection.bias[:, :, None, :]
        if norm is not None and not norm.after_rope:
            x = norm(x)
        x = x if self.rope is None else self.rope.rotate(x, position)
        return norm(x) if norm is not None and norm.after_rope else x

    def logits(
        self, query_states: Tensor, key_states: Tensor | None = None, *, positions: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """The pre-softmax logits (B, heads, T_q, T_k) for the states (B, T, D) that enter the module, unmasked."""
        if key_states is None and self.inner:
            raise LocaterError(
                f"{self.module} compares states that {self.inner} makes inside it: give logits the states that W_Q and "
                "W_K act on, both"
            )
        key_states = query_states if key_states is None else key_states
        if positions is None:
            lengths = query_states.shape[1], key_states.shape[1]
            positions = (
                torch.arange(lengths[0], device=query_states.device),
                torch.arange(lengths[1], device=key_states.device),
            )
        if self.query is None:
            logits = torch.einsum("bqd,grde,bke->bgrqk", query_states, self.key.weight, key_states)
        else:
            q, k = self.project(query_states, key_states, positions)
            logits = q @ k.mT
        logits = (logits * self.scale).flatten(1, 2)
        if self.position_bias is not None:
            logits = logits + self.bias_scale * self.position_bias(*positions)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits
