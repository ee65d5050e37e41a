"""LocAteR beside the optimizer: no update changes a head's logits abruptly, and none lets softmax freeze.

Both bounds are on logits, in nats, on states that enter attention as the model trains:

    change    the standard deviation, over the keys of a query, of how much one update moves its logits. Where it is
              exceeded, part of the update of W_Q and W_K is undone, and what remains is measured again.
    spread    the standard deviation of the logits themselves, the root of the effective logit variance. Where it is
              exceeded, W_Q and W_K are shrunk.

Neither counts updates or sequences. The rule is a function of three second moments of a head's logits before and after
an update.

Legend: n tokens of a sample, B sequences of it; leading dimensions are heads, with any before them (modules; models ×
layers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "SEQUENCES",
    "TOKENS",
    "VERSION",
    "Decoupled",
    "Factors",
    "initial_spread",
    "logit_moments",
    "part_of",
    "sampled_positions",
]

VERSION = 5  # raised when the formula changes: states of another version are refused
SEQUENCES, TOKENS = 2, 64  # a sample: so many tokens of the first sequences of a batch
_STRETCH = 8
_GROWN = 2**0.5  # times its initial spread a head may have, where that is beyond the bound already


class Factors(NamedTuple):
    """W_Q ← query · (old + keep · (W_Q − old)), W_K ← key · (old + keep · (W_K − old)), biases likewise."""

    keep: Tensor  # (…, 1) where query heads share a key, else (…, R)
    query: Tensor  # (…, R)
    key: Tensor  # (…, 1 or R)


@dataclass(frozen=True)
class Decoupled:
    """The rule. `spread` is where the softmax law gives normal, independent logits a quarter of ln T as entropy: from
    4.8 for T = 64 to 5.1 for T = 16,384 (docs/locater.md); a head that starts beyond it may grow by √2."""

    change: float | Tensor = 0.1
    spread: float = 4.9

    def holds(self, moments: Tensor, strength_factor: Tensor | float = 1.0) -> bool:
        """Whether every head is within both bounds, so that all factors are 1. Waits for the device."""
        before, cross, change = (strength_factor**2 * moments).unbind(-1)
        spread = before + 2 * cross + change
        return bool(((change <= self.change**2) & (spread <= self.spread**2)).all())

    def keep(
        self, moments: Tensor, strength_factor: Tensor | float = 1.0, *, shared_keys: bool = False, every: int = 1
    ) -> Tensor:
        """The fraction of an update to keep, by heads (…, R), or (…, 1) where query heads share a key.

        It is right to first order in the update: the moments of what remains give another fraction, to be multiplied
        with this one. With `every` = n, each n-th update alone is seen. The others are assumed to exceed the bound by
        as much, and up to all of the n-th is undone for that.
        """
        before, _, change = moments.unbind(-1)
        keep = (self.change / (strength_factor * change.sqrt())).clamp(max=1)
        keep = torch.where(change > 0, 1 - every * (1 - keep), 1.0).clamp(min=0)
        # logits that the update made not finite: undo it; logits that were not finite before tell nothing: keep it
        keep = torch.where(change.isfinite(), keep, torch.where(before.isfinite(), 0.0, 1.0))
        return keep.amin(-1, keepdim=True) if shared_keys else keep

    def factors(
        self,
        moments: Tensor,
        initial: Tensor,
        strength_factor: Tensor | float = 1.0,
        *,
        acts: tuple[bool, bool] = (True, True),
        shared_keys: bool = False,
        every: int = 1,
    ) -> Factors:
        """For what remains of an update, from its `logit_moments` (…, R, 3) and the initial spread of each head (…, R).

        Both bounds are divided by the schedule's factor. `acts`: whether multiplying W_Q, or W_K, by a number does so
        to logits (not where it is frozen, or normalised afterwards).
        """
        before, cross, change = moments.unbind(-1)
        keep = self.keep(moments, strength_factor, shared_keys=shared_keys)
        sound = moments.isfinite().all(-1)  # False for a placeholder, which does not show how sharp a head is
        spread = (before + keep * (2 * cross + keep * change)).clamp(min=0).sqrt()
        own, weighed = _GROWN * initial, strength_factor * spread
        # a head's own limit comes from one batch, and others may be sharper: shrink no faster than updates move logits
        limit = torch.where(own > self.spread, torch.maximum(own, weighed - every * self.change), self.spread)
        ratio = torch.where(sound, (limit / weighed.clamp(min=1e-30)).clamp(max=1), 1.0)
        one = torch.ones_like(ratio)
        if acts == (True, True) and not shared_keys:
            return Factors(keep, ratio.sqrt(), ratio.sqrt())
        if acts[0]:
            return Factors(keep, ratio, one[..., :1] if shared_keys else one)
        ratio = ratio.amin(-1, keepdim=True) if shared_keys else ratio
        return Factors(keep, one, ratio if acts[1] else torch.ones_like(ratio))


def sampled_positions(tokens: int, device: torch.device | None = None, length: Tensor | None = None) -> Tensor:
    """Which tokens of a sequence are in a sample: all of them, or eight stretches of eight, evenly from the first token
    to the last. So it has near offsets and far ones, and queries with few keys and with many.

    `length`: as many of the first tokens as there are to choose from, some of them repeatedly if they are too few.
    """
    if tokens <= TOKENS:
        every = torch.arange(tokens, device=device)
        return every if length is None else every * length // tokens
    count, further = TOKENS // _STRETCH, tokens - _STRETCH if length is None else (length - _STRETCH).clamp(min=0)
    starts = torch.arange(count, device=device) * further // (count - 1)
    found = (starts[:, None] + torch.arange(_STRETCH, device=device)).flatten()
    return found if length is None else torch.minimum(found, (length - 1).clamp(min=0)).sort().values


def initial_spread(moments: Tensor, initial: Tensor) -> Tensor:
    """The spread before the first update, once a finite sample shows it; −1 until then. A placeholder sample has NaN
    as its cross moment."""
    spread = moments[..., 0].clamp(min=0).sqrt()
    return torch.where((initial < 0) & moments[..., :2].isfinite().all(-1), spread, initial)


def part_of(keep: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Queries or keys (…, B, n, K) after keeping a fraction of an update: old + keep · (new − old), by heads."""
    keep = keep[..., None, None, None]
    return torch.where(keep == 0, old, torch.lerp(old, new, keep.to(old.dtype)))  # where new may not be finite


def logit_moments(before: Tensor, after: Tensor) -> Tensor:
    """Of logits (…, B, n, n) before an update and after it: the mean square of the logits before, their mean product
    with the change, and the mean square of that (…, 3), all about their mean over the keys of a query.

    Keys up to the query count, which are all that causal attention sees. A single token says nothing: NaN.
    """
    n = before.shape[-1]
    if n < 2:
        return before.new_full((*before.shape[:-3], 3), torch.nan)
    count = torch.arange(1, n + 1, dtype=before.dtype, device=before.device)[:, None]
    both = torch.stack([before, after - before]).tril_()  # n × n of every head: in place, memory is what takes time
    both.sub_(both.sum(-1, keepdim=True) / count).tril_()
    cross = (both[0] * both[1]).sum((-3, -2, -1))
    squares = both.square_().sum((-3, -2, -1))
    total = before.shape[-3] * (n * (n + 1) // 2 - 1)  # the first query has one key
    return torch.stack([squares[0], cross, squares[1]], dim=-1) / total
