"""QK-clip (MuonClip): heads whose largest logit S was above τ have W_Q and W_K scaled by √γ each, γ = τ / S.

A key head that several query heads share is left alone, and W_Q takes all of γ: what belongs to several heads is not
changed because of one. Where only one of W_Q and W_K is trained, it takes all of γ.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clip_factors"]


def clip_factors(
    largest: Tensor, threshold: Tensor | float, trained: tuple[bool, bool] = (True, True), shared_keys: bool = False
) -> tuple[Tensor, Tensor]:
    """What W_Q, W_K and their biases are multiplied by, given the largest logits (…, heads of a key).

    1 where a logit is below the threshold or not finite, as after an overflow.
    """
    above = (largest > threshold) & largest.isfinite()
    gamma = torch.where(above, threshold / largest, 1.0)
    if trained[0]:
        both = trained[1] and not shared_keys
        return (gamma.sqrt(), gamma.sqrt()) if both else (gamma, torch.ones_like(gamma[..., :1]))
    # a shared key follows the largest logit of its heads
    return torch.ones_like(gamma), gamma.amin(-1, keepdim=True) if shared_keys else gamma
