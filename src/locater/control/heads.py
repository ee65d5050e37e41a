"""Heads: W_Q, W_K and all else that the size of a head's logits depends on, with any leading dimensions.

A model's attention modules are read into it, those of one shape together, and written back; the lab's stacks are
models × layers.

Legend: S modules, G key heads, R query heads for each, K head width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from locater.control._parameters import gathered, is_sharded, projections, spread
from locater.models import Attention, Norm, Rope
from locater.qk import QK

__all__ = ["Heads", "read_heads", "rotary_scale", "write_heads"]

Pair: TypeAlias = tuple[Tensor | None, Tensor | None]
View: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Heads:
    """What a rule is given, and gives."""

    qk: QK  # (…, R, K, D), and (…, 1, K, D) where query heads share a key
    logit_scale: float
    biases: Pair = (None, None)  # of queries and keys (…, K)
    norm: Norm | None = None  # before attention, broadcasting against the weights
    rope: Rope | None = None
    trained: tuple[bool, bool] = (True, True)  # whether W_Q and W_K may be changed

    @property
    def shared_keys(self) -> bool:
        return self.qk.w_k.shape[-3] < self.qk.w_q.shape[-3]

    def with_weights(self, w_q: Tensor, w_k: Tensor) -> Heads:
        return replace(self, qk=QK(w_q, w_k))

    def scaled(self, f_q: Tensor, f_k: Tensor) -> Heads:
        """Weights and biases of each head multiplied by its factors (…)."""
        biases = tuple(
            None if bias is None else bias * f[..., None] for bias, f in zip(self.biases, (f_q, f_k), strict=True)
        )
        w_q, w_k = self.qk.w_q * f_q[..., None, None], self.qk.w_k * f_k[..., None, None]
        return replace(self, qk=QK(w_q, w_k), biases=(biases[0], biases[1]))

    def scale(self) -> Tensor:
        """tr(W_QKᵀW_QK) (…); with rotary positions the largest that any offset can make it, or a bound of that."""
        w_q, w_k = self.qk.w_q, self.qk.w_k
        return rotary_scale(w_q @ w_q.mT, w_k @ w_k.mT, self.rope)

    def effective_scale(self) -> Tensor:
        """`scale` with the norm before attention and the biases folded in: the variance of q·k between independent
        tokens whose coordinates have unit variance where the norm scales them.

        The norm's gain is trained too, and may grow where W_QK does not. What all queries have in common, a bias and
        the norm's shift, is compared with every key. What all keys have in common moves all logits of a query alike,
        which a softmax does not see, unless keys are rotated with their position.
        """
        gram_q = self._effective_gram(self.qk.w_q, self.biases[0], True)
        gram_k = self._effective_gram(self.qk.w_k, self.biases[1], self.rope is not None, self.qk.square)
        return rotary_scale(gram_q, gram_k, self.rope)

    def _effective_gram(self, w: Tensor, bias: Tensor | None, with_common: bool, normed: bool = True) -> Tensor:
        """E[x xᵀ] (…, K, K) of queries or keys x, with or without what all of them have in common.

        The norm is that of the queries' states: keys that are made of others are not `normed`.
        """
        norm = self.norm if normed else None
        folded = w if norm is None else norm.fold(w)
        gram = folded @ folded.mT
        if norm is not None and norm.centred:  # D coordinates of mean 0 are D long in D − 1 dimensions
            gram = gram * (w.shape[-1] / max(1, w.shape[-1] - 1))
        shift = None if norm is None else norm.bias
        if not with_common or (bias is None and shift is None):
            return gram
        common = torch.zeros_like(w[..., :1]) if bias is None else bias[..., None]  # (…, K, 1)
        common = common if shift is None else common + w @ torch.atleast_2d(shift).mT.to(w.dtype)
        return gram + common * common.mT


def rotary_scale(gram_q: Tensor, gram_k: Tensor, rope: Rope | None) -> Tensor:
    """tr(W_QKᵀW_QK) (…) from W Wᵀ (…, K, K) of both factors; with RoPE the largest that rotary angles can give."""
    return (gram_q * gram_k).sum((-2, -1)) if rope is None else rope.largest_product(gram_q, gram_k)


# ---------------------------------------------------------------------- the modules of a model


@torch.no_grad()
def read_heads(
    members: Sequence[Attention],
    trained: tuple[bool, bool] = (True, True),
    biases_trained: tuple[bool, bool] = (True, True),
) -> Heads:
    """The heads of modules of one shape as they are now, sharded parameters made whole, at least in float32.

    A bias that is not trained beside its weight does not count: the weight would be shrunk for it, again and again.
    """

    def stacked(tensors: Sequence[Tensor]) -> Tensor:
        whole = torch.stack([gathered(tensor.detach()) for tensor in tensors])
        return whole.to(torch.promote_types(whole.dtype, torch.float32))

    def part(index: int) -> tuple[Tensor, Tensor | None]:
        own = [projections(member)[index] for member in members]
        weight = stacked([one.view(gathered(one.tensor.detach())) for one in own])
        biases = [one.bias_view(gathered(t.detach())) for one in own if (t := one.bias_tensor) is not None]
        counts = biases_trained[index] or not trained[index]
        return weight, stacked(biases) if biases and counts else None

    (w_q, b_q), (w_k, b_k) = part(0), part(1)  # (S, G, R, K, D), (S, G, 1, K, D)
    norms = [norm for member in members if (norm := member.input_norm) is not None]
    norm = None
    if norms:
        gains, shifts = [[getattr(one, name) for one in norms] for name in ("gain", "bias")]
        gain, shift = (None if x[0] is None else stacked(x)[:, None, None, None] for x in (gains, shifts))
        norm = Norm(gain, norms[0].eps, norms[0].centred, shift)  # (S, 1, 1, 1, D)
    one = members[0]
    return Heads(QK(w_q, w_k), one.scale, (b_q, b_k), norm, one.rope, trained)


@torch.no_grad()
def write_heads(members: Sequence[Attention], old: Heads, new: Heads) -> None:
    """Writes the weights that are trained, and the biases that changed, into the modules that `old` was read from."""
    for index, trained in enumerate(old.trained):
        if not trained:
            continue
        own = [projections(member)[index] for member in members]
        before, after = ((heads.qk.w_q, heads.qk.w_k)[index] for heads in (old, new))
        _write([(one.tensor, one.view) for one in own], before, after)
        bias, changed = old.biases[index], new.biases[index]
        if bias is not None and changed is not None and changed is not bias:
            stored = [(one.bias_tensor, one.bias_view) for one in own if one.bias_tensor is not None]
            _write(stored, bias, changed)


def _write(stored: Sequence[tuple[Tensor, View]], before: Tensor, after: Tensor) -> None:
    """Sets the parts of parameters that views show; of a sharded one each rank its own part."""
    if not is_sharded(stored[0][0]):
        torch._foreach_copy_([view(tensor.detach()) for tensor, view in stored], list(after.unbind(0)))
        return
    for (tensor, view), change in zip(stored, after - before, strict=True):
        whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        view(whole).copy_(change)
        tensor.detach().add_(spread(whole, tensor))
