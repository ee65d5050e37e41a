"""What is measured of an attention call: its statistics, the keys its queries see, ρ of one query of each sequence.

Legend: B batch, H query heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from locater.hooks import Call, visible
from locater.measure import attention

__all__ = ["signal_propagation", "statistics", "visible_keys"]


def statistics(call: Call) -> attention.AttentionStatistics:
    return attention.attention_statistics(call.q, call.k, **call.options())


def visible_keys(call: Call) -> Tensor:
    """How many keys each query sees (B or 1, H or 1, Tq)."""
    if call.bias is not None:
        return visible(call.bias).sum(-1)
    _, _, tq, tk = call.sizes
    place = torch.arange(tk - tq, tk, device=call.q.device)
    after = place + 1 if call.causal else place + (call.window or tk)
    first = place - (call.window or tk) + 1
    keys = place.new_ones(1, tk) if call.key_mask is None else call.key_mask
    before = functional.pad(keys.cumsum(1), (1, 0))  # keys before each place
    return (before[:, after.clamp(max=tk)] - before[:, first.clamp(min=0)])[:, None]


def signal_propagation(call: Call, query: int) -> Tensor:
    """For each sequence (B, H, Tk): 1 where z of the key is in [0, 1], 0 where not, NaN where unseen.

    Keys are counted from the sequence's first that is no padding; a negative `query` from its last.
    """
    b, h, _, tk = call.sizes
    row, counts = _row(call, query)
    q = torch.take_along_dim(call.q, row[:, None, None, None], 2)
    seen = _bias_of_row(call, row).masked_fill(~counts[:, None, None, None], -torch.inf)
    # each sequence's heads are heads of their own: what is shared among sequences is shared among one
    z = attention.signal_propagation(
        q.reshape(1, b * h, 1, -1),
        call.k.reshape(1, -1, tk, call.k.shape[3]),
        causal=False,
        scale=call.scale,
        softcap=call.softcap,
        bias=seen.expand(b, h, 1, tk).reshape(1, b * h, 1, tk),
    ).view(b, h, tk)
    column = torch.arange(tk, device=z.device) + _first_key(call)[:, None]  # (B, Tk)
    shifted = torch.take_along_dim(z, column.clamp(max=tk - 1)[:, None], 2)
    return shifted.masked_fill((column >= tk)[:, None], torch.nan)


def _row(call: Call, query: int) -> tuple[Tensor, Tensor]:
    """The row of the query in each sequence (B,), and whether there is one."""
    b, _, tq, _ = call.sizes
    real = torch.ones(b, tq, dtype=torch.bool, device=call.q.device) if call.real is None else call.real
    end = tq - real.flip(1).byte().argmax(1)
    row = end + query if query < 0 else torch.full_like(end, query)
    inside = (row >= 0) & (row < tq)
    row = row.clamp(0, tq - 1)
    return row, inside & real.gather(1, row[:, None])[:, 0]


def _bias_of_row(call: Call, row: Tensor) -> Tensor:
    """What is added to the logits of one query of each sequence (B, H or 1, 1, Tk), −∞ where it sees nothing."""
    b, _, tq, tk = call.sizes
    if call.bias is not None:
        rows = call.bias.expand(b, -1, tq, -1)
        one = torch.take_along_dim(rows, row[:, None, None, None], 2)
        added = torch.zeros_like(one, dtype=torch.float32) if one.dtype == torch.bool else one
        return added.masked_fill(~visible(one), -torch.inf)
    distance = torch.arange(tk, device=row.device) - (row + tk - tq)[:, None]  # (B, Tk)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if call.causal:
        hidden |= distance > 0
    if call.window is not None:
        hidden |= distance.abs() >= call.window
    if call.key_mask is not None:
        hidden |= ~call.key_mask
    return torch.zeros(b, 1, 1, tk, device=row.device).masked_fill_(hidden[:, None, None], -torch.inf)


def _first_key(call: Call) -> Tensor:
    """The first key (B,) that a query which is no padding sees."""
    b, _, tq, tk = call.sizes
    if call.key_mask is not None:
        return call.key_mask.byte().argmax(1)
    if call.bias is None or call.real is None:
        return torch.zeros(b, dtype=torch.long, device=call.q.device)
    seen = visible(call.bias).any(1).expand(b, tq, tk) & call.real[..., None]
    return seen.any(1).byte().argmax(1)
