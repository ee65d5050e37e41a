"""What is kept of the calls of one attention module: sums over queries, never the queries themselves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locater.hooks import Call
from locater.measure import _calls
from locater.measure.attention import AttentionStatistics

__all__ = ["HeadTally", "TokenTally"]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "mps" else x.double()


def _moved(total: Tensor, to: Tensor) -> Tensor:
    """Sums so far, where the model is now."""
    return total.to(to.device)


class HeadTally:
    """Sums over the queries that are no padding, (H,) each, and over sequences for ρ; E·H heads of E members."""

    def __init__(self) -> None:
        self.queries: Tensor | None = None  # how many
        self._entropy: Tensor
        self._share: Tensor  # of entropy / ln(unmasked keys)
        self._chosen: Tensor  # how many queries had two keys or more, and so a share
        self._logsumexp: Tensor
        self._max_logit: Tensor
        self._inside: dict[int, Tensor] = {}  # by query (H, Tk): sequences with z in [0, 1]
        self._unmasked: dict[int, Tensor] = {}  # and for how many the key was unmasked

    # Sums are made anew each time: those made in inference mode cannot be changed outside of it.

    @torch.no_grad()
    def add(self, call: Call, queries: tuple[int, ...]) -> None:
        found = call.without_empty()
        if found is None:
            return
        s = self._statistics(found)
        counts = s.logsumexp != -math.inf  # some key is unmasked; what is not a number shows in the sums
        if found.real is not None:
            counts &= found.real[:, None]
        keys = found.visibility.unmasked_keys().expand_as(counts)
        has_share = counts & (keys > 1)
        share = s.entropy / keys.clamp(min=2).to(s.entropy.dtype).log()
        old, members = self.queries is not None, (found.members, -1)
        for name, values, where in (
            ("queries", torch.ones_like(s.entropy), counts),
            ("_entropy", s.entropy, counts),
            ("_share", share, has_share),
            ("_chosen", torch.ones_like(s.entropy), has_share),
            ("_logsumexp", s.logsumexp, counts),
        ):
            total = torch.where(where, _wide(values), 0).sum(2).unflatten(0, members).sum(1).flatten()
            setattr(self, name, _moved(getattr(self, name), total) + total if old else total)
        top = torch.where(counts, s.max_logit, -math.inf).amax(2).unflatten(0, members).amax(1).flatten()
        self._max_logit = torch.maximum(_moved(self._max_logit, top), top) if old else top
        for query in queries:
            parts = _calls.signal_propagation(found, query)
            for sums, part in zip((self._inside, self._unmasked), parts, strict=True):
                total = part.unflatten(0, members).sum(1, dtype=s.entropy.dtype).flatten(0, 1)  # (E·H, Tk)
                sums[query] = _padded_sum(sums.get(query), total)

    def _statistics(self, call: Call) -> AttentionStatistics:
        return _calls.statistics(call)

    def columns(self) -> dict[str, Tensor]:
        """The table's, (H,) each."""
        assert self.queries is not None
        return {
            "entropy": self._entropy / self.queries,
            "entropy_share": self._share / self._chosen,
            "max_logit": self._max_logit,
            "logsumexp": self._logsumexp / self.queries,
            "queries": self.queries.long(),
        }

    def rho(self, query: int) -> Tensor:
        """(H, Tk)."""
        return self._inside[query] / self._unmasked[query]


def _padded_sum(a: Tensor | None, b: Tensor) -> Tensor:
    """a + b (H, Tk), of which the one with fewer keys has nothing to add to the others."""
    if a is None:
        return b
    a = _moved(a, b)
    a, b = (b, a) if a.shape[1] < b.shape[1] else (a, b)
    return a + torch.nn.functional.pad(b, (0, a.shape[1] - b.shape[1]))


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
        self._sums = sums if self._sums is None else _moved(self._sums, sums) + sums

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
