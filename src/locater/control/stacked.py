"""LocAteR for factors that are tensors already: no model, no registry, a strength for each matrix.

Legend: K head width; leading dimensions are matrices, against which strengths, steps and targets broadcast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locater.qk import QK

__all__ = ["GROWTH", "decoupled_step", "growth_share", "limited", "penalty_gradient"]

GROWTH = 4.0
"""No head's scale may be more than this times what it was at first, where growth is held."""


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
    ends at the minimum for strengths that are damped so.

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
    off = mean_step * (qk.trace() - target)
    pull = (2 * off / (1 + 4 * mean_step * torch.maximum(together(squares_q, -1), squares_k)))[..., None, None]
    new_q = w_q - shrink * (gram_k @ w_q) - pull * w_k
    return new_q, w_k - together(shrink * gram_q, -3) @ w_k - together(pull * w_q, -3)


def growth_share(qk: QK, first: Tensor) -> Tensor:
    """From 0, where tr(W_QKᵀW_QK) is at most what it was at `first`, to 1, where it is twice that or more."""
    return (qk.scale() / first - 1).clamp(0, 1)


def limited(qk: QK, most: Tensor) -> tuple[Tensor, Tensor]:
    """W_Q and W_K with tr(W_QKᵀW_QK) at most `most`: both are scaled alike, or W_Q alone where heads share a key."""
    ratio = (most / qk.scale()).clamp(max=1)[..., None, None]
    shared = qk.w_k.ndim > 2 and qk.w_k.shape[-3] < qk.w_q.shape[-3]
    return (ratio.sqrt() * qk.w_q, qk.w_k) if shared else (ratio**0.25 * qk.w_q, ratio**0.25 * qk.w_k)
