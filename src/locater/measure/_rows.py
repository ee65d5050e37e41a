"""Entropy, largest logit and logsumexp of every query, in blocks of queries and keys; see `_blocks` for what is kept.

Legend as in `_logits`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locater.hooks import cut_from
from locater.measure import _kernels
from locater.measure._blocks import Sums, counted_from, shares, slices, within
from locater.measure._logits import Logits

_BLOCK = 2048  # queries and keys of a block, at most


def row_statistics(logits: Logits) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, largest logit and logsumexp (B, H, Tq): by the kernel where it applies, else by blocks in PyTorch."""
    if logits.visibility.bias is None and _kernels.applies(logits.q, logits.k, logits.view):
        return _kernels.row_statistics(logits.q, logits.k, logits.view)
    return _by_blocks(logits)


def _by_blocks(logits: Logits) -> tuple[Tensor, Tensor, Tensor]:
    q, result = logits.q, logits.result
    entropy, top, lse = (torch.empty(q.shape[:3], dtype=result, device=q.device) for _ in range(3))
    batch, groups, queries = _sizes(logits)
    columns = min(_BLOCK, logits.k.shape[2])
    per_group = logits.q.shape[1] // logits.k.shape[1]
    buffer = torch.empty(batch * groups * per_group * queries * columns, dtype=logits.wide, device=q.device)
    for some in slices(0, len(q), batch):
        for group in slices(0, logits.k.shape[1], groups):
            where = (some, logits.heads(group))
            sums = _pass(logits, buffer, some, group, queries)
            entropy[where] = (sums.total.log() - sums.weighted / sums.total).masked_fill_(sums.m == -math.inf, 0)
            top[where] = sums.m
            lse[where] = sums.m + sums.total.log()
    return entropy, top, lse


def _sizes(logits: Logits) -> tuple[int, int, int]:
    """How many sequences, key heads and queries a block of logits has that fits the budget."""
    (b, h, tq, _), (_, g, tk, _) = logits.q.shape, logits.k.shape
    per_group, columns = h // g, min(tk, _BLOCK)
    queries = max(1, min(tq, _BLOCK, logits.budget // (columns * per_group)))
    groups = max(1, min(g, logits.budget // (columns * per_group * queries)))
    return max(1, min(b, logits.budget // (columns * per_group * queries * groups))), groups, queries


def _pass(logits: Logits, buffer: Tensor, batch: slice, groups: slice, queries: int) -> Sums:
    """Of all queries of some sequences and heads, by blocks that fit the buffer, of so many queries each."""
    heads, masks = logits.heads(groups), logits.visibility
    q = logits.q[batch, heads]
    sums = Sums(q.shape[:3], logits.wide, q.device, None if logits.sinks is None else logits.sinks[heads])
    for keys in slices(0, logits.k.shape[2], _BLOCK):
        k, near = logits.k[batch, groups, keys].to(logits.wide), masks.rows(keys)
        for rows in slices(near.start, near.stop, queries):
            columns = masks.columns(rows, keys)
            s = logits.products(buffer, q[:, :, rows], k[:, :, counted_from(keys, columns)])
            sums.add((slice(None), slice(None), rows), _of_block(logits, s, batch, heads, rows, columns))
    return sums


def _of_block(logits: Logits, s: Tensor, batch: slice, heads: slice, rows: slice, columns: slice) -> Sums:
    """Of one block of products (b, h, n, c), which are overwritten."""
    masks = logits.visibility
    bias = None if masks.bias is None else masks.bias_block(rows, columns, s.dtype, batch, heads)
    block = Sums(s.shape[:3], s.dtype, s.device)
    for part in shares(s.shape, s.device):
        b, h, n = (within(outer, inner) for outer, inner in zip((batch, heads, rows), part, strict=True))
        near = masks.columns(n, columns)
        if near.start >= near.stop:
            continue
        cut, positions = (*part, counted_from(columns, near)), masks.positions(n)[None]
        x = logits.finish_(s[cut], positions, b, h, near, None if bias is None else cut_from(bias, cut))
        edges = masks.edges(n, near)
        for edge in edges:
            x[..., counted_from(near, edge)].masked_fill_(masks.distant(positions, edge), -math.inf)
        block.set(part, x, masked=bool(edges) or bias is not None or masks.key_mask is not None)
    return block
