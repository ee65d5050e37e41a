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
from locater.control.grams import Grams, Move, Pair
from locater.models import Attention, Norm, Rope
from locater.qk import QK

__all__ = ["Heads", "read_heads", "write_heads"]

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

    def moved(self, move: Move) -> Heads:
        (s_q, s_k), (w_q, w_k) = move.shrink, (self.qk.w_q, self.qk.w_k)
        # 1 − shrink in one product would round the weights themselves where products are TF32
        if move.pull is None:
            new_q, new_k = w_q - s_q @ w_q, w_k - s_k @ w_k
        else:
            c_q, c_k = (c[..., None, None] for c in move.pull)
            new_q = w_q - torch.addcmul(s_q @ w_q, c_q, w_k)
            if self.shared_keys:
                new_k = w_k - (s_k @ w_k + (c_k * w_q).sum(-3, keepdim=True))
            else:
                new_k = w_k - torch.addcmul(s_k @ w_k, c_k, w_q)
        heads = self.with_weights(new_q, new_k)
        return heads if move.factors is None else heads.scaled(*move.factors)

    def scale(self) -> Tensor:
        """tr(W_QKᵀW_QK) (…); with rotary positions the largest that any offset can make it, or a bound of that."""
        return self.grams().scale()

    def effective_scale(self) -> Tensor:
        """`scale` with the norm before attention and the biases folded in: `Grams.effective_scale`."""
        return self.grams().effective_scale()

    def grams(self, *, pulled: bool = False) -> Grams:
        """The products that rules depend on; `pulled`: those, too, that a pull of the trace asks for."""
        w_q, w_k, norm = self.qk.w_q, self.qk.w_k, self.norm
        of_q, of_k = w_q @ w_q.mT, w_k @ w_k.mT
        trace = self.qk.trace() if self.qk.square else None
        folded_q, folded_k = w_q, w_k
        shifts: Pair = (None, None)
        if norm is not None:
            folded_q, folded_k = norm.fold(w_q), norm.fold(w_k) if self.qk.square else w_k
            if norm.centred:  # D coordinates of mean 0 are D long in D − 1 dimensions
                longer = (w_q.shape[-1] / max(1, w_q.shape[-1] - 1)) ** 0.5
                folded_q, folded_k = folded_q * longer, folded_k * longer if self.qk.square else folded_k
            if norm.bias is not None:
                shift = torch.atleast_2d(norm.bias).mT.to(w_q.dtype)
                shifts = (w_q @ shift)[..., 0], (w_k @ shift)[..., 0] if self.qk.square else None
        folded = (of_q, of_k) if norm is None else (folded_q @ folded_q.mT, folded_k @ folded_k.mT)
        cross = folded_q @ folded_k.mT if pulled else None

        def combined(c: Tensor) -> Tensor:
            both = (c[..., None, None] * folded_q).sum(-3, keepdim=True)
            return both @ both.mT

        return Grams(of_q, of_k, trace, folded, cross, shifts, self.biases, self.rope, combined)


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
