"""Where W_Q and W_K lie in the parameters of a stack, and as the `Heads` that the rules of `control` act on.

Legend: E stacked models, L layers, H heads, K head width, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from locater.control.heads import Heads
from locater.lab.config import ModelConfig
from locater.models import Rope
from locater.qk import QK

__all__ = ["Parameters", "all_heads", "query_key_matrix", "rope_of", "set_heads", "split_qkv"]

Parameters: TypeAlias = Mapping[str, Tensor]


def split_qkv(qkv: Tensor, config: ModelConfig, dim: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Those of queries, keys and values, views (…, H, K, …) of a fused weight or bias, or of its gradient."""
    q, k, v = qkv.unflatten(dim, (3, config.heads, -1)).unbind(dim)
    return q, k, v


def query_key_matrix(p: Parameters, layer: int, config: ModelConfig) -> QK:
    """W_QK of every model and head of a layer, leading dimensions (E, H)."""
    at = f"layers.{layer}."
    if config.joint_qk:
        return QK.from_joint(p[at + "qk.weight"])
    w_q, w_k, _ = split_qkv(p[at + "qkv.weight"], config)
    return QK(w_q, w_k)


def rope_of(config: ModelConfig, device: torch.device) -> Rope | None:
    """With the frequencies of Llama."""
    if config.positions != "rotary":
        return None
    pairs = config.head_width // 2
    return Rope(10_000.0 ** -(torch.arange(pairs, device=device, dtype=torch.float64) / pairs))


def all_heads(p: Parameters, config: ModelConfig, rope: Rope | None) -> Heads:
    """Those of all models and layers: weights (E, L, H, K, D) and biases (E, L, H, K), views."""
    w_q, w_k, _ = split_qkv(_all_layers(p, "qkv.weight", config), config, dim=2)
    b_q, b_k, _ = split_qkv(_all_layers(p, "qkv.bias", config), config, dim=2)
    return Heads(QK(w_q, w_k), config.head_width**-0.5, (b_q, b_k), rope)


def set_heads(old: Heads, new: Heads) -> None:
    """Writes weights and biases into the parameters that `old` shows."""
    pairs = zip(
        (old.qk.w_q, old.qk.w_k, *old.biases), (new.qk.w_q, new.qk.w_k, *new.biases), strict=True
    )  # fmt: skip
    for before, after in pairs:
        if after is not None and before is not None and after is not before:
            before.copy_(after)


def _all_layers(p: Parameters, name: str, config: ModelConfig) -> Tensor:
    """(E, L, …), a view: parameters of a stack lie in one tensor, every layer's as far from the one before."""
    first, second = (p[f"layers.{i}.{name}"] for i in (0, min(1, config.layers - 1)))
    step = second.storage_offset() - first.storage_offset()
    return first.as_strided((len(first), config.layers, *first.shape[1:]), (first.stride(0), step, *first.stride()[1:]))
