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
from locater.models.parts import Norm, Projection
from locater.models.positions import PositionBias, PositionKeys, QueryGain
from locater.models.rope import Rope
from locater.qk import QK

__all__ = ["Attention"]

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
    query_gain: QueryGain | None = None
    position_keys: PositionKeys | None = None
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
        """q (B, G, R, T_q, K) and k (B, G, 1, T_k, K) as the head compares them: biases, norms, RoPE, gain applied."""
        if self.query is None:
            raise LocaterError(f"{self.module} trains W_QK itself: it has no separate queries and keys")
        query_states = query_states if self.query_input is None else self.query_input(query_states)
        key_states = key_states if self.key_input is None else self.key_input(key_states)
        q = self._apply(self.query, query_states, self.query_norm, positions[0])
        q = q if self.query_gain is None else q * self.query_gain(positions[0]).to(q)[:, None]
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
        logits = logits * self.scale
        if self.position_keys is not None:
            logits = logits + (self.scale if self.position_keys.scaled else 1.0) * self.position_keys(q, k, positions)
        logits = logits.flatten(1, 2)
        if self.position_bias is not None:
            logits = logits + self.bias_scale * self.position_bias(*positions)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits
