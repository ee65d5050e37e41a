"""Query and key weights as models store them: tensors, and views (G, R, K, D) and (G, 1, K, D) of them."""

from __future__ import annotations

import torch


def rows(groups, heads, k, d, **kind):
    """Linear layers: separate, D contiguous."""
    query, key = torch.randn(groups * heads * k, d, **kind), torch.randn(groups * k, d, **kind)
    return query, key, lambda q, _: q.view(groups, heads, k, d), lambda _, t: t.view(groups, 1, k, d)


def transposed(groups, heads, k, d, **kind):
    """GPT-2's Conv1D: stored (D, queries keys values), K contiguous, the other two in between."""
    stored, n = torch.randn(d, (heads + 2) * groups * k, **kind), groups * heads * k
    return (
        stored,
        stored,
        lambda q, _: q[:, :n].unflatten(1, (groups, heads, k)).permute(1, 2, 3, 0),
        lambda _, t: t[:, n : n + groups * k].unflatten(1, (groups, 1, k)).permute(1, 2, 3, 0),
    )


def fused(groups, heads, k, d, **kind):
    """Falcon: query heads, key and value of a group one after the other."""
    stored = torch.randn(groups * (heads + 2) * k, d, **kind)
    return (
        stored,
        stored,
        lambda q, _: q.view(groups, heads + 2, k, d)[:, :heads],
        lambda _, t: t.view(groups, heads + 2, k, d)[:, heads : heads + 1],
    )


def unaligned(groups, heads, k, d, **kind):
    """Parts of a flat buffer that starts anywhere."""
    query, key = torch.randn(groups * heads * k * d + 1, **kind), torch.randn(groups * k * d + 1, **kind)
    return query, key, lambda q, _: q[1:].view(groups, heads, k, d), lambda _, t: t[1:].view(groups, 1, k, d)
