"""How alike the tokens of a sequence have become."""

from __future__ import annotations

import torch
from torch import Tensor

from locater.errors import LocaterError

__all__ = ["rank_residual"]


def rank_residual(x: Tensor) -> Tensor:
    """‖X − 1x̄ᵀ‖ / ‖X‖ (Frobenius) of hidden states (..., tokens, width): 0 when all tokens are one (Dong et al.)."""
    if x.ndim < 2 or 0 in x.shape[-2:]:
        raise LocaterError(f"hidden states must be (..., tokens, width), got shape {tuple(x.shape)}")
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    apart = x - x.mean(-2, keepdim=True)
    residual: Tensor = torch.linalg.matrix_norm(apart) / torch.linalg.matrix_norm(x)
    return residual
