"""All that a rule on weights depends on, as K × K matrices of every head; and what it does to the weights, likewise.

Weights are read once, for their products with themselves, and written once. What a step does to those products follows
from them: the weights are not read again for it.

Legend: G key heads, R query heads for each, K head width, D model width; leading dimensions are modules or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

from locater.models import Rope

__all__ = ["Grams", "Move", "Pair", "rotary_scale"]

Pair: TypeAlias = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Move:
    """W_Q ← f_q (W_Q − shrink_q W_Q − pull_q W_K), and W_K likewise, summed over the query heads that share it."""

    shrink: tuple[Tensor, Tensor]  # (…, R, K, K), (…, 1 or R, K, K)
    pull: tuple[Tensor, Tensor] | None  # (…, R) each
    shrunk: Tensor  # (…) whether `shrink` is not 0
    factors: tuple[Tensor, Tensor] | None = None  # f_q (…, R) and f_k (…, 1 or R); biases are multiplied, too


@dataclass(frozen=True)
class Grams:
    """W_Q W_Qᵀ and W_K W_Kᵀ of every head, plain and with the norm before attention folded in."""

    q: Tensor  # (…, R, K, K)
    k: Tensor  # (…, 1 or R, K, K)
    trace: Tensor | None  # (…, R), where W_QK has one
    folded: tuple[Tensor, Tensor]  # the same with the norm's gain and centring folded in
    cross: Tensor | None  # folded W_Q times folded W_Kᵀ, where a step may pull
    shifts: Pair  # W_Q and W_K times the norm's shift (…, K)
    biases: Pair
    rope: Rope | None
    combined: Callable[[Tensor], Tensor] | None = None  # Σ_r c_r folded W_Q, times itself (…, 1, K, K), of shared keys

    @property
    def shared_keys(self) -> bool:
        return self.k.shape[-3] < self.q.shape[-3]

    def scale(self) -> Tensor:
        """tr(W_QKᵀW_QK) (…); with rotary positions the largest that any offset can make it, or a bound of that."""
        return rotary_scale(self.q, self.k, self.rope)

    def effective_scale(self) -> Tensor:
        """`scale` with the norm before attention and the biases folded in: the variance of q·k between independent
        tokens whose coordinates have unit variance where the norm scales them.

        The norm's gain is trained too, and may grow where W_QK does not. What all queries have in common, a bias and
        the norm's shift, is compared with every key. What all keys have in common moves all logits of a query alike,
        which a softmax does not see, unless keys are rotated with their position.
        """
        gram_q = _with_common(self.folded[0], self.biases[0], self.shifts[0])
        gram_k = self.folded[1]
        if self.rope is not None:
            gram_k = _with_common(gram_k, self.biases[1], self.shifts[1])
        return rotary_scale(gram_q, gram_k, self.rope)

    def moved(self, move: Move) -> Grams:
        """The folded ones after a move, its factors left out; the plain ones stay."""
        shrink_q, shrink_k = move.shrink
        of_q, of_k = _both_sides(self.folded[0], shrink_q), _both_sides(self.folded[1], shrink_k)
        v_q, v_k = (
            None if v is None else v - (s @ v[..., None])[..., 0] for v, s in zip(self.shifts, move.shrink, strict=True)
        )
        if move.pull is not None:
            assert self.cross is not None
            c_q, c_k = (c[..., None, None] for c in move.pull)
            with_k = c_q * (self.cross - shrink_q @ self.cross)  # (…, R, K, K)
            of_q = of_q - with_k - with_k.mT + c_q.square() * self.folded[1]
            with_q = c_k * (self.cross.mT - shrink_k @ self.cross.mT)
            if self.shared_keys:
                assert self.combined is not None
                with_q, pulled = with_q.sum(-3, keepdim=True), self.combined(move.pull[1])
            else:
                pulled = c_k.square() * self.folded[0]
            of_k = of_k - with_q - with_q.mT + pulled
            old_q, old_k = self.shifts
            if v_q is not None and v_k is not None and old_q is not None and old_k is not None:
                from_q = move.pull[1][..., None] * old_q
                v_q = v_q - move.pull[0][..., None] * old_k
                v_k = v_k - (from_q.sum(-2, keepdim=True) if self.shared_keys else from_q)
        return replace(self, folded=(of_q, of_k), shifts=(v_q, v_k))


def _both_sides(gram: Tensor, shrink: Tensor) -> Tensor:
    """(1 − shrink) gram (1 − shrink)ᵀ."""
    half = gram - shrink @ gram
    return half - half @ shrink.mT


def _with_common(gram: Tensor, bias: Tensor | None, shift: Tensor | None) -> Tensor:
    parts = [x for x in (bias, shift) if x is not None]
    if not parts:
        return gram
    common = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return gram + common[..., :, None] * common[..., None, :]


def rotary_scale(gram_q: Tensor, gram_k: Tensor, rope: Rope | None) -> Tensor:
    """tr(W_QKᵀW_QK) (…) from W Wᵀ (…, K, K) of both factors; with RoPE the largest that rotary angles can give."""
    return (gram_q * gram_k).sum((-2, -1)) if rope is None else rope.largest_product(gram_q, gram_k)
