"""LocAteR for factors that are tensors already: no model, no registry, a strength for each matrix.

Legend: K head width; leading dimensions are matrices, against which strengths, steps and targets broadcast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locater.qk import QK

__all__ = ["decoupled_step", "held_step", "limited", "ordinary_scale", "penalty_gradient"]

_GROWTH = 4.0  # times its ordinary scale is the most that a head may have


def penalty_gradient(qk: QK, scale_strength: Tensor, mean_strength: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """∂/∂W_Q and ∂/∂W_K of scale_strength · tr(W_QKᵀW_QK) + mean_strength · (tr W_QK − target)², for every matrix."""
    w_q, w_k = qk.w_q, qk.w_k
    scale = 2 * scale_strength[..., None, None]
    pull = (2 * mean_strength * (qk.trace() - target))[..., None, None]
    return scale * (w_k @ w_k.mT) @ w_q + pull * w_k, scale * (w_q @ w_q.mT) @ w_k + pull * w_q


def decoupled_step(qk: QK, scale_step: Tensor, mean_step: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """W_Q and W_K after one step down the penalty, beside an optimizer's own as AdamW's decay is beside Adam's.

    A step is a learning rate times a strength. Each part is divided by 1 + the step times its own largest possible
    curvature: small steps are the gradient's, and no step, however large, goes past the minimum along any direction
    (nor would an implicit step, at the cost of a K × K solve). Both factors are divided by the same, for what a
    gradient does not do is to let one of them grow at the other's expense. Where steps are not small, repeating them
    ends at the minimum for strengths that are damped so. Nor does the pull on the trace carry it past its target.

    A key matrix that query heads share has a dimension of 1 before its last two, where they have theirs.
    """
    w_q, w_k = qk.w_q, qk.w_k
    shared = w_k.shape[-3] < w_q.shape[-3] if w_k.ndim > 2 else False
    gram_q, gram_k = w_q @ w_q.mT, w_k @ w_k.mT

    def together(x: Tensor, dim: int) -> Tensor:
        """Summed over the query heads of a key."""
        return x.sum(dim, keepdim=True) if shared else x

    def size(gram: Tensor) -> Tensor:
        """At least gram's largest eigenvalue, half the largest curvature of the scale, and at most K^¼ of it."""
        norm: Tensor = torch.linalg.matrix_norm(gram @ gram)
        return norm.sqrt()

    largest = torch.maximum(together(scale_step * size(gram_q), -1), scale_step * size(gram_k))
    squares_q, squares_k = (gram.diagonal(dim1=-2, dim2=-1).sum(-1) for gram in (gram_q, gram_k))
    if shared:
        largest = largest.amax(-1, keepdim=True)
    shrink = (2 * scale_step / (1 + 2 * largest))[..., None, None]
    pull = _pull(qk.trace(), target, mean_step, together(squares_q, -1), squares_k)[..., None, None]
    new_q = w_q - shrink * (gram_k @ w_q) - pull * w_k
    return new_q, w_k - together(shrink * gram_q, -3) @ w_k - together(pull * w_q, -3)


def _pull(trace: Tensor, target: Tensor, step: Tensor, squares_q: Tensor, squares_k: Tensor) -> Tensor:
    """c of the step W_Q − c W_K, W_K − c W_Q down (trace − target)², given the factors' squared norms.

    The trace becomes trace − c S + c² trace, where S is the sum of the squares. That is monotone for |c| ≤ 1, and the
    target where c = 2 off / (S + √(S² − 4 trace · off)): c goes no further than either.
    """
    off, both = trace - target, squares_q + squares_k
    c = 2 * step * off / (1 + 4 * step * torch.maximum(squares_q, squares_k))
    there = 2 * off.abs() / (both + (both.square() - 4 * trace * off).clamp(min=0).sqrt()).clamp(min=1e-30)
    most = there.clamp(max=1)
    return c.clamp(-most, most)


# ---------------------------------------------------------------------- where growth is held


def ordinary_scale(first: Tensor, logit_scale: float) -> Tensor:
    """tr(W_QKᵀW_QK) beyond which a head has grown: what it was at first, or, where that was small, d_head / 8.

    There, logits between independent tokens have a standard deviation of 0.35; a customary start is at twice that.
    """
    return first.clamp(min=1 / (8 * logit_scale**2))


def held_step(qk: QK, step: Tensor, target: Tensor, ordinary: Tensor) -> tuple[Tensor, Tensor]:
    """`decoupled_step` that presses a scale by how far it has grown: not at all up to its ordinary size, fully from
    twice that on."""
    grown = (qk.scale() / ordinary - 1).clamp(0, 1)
    return decoupled_step(qk, step * grown, step, target)


def limited(
    qk: QK, ordinary: Tensor, hold: Tensor | float = 1.0, moves: tuple[bool, bool] = (True, True)
) -> tuple[Tensor, Tensor]:
    """W_Q and W_K with a scale of at most four times the ordinary, divided by `hold`, which goes to 0 to let go.

    What is to be shrunk is shared by the factors that may move, but where heads share a key it is W_Q's alone.
    """
    ratio = (_GROWTH * ordinary / (hold * qk.scale())).clamp(max=1)[..., None, None]
    shared = qk.w_k.ndim > 2 and qk.w_k.shape[-3] < qk.w_q.shape[-3]
    if moves == (True, True) and not shared:
        return ratio**0.25 * qk.w_q, ratio**0.25 * qk.w_k
    if moves[0]:
        return ratio.sqrt() * qk.w_q, qk.w_k
    return qk.w_q, (ratio.amin(-3, keepdim=True) if shared else ratio).sqrt() * qk.w_k
