"""What a way to keep attention from collapsing may change of a stack of models, and where W_Q and W_K lie in it.

Legend: E stacked models, L layers, B blocks, T tokens, H heads, K head width, D width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from locater.lab.config import ModelConfig
from locater.models.attention import Rope

__all__ = ["Method", "Parameters", "all_layers", "biases", "factors", "rope_of"]

Parameters = Mapping[str, Tensor]


class Method:
    """No change at all, and what the others start from. `strength` is (E,)."""

    rule = 1  # raised where a method's numbers change: what was trained by another does not go on, nor into one table

    def __init__(self, config: ModelConfig, strength: Tensor) -> None:
        self.config, self.strength = config, strength

    def start(self, values: Parameters, seeds: Tensor) -> None:
        """Sets the parameters that the method added, and its own state, from float32 values (E, …)."""

    def state(self) -> dict[str, Tensor]:
        """What it carries from step to step."""
        return {}

    def refresh(self, values: Parameters) -> None:
        """Before a training forward; `values` are the float32 parameters."""

    def settle(self, values: Parameters) -> None:
        """After the parameters were set to others."""

    def weights(self, p: Parameters) -> Parameters:
        """What the forward uses in place of p."""
        return p

    def before_turning(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (E, B, H, T, K) before rotary positions turn them, if positions are rotary."""
        del p, layer
        return q, k

    def compare(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (E, B, H, T, K) as the attention compares them."""
        del p, layer
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """(E·B, H, T, ·) from (E, B, H, T, ·)."""
        q, k, v = (a.flatten(0, 1) for a in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    def cap(self, member: int) -> float | None:
        """Of a member's logits, for those who measure them."""
        del member
        return None

    def after_update(self, values: Parameters, rate: Tensor, hold: Tensor) -> bool:
        """Acts on the float32 parameters; says whether W_Q and W_K changed.

        `rate` (E,) is the update's; `hold`, from 1 to 0 at the end of training, how far the method still holds.
        """
        del values, rate, hold
        return False

    def at_inference(self) -> Method:
        return Method(self.config, self.strength)


def rope_of(config: ModelConfig, device: torch.device) -> Rope | None:
    """With the frequencies of Llama."""
    if config.positions != "rotary":
        return None
    pairs = config.head_width // 2
    return Rope(10_000.0 ** -(torch.arange(pairs, device=device, dtype=torch.float64) / pairs))


def all_layers(p: Parameters, name: str, config: ModelConfig) -> Tensor:
    """(E, L, …), a view: parameters of a stack lie in one tensor, every layer's as far from the one before."""
    first, second = (p[f"layers.{i}.{name}"] for i in (0, min(1, config.layers - 1)))
    step = second.storage_offset() - first.storage_offset()
    return first.as_strided((len(first), config.layers, *first.shape[1:]), (first.stride(0), step, *first.stride()[1:]))


def factors(p: Parameters, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """W_Q and W_K (E, L, H, K, D), views."""
    w_q, w_k, _ = all_layers(p, "qkv.weight", config).unflatten(2, (3, config.heads, -1)).unbind(2)
    return w_q, w_k


def biases(p: Parameters, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """(E, L, H, K), views."""
    b_q, b_k, _ = all_layers(p, "qkv.bias", config).unflatten(2, (3, config.heads, -1)).unbind(2)
    return b_q, b_k
