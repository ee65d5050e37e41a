"""What is measured of an attention call: its statistics, and ρ of one query of each sequence.

Legend: B batch, H query heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locater.hooks import Call, visible
from locater.measure import attention
from locater.measure._logits import Logits
from locater.measure._propagation import on_slope

__all__ = ["signal_propagation", "statistics"]


def statistics(call: Call) -> attention.AttentionStatistics:
    return attention.attention_statistics(call.q, call.k, rho=False, **call.options())


def signal_propagation(call: Call, query: int) -> tuple[Tensor, Tensor]:
    """Where z of a key is in [0, 1], and where the key is unmasked, for one query of each sequence: (B, H, Tk) each.

    Keys are counted from the sequence's first that is no padding; a negative `query` from its last.
    """
    row, counts = _row(call, query)
    found = on_slope(Logits.of(call.q, call.k, **call.options()), row[:, None], counts[:, None], slice(None))
    tk = call.k.shape[2]
    column = torch.arange(tk, device=row.device) + _first_key(call)[:, None]  # (B, Tk)
    there, column = (column < tk)[:, None], column.clamp(max=tk - 1)[:, None]
    inside, unmasked = (torch.take_along_dim(one[:, :, 0], column, 2) & there for one in found)
    return inside, unmasked


def _row(call: Call, query: int) -> tuple[Tensor, Tensor]:
    """The row of the query in each sequence (B,), and whether there is one."""
    b, _, tq, _ = call.sizes
    real = torch.ones(b, tq, dtype=torch.bool, device=call.q.device) if call.real is None else call.real
    end = tq - real.flip(1).byte().argmax(1)
    row = end + query if query < 0 else torch.full_like(end, query)
    inside = (row >= 0) & (row < tq)
    row = row.clamp(0, tq - 1)
    return row, inside & real.gather(1, row[:, None])[:, 0]


def _first_key(call: Call) -> Tensor:
    """The first key (B,) that is unmasked for a query which is no padding."""
    b, _, tq, tk = call.sizes
    if call.key_mask is not None:
        return call.key_mask.byte().argmax(1)
    if call.bias is None or call.real is None:
        return torch.zeros(b, dtype=torch.long, device=call.q.device)
    unmasked = visible(call.bias).any(1).expand(b, tq, tk) & call.real[..., None]
    return unmasked.any(1).byte().argmax(1)
