"""What a prediction needs of one attention module: half of the sequences to estimate from, the other half measured.

Of every second sequence queries and keys are kept, and moments of the hidden states that enter. Of the others, held
out, nothing is kept but sums of what attention does.

Legend: B sequences, H query heads, G key heads, R query heads of each, Q queries of a sequence, T tokens, K head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.hooks import AttentionSite, Call
from locater.measure._moments import Moments


def query_positions(queries: Iterable[int]) -> tuple[int, ...]:
    """As ints; LocaterError if they are none."""
    try:
        return tuple(index(query) for query in queries)
    except TypeError as error:
        raise LocaterError(f"queries must be a list of positions, whole numbers, got {queries!r:.80}") from error


class Measured:
    """Sums over the sequences held out."""

    def __init__(self) -> None:
        self.sequences = 0
        self._sums: list[Tensor] = []

    def add(self, logits: Tensor, masked: Tensor, last: Tensor) -> None:
        """Logits (B, H, Q, T), which of them are masked (Q, T), and those of the last query (B, H, T)."""
        z = (1 + last - last.mean(-1, keepdim=True)) / last.shape[-1]
        log_weights = logits.masked_fill(masked, -torch.inf).log_softmax(-1)
        weights = log_weights.exp()
        entropy = -(weights * log_weights.masked_fill(masked, 0)).sum(-1)
        sums = [((z >= 0) & (z <= 1)).double().sum(0), weights.sum(0), entropy.sum(0), (entropy**2).sum(0)]
        self._sums = [old + new for old, new in zip(self._sums, sums, strict=True)] if self._sums else sums
        self.sequences += len(logits)

    @property
    def rho(self) -> Tensor:
        """(H, T), of the last query."""
        return self._sums[0] / self.sequences

    @property
    def weights(self) -> Tensor:
        """(H, Q, T)."""
        return self._sums[1] / self.sequences

    @property
    def entropy(self) -> Tensor:
        """(H, Q)."""
        return self._sums[2] / self.sequences

    @property
    def entropy_error(self) -> Tensor:
        """The standard error of that."""
        variance = (self._sums[3] / self.sequences - self.entropy**2).clamp(min=0)
        return (variance / max(1, self.sequences - 1)).sqrt()


class SplitRecorder:
    """Queries and keys of every second sequence, of `most` sequences in all; of the others what they do.

    `queries` are positions of a sequence, negative ones counted from its end.
    """

    def __init__(self, site: AttentionSite, queries: Sequence[int] = (-1,), most: int | None = None) -> None:
        if not queries:
            raise LocaterError("predictions are for chosen queries, and queries is empty")
        self.site, self.queries, self._most = site, tuple(queries), most
        self.sequences = 0
        self.scale = 1.0
        self.causal = False
        self.tokens = 0
        self.measured = Measured()
        self._kept: list[list[Tensor]] = []
        self.states: Moments | None = None
        self.steps: Moments  # from token to token

    def kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the sequences to estimate from: queries (n, G, R, Q, K), last ones (n, G, R, K) and keys (n, G, T, K)."""
        queries, last, keys = (torch.cat(parts).double() for parts in zip(*self._kept, strict=True))
        heads = keys.shape[1]
        return queries.unflatten(1, (heads, -1)), last.unflatten(1, (heads, -1)), keys

    def add(self, calls: Sequence[Call], states: Tensor | None) -> None:
        for call in calls:
            before, count = self.sequences, len(call.q)
            if self._most is not None:
                count = min(count, self._most - before)
            if not count:
                return  # what comes after `most` sequences may be of any kind
            self._check(call, count)
            self.sequences += count
            q, k = call.q[:count], call.k[:count]
            fit, held = slice(before % 2, None, 2), slice(1 - before % 2, None, 2)
            chosen, last = q[:, :, self.positions()], q[:, :, -1]
            # copies: a view would keep all of the batch's queries and keys
            self._kept.append([x[fit].to("cpu", torch.float32, copy=True) for x in (chosen, last, k)])
            self._measure(*(x[held].double().cpu() for x in (chosen, last, k)))
            if states is not None and len(calls) == 1:
                self._add_states(states[:count][fit])

    def positions(self) -> list[int]:
        return [query % self.tokens for query in self.queries]

    def _add_states(self, x: Tensor) -> None:
        if self.states is None:
            self.states, self.steps = Moments(x.shape[1]), Moments(x.shape[1] - 1)
        self.states.add(x)
        self.steps.add(x.float().diff(dim=1))

    def _measure(self, q: Tensor, last: Tensor, k: Tensor) -> None:
        """Queries (B, H, Q, K), last ones (B, H, K) and keys (B, G, T, K) that are held out."""
        if not len(q):
            return
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        after = torch.arange(self.tokens) > torch.tensor(self.positions())[:, None]
        masked = after if self.causal else torch.zeros_like(after)
        self.measured.add(self.scale * q @ k.mT, masked, self.scale * (last[:, :, None] @ k.mT)[:, :, 0])

    def _check(self, call: Call, count: int) -> None:
        """Whether the first `count` sequences of the call can be predicted."""
        _, _, tq, tk = call.sizes
        padded = any(mask is not None and not bool(mask[:count].all()) for mask in (call.key_mask, call.real))
        if padded or (self.tokens and self.tokens != tk):
            raise LocaterError(f"{self.site.name}: predicting needs sequences of one length, without padding")
        windowed = call.window is not None and call.window < tk
        if windowed or any(one is not None for one in (call.bias, call.softcap, call.sinks)):
            raise LocaterError(
                f"{self.site.name}: predicting is for attention whose last query has all keys by their products alone; "
                "this one has a position bias, a softcap, sinks, a window or a mask of its own"
            )
        if tq != tk or tk < 2 or call.members > 1:
            raise LocaterError(
                f"{self.site.name}: predicting needs whole sequences of 2 tokens or more, of one model, "
                f"got {tq} queries and {tk} keys of {call.members}"
            )
        if not all(-tk <= query < tk for query in self.queries):
            raise LocaterError(f"queries must be positions from {-tk} to {tk - 1}, got {list(self.queries)}")
        self.tokens, self.causal = tk, call.causal
        self.scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
