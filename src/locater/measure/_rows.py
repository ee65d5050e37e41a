"""Entropy, largest logit and logsumexp of every query, in blocks of queries and keys; see `_blocks` for what is kept.

Legend as in `_logits`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locater.measure import _kernels
from locater.measure._blocks import Sums, counted_from, cut_from, shares, slices, within
from locater.measure._logits import Logits

__all__ = ["row_statistics"]

_BLOCK = 2048  # queries and keys of a block, at most


def row_statistics(logits: Logits) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, largest logit and logsumexp (B, H, Tq): by the kernel where it applies, else by blocks in PyTorch."""
    if logits.bias is None and _kernels.applies(logits.q, logits.k, logits.view):
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
    tq, tk, left, right = logits.q.shape[2], logits.k.shape[2], logits.view.left, logits.view.right
    heads, ahead = logits.heads(groups), tk - tq  # the place of the first query
    q = logits.q[batch, heads]
    sums = Sums(q.shape[:3], logits.wide, q.device)
    for keys in slices(0, tk, _BLOCK):
        k = logits.k[batch, groups, keys].to(logits.wide)
        low = 0 if right is None else max(0, keys.start - right - ahead)
        high = tq if left is None else min(tq, keys.stop + left - ahead)
        for rows in slices(low, high, queries):  # those that see one of the keys
            columns = _near(logits, rows, keys)
            s = logits.products(buffer, q[:, :, rows], k[:, :, counted_from(keys, columns)])
            sums.add((slice(None), slice(None), rows), _of_block(logits, s, batch, heads, rows, columns))
    return sums


def _of_block(logits: Logits, s: Tensor, batch: slice, heads: slice, rows: slice, columns: slice) -> Sums:
    """Of one block of products (b, h, n, c), which are overwritten."""
    bias = None if logits.bias is None else logits.bias_block(logits.bias, batch, heads, rows, columns)
    ahead, masked = logits.k.shape[2] - logits.q.shape[2], bias is not None or logits.view.key_mask is not None
    block = Sums(s.shape[:3], s.dtype, s.device)
    for part in shares(s.shape, s.device):
        b, h, n = (within(outer, inner) for outer, inner in zip((batch, heads, rows), part, strict=True))
        seen = _near(logits, n, columns)
        if seen.start >= seen.stop:
            continue
        cut = (*part, counted_from(columns, seen))
        place = torch.arange(n.start + ahead, n.stop + ahead, device=s.device)[None]
        x = logits.finish_(s[cut], place, b, h, seen, None if bias is None else cut_from(bias, cut))
        edges = _edges(logits, n, seen)
        for edge in edges:
            logits.hide_(x[..., counted_from(seen, edge)], place, edge)
        block.set(part, x, hidden=masked or bool(edges))
    return block


def _near(logits: Logits, rows: slice, keys: slice) -> slice:
    """From the first of the keys that is near enough to one of the queries to the last."""
    left, right, ahead = logits.view.left, logits.view.right, logits.k.shape[2] - logits.q.shape[2]
    start = keys.start if left is None else max(keys.start, rows.start + ahead - left)
    return slice(start, keys.stop if right is None else min(keys.stop, rows.stop + ahead + right))


def _edges(logits: Logits, rows: slice, keys: slice) -> list[slice]:
    """Where keys are near enough to some of the queries and not to others."""
    left, right, ahead = logits.view.left, logits.view.right, logits.k.shape[2] - logits.q.shape[2]
    found = []
    if left is not None:
        found.append(slice(keys.start, min(keys.stop, rows.stop - 1 + ahead - left)))
    if right is not None:
        found.append(slice(max(keys.start, rows.start + ahead + right + 1), keys.stop))
    return [edge for edge in found if edge.start < edge.stop]
