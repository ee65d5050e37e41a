"""What is measured of an attention call: its statistics, and ρ of one query of each sequence.

Legend: B batch, H query heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locater.hooks import Call, visible
from locater.measure import attention
from locater.measure._logits import Logits
from locater.measure._propagation import chosen, on_slope


def statistics(call: Call) -> attention.AttentionStatistics:
    return attention.attention_statistics(call.q, call.k, rho=False, **call.options())


def signal_propagation(call: Call, query: int) -> tuple[Tensor, Tensor]:
    """Where z of a key is in [0, 1], and where the key is unmasked, for one query of each sequence: (B, H, Tk) each.

    Keys are counted from the sequence's first that is no padding; a negative `query` from its last.
    """
    logits, tk = Logits.of(call.q, call.k, **call.options()), call.k.shape[2]
    real = call.q.new_ones(call.sizes[::2], dtype=torch.bool) if call.real is None else call.real
    found = on_slope(logits, *chosen(real, torch.full((1,), query, device=real.device)), slice(None))
    column = torch.arange(tk, device=real.device) + _first_key(call)[:, None]  # (B, Tk)
    there, column = (column < tk)[:, None], column.clamp(max=tk - 1)[:, None]
    inside, unmasked = (torch.take_along_dim(one[:, :, 0], column, 2) & there for one in found)
    return inside, unmasked


def _first_key(call: Call) -> Tensor:
    """The first key (B,) that is unmasked for a query which is no padding."""
    b, _, tq, tk = call.sizes
    if call.key_mask is not None:
        return call.key_mask.byte().argmax(1)
    if call.bias is None or call.real is None:
        return torch.zeros(b, dtype=torch.long, device=call.q.device)
    unmasked = visible(call.bias).any(1).expand(b, tq, tk) & call.real[..., None]
    return unmasked.any(1).byte().argmax(1)
