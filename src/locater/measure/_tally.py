"""What is kept of the calls of one attention module: sums over queries, never the queries themselves.

Legend: E members of a stack (1 of a model), B sequences of each, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.hooks import Call
from locater.measure import _calls


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "mps" else x.double()


class HeadTally:
    """Sums (E·H, …) over the queries that are no padding; ρ is over sequences.

    `queries` are those that ρ is kept for. With `by_position` the entropy of each row of queries is kept besides.
    """

    def __init__(self, queries: tuple[int, ...], by_position: bool = False) -> None:
        self._queries, self._by_position = queries, by_position
        self._sums: dict[str, Tensor] = {}
        self._max_logit: Tensor | None = None  # None before the first call

    def __bool__(self) -> bool:
        return self._max_logit is not None

    @torch.no_grad()
    def add(self, call: Call) -> None:
        found = call.without_empty()
        if found is None:
            return
        s = _calls.statistics(found)
        counts = s.logsumexp != -math.inf  # some key is unmasked; what is not a number shows in the sums
        keys = found.softmax_terms().expand_as(counts)
        if found.sinks is not None:
            counts &= keys > 1  # a sink alone is no attention
        if found.real is not None:
            counts &= found.real[:, None]
        has_share = counts & (keys > 1)
        share = s.entropy / keys.clamp(min=2).to(s.entropy.dtype).log()
        ones = torch.ones_like(share)
        values = torch.stack([ones, s.entropy, s.logsumexp, ones, share], -1)
        where = torch.stack([counts, counts, counts, has_share, has_share], -1)
        by_row = torch.where(where, _wide(values), 0)  # (E·B, H, Tq, 5)
        self._add("totals", by_row.sum(2), found.members)
        if self._by_position:
            self._add("queries by position", by_row[..., 0], found.members)
            self._add("entropy by position", by_row[..., 1], found.members)
        for query in self._queries:
            inside, unmasked = _calls.signal_propagation(found, query)  # (E·B, H, Tk)
            self._add(f"inside {query}", inside.to(s.entropy.dtype), found.members)
            self._add(f"unmasked {query}", unmasked.to(s.entropy.dtype), found.members)
        top = torch.where(counts, s.max_logit, -math.inf).amax(2).unflatten(0, (found.members, -1)).amax(1).flatten()
        self._max_logit = top if self._max_logit is None else torch.maximum(self._max_logit.to(top.device), top)

    def _add(self, name: str, values: Tensor, members: int) -> None:
        """Sums over the sequences of each member, in a new tensor: one of inference mode could not be changed."""
        total = values.unflatten(0, (members, -1)).sum(1).flatten(0, 1)
        self._sums[name] = _padded_sum(self._sums[name].to(total.device), total) if name in self._sums else total

    def columns(self) -> dict[str, Tensor]:
        """The table's, (E·H,) each."""
        assert self._max_logit is not None
        queries, entropy, logsumexp, with_share, share = self._sums["totals"].unbind(-1)
        return {
            "entropy": entropy / queries,
            "entropy_share": share / with_share,
            "max_logit": self._max_logit,
            "logsumexp": logsumexp / queries,
            "queries": queries.long(),
        }

    def rho(self, query: int) -> Tensor | None:
        """(E·H, Tk)."""
        if query not in self._queries:
            raise LocaterError(f"ρ was kept for the queries {self._queries}, not for {query}: ask observe for it")
        return self._sums[f"inside {query}"] / self._sums[f"unmasked {query}"] if self else None

    def entropy_by_position(self) -> Tensor | None:
        """(E·H, Tq)."""
        if not self._by_position:
            raise LocaterError("entropy by position was not kept; observe(model, by_position=True) does")
        return self._sums["entropy by position"] / self._sums["queries by position"] if self else None


def _padded_sum(a: Tensor, b: Tensor) -> Tensor:
    """a + b (E·H, …), of which the shorter has nothing to add to the end of the longer."""
    a, b = (b, a) if a.shape[-1] < b.shape[-1] else (a, b)
    return a + torch.nn.functional.pad(b, (0, a.shape[-1] - b.shape[-1]))


class TokenTally:
    """Sums over sequences of how alike their hidden states are."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None  # (4, E): the three of `columns`, and how many sequences

    @torch.no_grad()
    def add(self, x: Tensor, real: Tensor | None, members: int = 1) -> None:
        """Hidden states (B, T, D), or (E·B, T, D) of E members; sequences of fewer than two tokens do not count."""
        if x.ndim != 3 or x.shape[1] < 2:
            return
        x = x.detach().float() if x.element_size() < 4 else x.detach()
        if real is None or real.shape != x.shape[:2]:
            real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        tokens = real.sum(1)
        counts = tokens > 1
        x = x * real[..., None]
        total = x.square().sum((1, 2))
        apart = (x - x.sum(1, keepdim=True) / tokens.clamp(min=1)[:, None, None]) * real[..., None]
        energy = apart.square().sum((1, 2))
        with torch.autocast(x.device.type, enabled=False):
            gram = apart @ apart.mT if x.shape[1] <= x.shape[2] else apart.mT @ apart
        tiny = torch.finfo(x.dtype).tiny  # tokens that are all one have rank 0
        direction = torch.nn.functional.normalize(x, dim=-1).sum(1)
        values = torch.stack(
            [
                (energy / total.clamp(min=tiny)).sqrt(),
                energy.square() / gram.square().sum((1, 2)).clamp(min=tiny),  # (Σσ²)² / Σσ⁴
                (direction.square().sum(1) - tokens) / (tokens * (tokens - 1)),
                torch.ones_like(total),
            ]
        )
        sums = torch.where(counts, _wide(values), 0).unflatten(1, (members, -1)).sum(2)
        self._sums = sums if self._sums is None else self._sums.to(sums.device) + sums

    def means(self, member: int = 0) -> Tensor | None:
        """The three of `columns`, on the device; NaN where no sequence counted."""
        return None if self._sums is None else self._sums[:3, member] / self._sums[3, member]

    def columns(self, member: int = 0) -> dict[str, float] | None:
        if self._sums is None:
            return None
        rank_residual, effective_rank, cosine, sequences = self._sums[:, member].tolist()
        if not sequences:
            return None
        return {
            "rank_residual": rank_residual / sequences,
            "effective_rank": effective_rank / sequences,
            "mean_cosine": cosine / sequences,
            "sequences": int(sequences),
        }
