"""Weight decay of W_Q and W_K alone, decoupled: W ← (1 − rate · decay) W, in place of the optimizer's own decay."""

from __future__ import annotations

from torch import Tensor

__all__ = ["decay_factor"]


def decay_factor(rate: float | Tensor, decay: float | Tensor, own: float | Tensor) -> float | Tensor:
    """What the weights are multiplied by before the optimizer's step, which will multiply them by 1 − rate · own.

    No sign is flipped: of a decay beyond 1 / rate nothing is left.
    """
    left = 1 - rate * decay
    left = left.clamp(min=0) if isinstance(left, Tensor) else max(left, 0.0)
    return left / (1 - rate * own)
