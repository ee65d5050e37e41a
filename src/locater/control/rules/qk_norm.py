"""QK-norm: q ← g_q ∘ q / √(mean q² + ε), k likewise, before RoPE.

|logit_scale · q·k| ≤ logit_scale · K · max|g_q| · max|g_k|, which is √K times the gains with the usual scale 1/√K.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["EPS", "normalised"]

EPS = 1e-6


def normalised(x: Tensor, gain: Tensor | None, eps: float = EPS) -> Tensor:
    """Queries or keys (…, K) divided by their root mean square, times a gain that broadcasts; at least in float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = functional.rms_norm(wide, wide.shape[-1:], eps=eps)
    return (wide if gain is None else wide * gain).to(x.dtype)
