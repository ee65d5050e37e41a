"""The largest logit alone, for those who need it at every step."""

from __future__ import annotations

import torch
from torch import Tensor

from locater.measure import _kernels
from locater.measure.attention import _Attention

__all__ = ["max_logits"]


@torch.no_grad()
def max_logits(q: Tensor, k: Tensor, *, causal: bool = True, scale: float | None = None) -> Tensor:
    """Over all visible pairs of q (B, H, Tq, K) and k (B, G, Tk, K): (B, H). Waits for nothing on the device."""
    seen = _Attention.of(q, k, causal, scale, None, None, None, None, None)
    kernel = _kernels.applies(q, k, seen.view)
    return (_kernels.row_statistics(q, k, seen.view) if kernel else seen.row_statistics())[1].amax(2)
