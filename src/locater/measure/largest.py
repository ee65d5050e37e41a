"""The largest logit alone, for those who need it at every step."""

from __future__ import annotations

import torch
from torch import Tensor

from locater.measure._logits import Logits
from locater.measure._rows import row_statistics

__all__ = ["max_logits"]


@torch.no_grad()
def max_logits(q: Tensor, k: Tensor, *, causal: bool = True, scale: float | None = None) -> Tensor:
    """Over all unmasked pairs of q (B, H, Tq, K) and k (B, G, Tk, K): (B, H). Waits for nothing on the device."""
    logits = Logits.of(q, k, scale, causal=causal)
    return row_statistics(logits)[1].amax(2)
