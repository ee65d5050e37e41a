"""Heads: W_Q, W_K and their biases, with any leading dimensions, as the lab's stacks hold them.

Legend: H heads, K head width, D model width, B sequences, n tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from locater.models import Rope
from locater.qk import QK

__all__ = ["Heads", "Pair"]

Pair: TypeAlias = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Heads:
    """What a rule on weights is given, and gives."""

    qk: QK  # (…, H, K, D)
    logit_scale: float
    biases: Pair = (None, None)  # of queries and keys (…, H, K)
    rope: Rope | None = None

    def scaled(self, f_q: Tensor, f_k: Tensor) -> Heads:
        """Weights and biases of each head multiplied by its factors (…, H)."""
        biases = tuple(
            None if bias is None else bias * f[..., None] for bias, f in zip(self.biases, (f_q, f_k), strict=True)
        )
        w_q, w_k = self.qk.w_q * f_q[..., None, None], self.qk.w_k * f_k[..., None, None]
        return replace(self, qk=QK(w_q, w_k), biases=(biases[0], biases[1]))

    def logits(self, states: Tensor, positions: Tensor) -> Tensor:
        """Unmasked (…, H, B, n, n), for states (…, B, n, D) that enter attention at these positions (n,)."""
        return self.product(*self.compared(states, positions))

    def product(self, q: Tensor, k: Tensor) -> Tensor:
        """Logits (…, H, B, n, n) of queries and keys as they are compared."""
        return (self.logit_scale * q) @ k.mT

    def compared(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (…, H, B, n, K), linear in the weights and biases."""
        pairs = zip((self.qk.w_q, self.qk.w_k), self.biases, strict=True)
        q, k = (self._compared(weight, bias, states, positions) for weight, bias in pairs)
        return q, k

    def _compared(self, weight: Tensor, bias: Tensor | None, states: Tensor, positions: Tensor) -> Tensor:
        x = torch.einsum("...bnd,...hkd->...hbnk", states, weight)
        x = x if bias is None else x + bias[..., None, None, :]
        return x if self.rope is None else self.rope.rotate(x, positions)
