"""LocAteR's gradient for factors that are tensors already: no model, no registry, a strength for each matrix."""

from __future__ import annotations

from torch import Tensor

from locater.qk import QK

__all__ = ["penalty_gradient"]


def penalty_gradient(qk: QK, scale_strength: Tensor, mean_strength: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """∂/∂W_Q and ∂/∂W_K of scale_strength · tr(W_QKᵀW_QK) + mean_strength · (tr W_QK − target)², for every matrix.

    Strengths and target broadcast against the leading dimensions of `qk`; nothing is summed over them.
    """
    w_q, w_k = qk.w_q, qk.w_k
    scale = 2 * scale_strength[..., None, None]
    pull = (2 * mean_strength * (qk.trace() - target))[..., None, None]
    return scale * (w_k @ w_k.mT) @ w_q + pull * w_k, scale * (w_q @ w_q.mT) @ w_k + pull * w_q
