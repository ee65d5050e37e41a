"""ρ, the share of the batch where a key is on the slope of the piecewise linear softmax: z in [0, 1], Definition 1.

Legend as in `_logits`; n chosen queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from locater.measure._blocks import slices
from locater.measure._logits import Logits


def last_propagation(logits: Logits) -> Tensor:
    """ρ (H, Tk) of each sequence's last query.

    Where no key is masked for it there is nothing to count: a dozen small launches on a GPU, made while the kernel
    still runs, where the general way takes four times as many and waits for the kernel to end.
    """
    masks = logits.visibility
    b, h, _, tk = masks.shape
    if masks.bias is not None or masks.key_mask is not None or masks.left < tk - 1:
        return signal_propagation(logits, torch.tensor([-1]))[:, 0]
    inside = torch.zeros(h, tk, dtype=logits.result, device=logits.q.device)
    last, everywhere = torch.full((1, 1), tk - 1, device=logits.q.device), (slice(0, h), slice(0, tk))
    for batch in slices(0, b, max(1, logits.budget // (h * tk))):
        s = logits.finish_(_last_products(logits, batch), last, batch, *everywhere, None)
        inside += _on_slope(logits, s, s.sum(-1, keepdim=True), tk).sum(0)[:, 0]
    return inside / b


def _last_products(logits: Logits, batch: slice) -> Tensor:
    """Scaled products (b, H, 1, Tk) of the last query with all keys."""
    q, k = logits.q[batch, :, -1:], logits.k[batch]
    if q.is_cuda and q.dtype == k.dtype and logits.wide == torch.float32:
        (b, h, _, width), (_, g, tk, _) = q.shape, k.shape
        left = q.reshape(b * g, h // g, width)  # half numbers, whose products float32 holds exactly
        s = torch.bmm(left, k.flatten(0, 1).mT, out_dtype=torch.float32)
        return s.mul_(logits.scale).view(b, h, 1, tk)
    return torch.cat([s for _, s in _products(logits, q, k)], -1)


def _products(logits: Logits, q: Tensor, k: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Scaled products of q (b, H, n, K) with some keys of k (b, G, Tk, K) at a time."""
    b, g, tk, width = k.shape
    for columns in slices(0, tk, max(1, logits.budget // (b * g * width))):
        out = q.new_empty(q[..., 0].numel() * (columns.stop - columns.start), dtype=logits.wide)
        yield columns, logits.products(out, q, k[:, :, columns].to(logits.wide))


def signal_propagation(logits: Logits, queries: Tensor) -> Tensor:
    """ρ (H, n, Tk)."""
    (b, h, _, tk), n = logits.visibility.shape, len(queries)
    index, counts = chosen(_tokens(logits), queries.to(logits.q.device, non_blocking=True))
    inside = torch.zeros(h, n, tk, dtype=logits.result, device=logits.q.device)
    attending = torch.zeros_like(inside)
    fit = max(1, logits.budget // (h * tk))
    for rows in slices(0, n, fit):
        for batch in slices(0, b, max(1, fit // n)):
            found, unmasked = on_slope(logits, index[batch, rows], counts[batch, rows], batch)
            inside[:, rows] += found.sum(0)
            attending[:, rows] += unmasked.sum(0)
    return inside / attending


def on_slope(logits: Logits, index: Tensor, counts: Tensor, batch: slice) -> tuple[Tensor, Tensor]:
    """Where z is in [0, 1] for queries `index` (b, n) of each sequence, and where keys are unmasked: (b, H, n, Tk).

    All keys of a query that does not count are taken for masked.
    """
    s = _chosen_logits(logits, index, batch)
    unmasked = (s != -math.inf) & counts[:, None, :, None]
    total = s.masked_fill(~unmasked, 0).sum(-1, keepdim=True)
    return _on_slope(logits, s, total, unmasked.sum(-1, keepdim=True)) & unmasked, unmasked


def _on_slope(logits: Logits, s: Tensor, total: Tensor, keys: Tensor | int) -> Tensor:
    """Where z is in [0, 1], of logits s (b, H, n, Tk), of which so many are unmasked, and their sum (b, H, n, 1)."""
    if logits.sinks is not None:
        total, keys = total + logits.sinks[:, None, None], keys + 1
    beyond = s - total / keys  # T z − 1
    return (beyond >= -1) & (beyond <= keys - 1)


def _tokens(logits: Logits) -> Tensor:
    """Which queries (B, Tq) are no padding."""
    masks = logits.visibility
    if masks.key_mask is not None and logits.own_keys:
        return masks.key_mask[:, masks.offset :]
    return torch.ones(masks.shape[::2], dtype=torch.bool, device=masks.device)


def chosen(tokens: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (B, n) of the queries in each sequence, and whether they are tokens (B, Tq); negative ones from the last."""
    tq = tokens.shape[1]
    end = tq - tokens.flip(1).byte().argmax(1, keepdim=True)  # after each sequence's last token
    row = torch.where(queries < 0, queries + end, queries)
    index = row.clamp(0, tq - 1)
    return index, (row == index) & tokens.gather(1, index)


def _chosen_logits(logits: Logits, index: Tensor, batch: slice) -> Tensor:
    """Logits (b, H, n, Tk) of queries that may be others in each sequence."""
    masks, heads = logits.visibility, slice(0, logits.q.shape[1])
    q = torch.take_along_dim(logits.q[batch], index[:, None, :, None], 2)
    positions, blocks = index + masks.offset, []
    for columns, s in _products(logits, q, logits.k[batch]):
        bias = None
        if masks.bias is not None:
            bias = s.new_zeros(())
            for row in index.unique().tolist():
                block = masks.bias_block(slice(row, row + 1), columns, s.dtype, batch)
                bias = torch.where((index == row)[:, None, :, None], block, bias)
        s = logits.finish_(s, positions, batch, heads, columns, bias)
        blocks.append(s.masked_fill_(masks.distant(positions, columns), -math.inf))
    return torch.cat(blocks, -1)
