"""Expected entropy and signal of softmax attention as tensors: what a loss can be made of, before any token is seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.theory import TokenProcess
from locater.theory.price import attention_gradient

__all__ = ["predicted_attention"]


def predicted_attention(
    trace: Tensor, trace_square: Tensor, scale: Tensor, process: TokenProcess, temperature: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """Entropy (nats) and signal β of the three-number law, with gradients in the three numbers by Price's theorem.

        qk = QK(w_q, w_k)
        entropy, signal = predicted_attention(qk.trace(), qk.trace_square(), qk.scale(), process, temperature)

    The three broadcast over heads. `options` are `query`, `causal`, `samples` and `seed` of
    `theory.attention_gradient`, which computes both on the CPU in float64; gradients cannot be differentiated again.
    """
    try:
        numbers = torch.broadcast_tensors(*(torch.as_tensor(number) for number in (trace, trace_square, scale)))
    except (RuntimeError, TypeError, ValueError) as error:
        raise LocaterError("trace, trace_square and scale must be numbers, or tensors that broadcast") from error
    entropy, signal = _Predicted.apply(*numbers, process, temperature, options)  # type: ignore[no-untyped-call]
    return entropy, signal


class _Predicted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, trace: Tensor, trace_square: Tensor, scale: Tensor, process: TokenProcess, temperature: float,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        found = attention_gradient(trace, trace_square, scale, process, temperature, **options)
        entropy, signal, *gradients = (trace.new_tensor(part) for part in found[:4])
        ctx.save_for_backward(*gradients)
        return entropy, signal

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_entropy: Tensor, by_signal: Tensor) -> tuple[Tensor | None, ...]:
        of_entropy, of_signal = ctx.saved_tensors
        gradient = by_entropy[..., None] * of_entropy + by_signal[..., None] * of_signal
        return (*gradient.unbind(-1), None, None, None)
