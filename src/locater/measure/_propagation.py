"""ρ, the share of the batch where a key is on the slope of the piecewise linear softmax: z in [0, 1], Definition 1.

Legend as in `_logits`; n chosen queries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locater.measure._blocks import slices
from locater.measure._logits import Logits

__all__ = ["last_propagation", "signal_propagation"]


def last_propagation(logits: Logits) -> Tensor:
    """ρ (H, Tk) of each sequence's last query.

    Where nothing is hidden from it there is nothing to count: a dozen small launches on a GPU, made while the
    kernel still runs, where the general way takes four times as many and waits for the kernel to end.
    """
    if logits.bias is not None or logits.view.key_mask is not None or logits.view.left is not None:
        return signal_propagation(logits, torch.tensor([-1]))[:, 0]
    (b, h, _, _), tk = logits.q.shape, logits.k.shape[2]
    inside = torch.zeros(h, tk, dtype=logits.result, device=logits.q.device)
    place, everywhere = torch.full((1, 1), tk - 1, device=logits.q.device), (slice(0, h), slice(0, tk))
    for batch in slices(0, b, max(1, logits.budget // (h * tk))):
        s = logits.finish_(_last_products(logits, batch), place, batch, *everywhere, None)
        beyond = s - s.mean(-1, keepdim=True)  # Tk z − 1
        inside += ((beyond >= -1) & (beyond <= tk - 1)).sum(0)[:, 0]
    return inside / b


def _last_products(logits: Logits, batch: slice) -> Tensor:
    """Scaled products (b, H, 1, Tk) of the last query with all keys."""
    q, k = logits.q[batch, :, -1:], logits.k[batch]
    (b, h, _, width), (_, g, tk, _) = q.shape, k.shape
    if q.is_cuda and q.dtype == k.dtype and logits.wide == torch.float32:
        left = q.reshape(b * g, h // g, width)  # half numbers, whose products float32 holds exactly
        s = torch.bmm(left, k.flatten(0, 1).mT, out_dtype=torch.float32)
        return s.mul_(logits.view.scale).view(b, h, 1, tk)
    s = q.new_empty(b, h, 1, tk, dtype=logits.wide)
    step = min(tk, max(1, logits.budget // (b * g * width)))
    buffer = s.new_empty(b * h * step)
    for columns in slices(0, tk, step):
        s[..., columns] = logits.products(buffer, q, k[:, :, columns].to(logits.wide))
    return s


def signal_propagation(logits: Logits, queries: Tensor) -> Tensor:
    """ρ (H, n, Tk)."""
    (b, h, _, _), tk, n = logits.q.shape, logits.k.shape[2], len(queries)
    index, counts = _chosen(logits, queries.to(logits.q.device, non_blocking=True))
    inside = torch.zeros(h, n, tk, dtype=logits.result, device=logits.q.device)
    seeing = torch.zeros_like(inside)
    fit = max(1, logits.budget // (h * tk))
    for rows in slices(0, n, fit):
        for batch in slices(0, b, max(1, fit // n)):
            s = _chosen_logits(logits, index[batch, rows], batch)
            seen = (s != -math.inf) & counts[batch, None, rows, None]
            tokens = seen.sum(-1, keepdim=True)
            beyond = s - s.masked_fill(~seen, 0).sum(-1, keepdim=True) / tokens  # T z − 1
            inside[:, rows] += ((beyond >= -1) & (beyond <= tokens - 1) & seen).sum(0)
            seeing[:, rows] += seen.sum(0)
    return inside / seeing


def _chosen(logits: Logits, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (B, n) of the queries in each sequence, and whether they count."""
    (b, _, tq, _), tk = logits.q.shape, logits.k.shape[2]
    mask = logits.view.key_mask
    if mask is None or not logits.own_keys:
        tokens = torch.ones(b, tq, dtype=torch.bool, device=queries.device)
    else:
        tokens = mask[:, tk - tq :]
    end = tq - tokens.flip(1).int().argmax(1, keepdim=True)  # after each sequence's last visible token
    index = torch.where(queries < 0, queries + end, queries)
    counts = (index >= 0) & tokens.gather(1, index.clamp(min=0))
    return index.clamp_(min=0), counts


def _chosen_logits(logits: Logits, index: Tensor, batch: slice) -> Tensor:
    """Logits (b, H, n, Tk) of queries that may be others in each sequence."""
    (_, h, tq, width), (_, g, tk, _) = logits.q.shape, logits.k.shape
    q = torch.take_along_dim(logits.q[batch], index[:, None, :, None], 2)
    s = torch.empty(*q.shape[:3], tk, dtype=logits.wide, device=q.device)
    step = min(tk, max(1, logits.budget // (len(index) * g * width)))
    buffer = s.new_empty(q[..., 0].numel() * step)
    for columns in slices(0, tk, step):
        bias = None
        if logits.bias is not None:
            bias = s.new_zeros(())
            for row in index.unique().tolist():
                block = logits.bias_block(logits.bias, batch, slice(0, h), slice(row, row + 1), columns)
                bias = torch.where((index == row)[:, None, :, None], block, bias)
        products = logits.products(buffer, q, logits.k[batch, :, columns].to(logits.wide))
        place = index + (tk - tq)
        s[..., columns] = logits.finish_(products, place, batch, slice(0, h), columns, bias)
        logits.hide_(s[..., columns], place, columns)
    return s
