"""All turns of rotary positions at once, by other ways than the package's."""

from __future__ import annotations

from dataclasses import replace

import torch


def all_rotations(rope, weight):
    """Keys turned by so many offsets that a mean over them is the mean over every pair's turning on its own, as far as
    products of two coordinates go: the frequencies are no two of them alike, nor opposite, in N = 2 pairs + 1."""
    n = 2 * rope.pairs + 1
    other = replace(rope, frequencies=2 * torch.pi * torch.arange(1, rope.pairs + 1).double() / n, gain=1.0)
    return torch.stack([other.rotate_rows(weight, offset) for offset in range(n)])


def pairs_of(rope):
    """The coordinates that turn together."""
    n = rope.pairs
    return [[2 * i, 2 * i + 1] if rope.interleaved else [i, n + i] for i in range(n)]


def largest_product(rope, gram_q, gram_k):
    """Block by block: between pairs and with what does not turn by their norms, the rest as it is."""
    passed = list(range(2 * rope.pairs, gram_q.shape[-1]))
    blocks = [*pairs_of(rope), passed] if passed else pairs_of(rope)
    total = 0.0
    for rows in blocks:
        for columns in blocks:
            one, other = (gram[..., rows, :][..., columns] for gram in (gram_q, gram_k))
            if rows is passed and columns is passed:
                total = total + (one * other).sum((-2, -1))
            else:
                total = total + torch.linalg.matrix_norm(one) * torch.linalg.matrix_norm(other)
    return total
