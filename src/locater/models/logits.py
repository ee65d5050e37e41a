"""The logits that softmax was given, beside the same rebuilt from parts: the proof.

Legend: B batch, T tokens, H heads, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from locater.models.attention import Attention
from locater.models.flow import Compared
from locater.models.layers import Unread
from locater.models.positions import Alibi

__all__ = ["CLOSE", "Logits", "angles", "by_token"]

CLOSE = 1e-4  # of the largest: what counts as equal in a twin
_UNSEEN = 50.0  # a logit so much below a query's largest is masked: its weight is below e⁻⁵⁰


def by_token(x: Tensor, batch: int, tokens: int, time_first: bool) -> Tensor:
    """(B, T, …) of rows."""
    x = x.reshape(-1, x.shape[-1])
    rows: Tensor = x.unflatten(0, (tokens, batch)).transpose(0, 1) if time_first else x.unflatten(0, (batch, tokens))
    return rows


def angles(u: Tensor, z: Tensor, size: int, interleaved: bool) -> Tensor | None:
    """(T, pairs) by which the first pairs of u (B, heads, T, K) are turned to be z's; None if none does for all."""

    def paired(x: Tensor) -> Tensor:
        x = x[..., :size].double()
        return torch.complex(*((x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)))

    a, b = paired(u), paired(z)
    angle = (b * a.conj()).sum((0, 1)).angle()
    left = torch.view_as_real(a * torch.polar(torch.ones_like(angle), angle) - b).flatten(-2)
    largest = max(float(x.abs().max()) for x in (left, (u - z)[..., size:]) if x.numel())
    return angle if largest <= 10 * CLOSE * z.abs().max() else None


@dataclass(frozen=True)
class Logits:
    """What softmax was given (B, H, Tq, Tk), and the same rebuilt from parts."""

    real: Tensor
    rebuilt: Tensor
    visible: Tensor

    @classmethod
    def of(cls, seen: Compared, attention: Attention, time_first: bool = False) -> Logits:
        """`time_first`: the module's layers are given the tokens of all sequences one after the other."""
        product, heads = seen.product, attention.heads
        (n, *_), keys = product.q.shape, product.k.shape[1]
        if n % heads:
            raise Unread(f"{n} products are not those of {heads} heads")
        states = []
        for path, x, made in (
            (seen.query, product.q, attention.query_input),
            (seen.key, product.k, attention.key_input),
        ):
            found = product.states if made is not None else next(iter(path.sources)).states
            if found is None or found.numel() // found.shape[-1] != n // heads * x.shape[1]:
                raise Unread("the states that enter it are not known")
            states.append(by_token(found, n // heads, x.shape[1], time_first and made is None))
        positions = None
        if attention.rope is not None and not attention.rope.on_a_line:
            positions = _measured_angles(attention, states, (product.q, product.k))
        rebuilt = attention.logits(*states, positions=positions)
        real = seen.logits[..., :keys].reshape(rebuilt.shape)
        if not bool(torch.isfinite(rebuilt).all()):
            raise Unread("what it compares in its twin is not finite")
        visible = real > real.amax(-1, keepdim=True) - _UNSEEN
        if not bool(visible.any()):
            raise Unread("all keys are masked in its twin")
        less_largest = bool((real.amax(-1) == 0).all())
        if isinstance(attention.position_bias, Alibi) or seen.logits.shape[-1] > keys or less_largest:
            # a shift of all logits of a query (and of its sink), which no softmax sees: by its position or the largest
            count = visible.sum(-1, keepdim=True).clamp(min=1)
            real, rebuilt = (x - x.masked_fill(~visible, 0).sum(-1, keepdim=True) / count for x in (real, rebuilt))
        return cls(real, rebuilt, visible)

    @property
    def range(self) -> float:
        seen = self.real[self.visible]
        return float(seen.max() - seen.min())

    @property
    def difference(self) -> float:
        """The largest."""
        return float((self.rebuilt - self.real)[self.visible].abs().max())

    @property
    def agree(self) -> bool:
        return self.difference <= CLOSE * self.range


def _measured_angles(
    attention: Attention, states: list[Tensor], compared: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Those (T, pairs) by which queries and keys of all heads and sequences are rotated."""
    rope, nowhere, found = attention.rope, torch.zeros(0), []
    assert rope is not None
    sides = replace(attention, rope=None, query_gain=None).project(states[0], states[1], (nowhere, nowhere))
    for u, z in zip(sides, compared, strict=True):
        u = u.expand(-1, -1, len(compared[0]) // len(u) // u.shape[1], -1, -1).flatten(1, 2)
        z = z.reshape(u.shape)
        angle = angles(u * (z.norm() / u.norm()), z, 2 * rope.pairs, rope.interleaved)
        if angle is None:
            raise Unread("queries or keys are not rotated as they were found to be")
        found.append(angle)
    return found[0], found[1]
