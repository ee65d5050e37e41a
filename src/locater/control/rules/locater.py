"""LocAteR's penalty on one W_QK and its gradient (Section 6, with its misprint mended):

    scale_strength · tr(W_QKᵀW_QK) + mean_strength · (tr W_QK − target)²

without the second term where W_QK has no trace (queries and keys of different states).

Legend: K head width, D model width; strengths and targets broadcast against the leading dimensions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from locater.qk import QK

__all__ = ["READINGS", "GradientFactors", "joint_gradient", "paper_strengths", "penalty", "penalty_gradient"]

READINGS: dict[str, tuple[str, str]] = {
    "figures": ("trace", "sum"),
    "trace-mean": ("trace", "mean"),
    "scale-sum": ("scale", "sum"),
    "printed": ("scale", "mean"),
}
"""Four readings of the paper's objective: what κ₁ stands before, and whether the loss is summed over the batch's tokens
(as fairseq does; a penalty beside it then acts with κ/tokens) or averaged. The first is the one its figures show."""


def penalty(qk: QK, scale_strength: float | Tensor, mean_strength: float | Tensor, target: float | Tensor) -> Tensor:
    """Of every matrix."""
    value = scale_strength * qk.scale()
    return value + mean_strength * (qk.trace() - target).square() if qk.square else value


class GradientFactors(NamedTuple):
    """∂/∂W_Q = of_q W_Q + pull W_K and ∂/∂W_K = of_k W_K + pull W_Q; a key that query heads share collects their sum.

    Nothing pulls where there is no trace. No d_model × d_model matrix, no graph.
    """

    of_q: Tensor  # (…, K, K)
    of_k: Tensor
    pull: Tensor | None  # (…, 1, 1)

    @classmethod
    def of(cls, qk: QK, scale_strength: Tensor, mean_strength: Tensor, target: Tensor | float) -> GradientFactors:
        scale = 2 * scale_strength[..., None, None]
        pull = (2 * mean_strength * (qk.trace() - target))[..., None, None] if qk.square else None
        return cls(scale * (qk.w_k @ qk.w_k.mT), scale * (qk.w_q @ qk.w_q.mT), pull)


def penalty_gradient(
    qk: QK, scale_strength: Tensor, mean_strength: Tensor, target: Tensor | float
) -> tuple[Tensor, Tensor]:
    """∂/∂W_Q and ∂/∂W_K of every matrix's penalty."""
    of_q, of_k, pull = GradientFactors.of(qk, scale_strength, mean_strength, target)
    by_scale = of_q @ qk.w_q, of_k @ qk.w_k
    return by_scale if pull is None else (by_scale[0] + pull * qk.w_k, by_scale[1] + pull * qk.w_q)


def joint_gradient(w: Tensor, scale_strength: Tensor, mean_strength: Tensor, target: Tensor | float) -> Tensor:
    """∂/∂W_QK (…, D, D) where it is trained itself: 2 scale_strength W + 2 mean_strength (tr W − target) I."""
    gradient = 2 * scale_strength[..., None, None] * w
    diagonal = gradient.diagonal(dim1=-2, dim2=-1)
    diagonal += (2 * mean_strength * (torch.einsum("...ii->...", w) - target))[..., None]
    return gradient


def paper_strengths(
    kappa_1: float, kappa_2: float, tokens_per_batch: int, reading: str = "figures"
) -> tuple[float, float]:
    """On the scale and on (trace − target)², beside a loss that is averaged per token."""
    first, reduction = READINGS[reading]
    divisor = tokens_per_batch if reduction == "sum" else 1
    scale, mean = (kappa_1, kappa_2) if first == "scale" else (kappa_2, kappa_1)
    return scale / divisor, mean / divisor
