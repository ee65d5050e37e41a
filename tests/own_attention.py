"""A module nobody's registry knows."""

from __future__ import annotations

from torch import nn
from torch.nn import functional


class OwnAttention(nn.Module):
    """As many write it: one fused layer and torch's function."""

    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (a.unflatten(-1, (4, 4)).transpose(1, 2) for a in self.c_attn(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
