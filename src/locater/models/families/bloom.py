"""BLOOM: q, k, v fused head by head, ALiBi."""

from __future__ import annotations

import torch
from torch import Tensor

from locater.models.attention import Alibi, Attention
from locater.models.families._parts import Heads, interleaved, layer_norm, usual_attention
from locater.models.registry import Site, register


@register("BloomAttention", checkpoints=("bloom",), paths=(r"(?:.*\.)?h\.\d+\.self_attention",))
def read(site: Site) -> Attention:
    bias = Alibi(alibi_slopes(Heads.of(site).groups))
    norm = layer_norm(site, "../input_layernorm", "layer_norm_epsilon")
    return usual_attention(site, interleaved, "query_key_value", position_bias=bias, input_norm=norm)


def alibi_slopes(heads: int) -> Tensor:
    """2^(−8h/n) for a power of two n; the heads beyond one take every other slope of 2n."""
    power = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 * torch.arange(1, power + 1) / power)
    between = 2.0 ** (-8.0 * torch.arange(1, 2 * (heads - power) + 1, 2) / (2 * power))
    return torch.cat([slopes, between])
