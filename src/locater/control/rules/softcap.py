"""Softcap: no logit beyond ±c, smoothly: s becomes c · tanh(s / c), as in Gemma 2."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["softcapped"]


def softcapped(logits: Tensor, cap: float | Tensor) -> Tensor:
    return cap * torch.tanh(logits / cap)
