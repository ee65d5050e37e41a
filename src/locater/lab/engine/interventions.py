"""Interventions on the members of a stack: entropy, trace or scale held; LocAteR in some layers, for a time, or noise.

All are done by tensors that say which member, layer and head they are for, in a fixed number of operations: an update
is replayed on a GPU. What is held is held in every training batch:

- Entropy by a factor c on a head's logits, with mean entropy of softmax(c s) over the batch's queries = level, and c
  a constant to the gradient. A member that follows has the level of its leader in the same layer of the same batch.
  At validation c is a running geometric mean of training's: one number for all texts, as a model that is used has it.
  Solving on the validation text would take something from that text, and the last batch's own c is noisy.
- Trace and scale by the closest W_Q and W_K that have them, after every update and at the start.

Legend: E stacked models, F of them with a temperature, B blocks, L layers, T tokens, N = B·T, H heads, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from locater.lab.config import Config, Member, ModelConfig
from locater.lab.engine._random import dropout_bits, site_key
from locater.lab.engine.heads import Parameters, all_heads
from locater.lab.engine.methods import Method, method_of
from locater.lab.intervention import check_interventions
from locater.qk import QK

__all__ = ["Interventions", "method_for", "random_directions", "with_scale", "with_trace"]

_NEWTON_STEPS = 12  # a few halvings from anywhere, then quadratic convergence
_LOG_FACTORS = 12.0  # the factor on logits lies between e⁻¹² and e¹²
_HORIZON = 20  # updates over which the factor for validation is averaged
_NOISE_SITE = 1 << 32  # beyond dropout's


class _Followed(NamedTuple):
    """Members whose entropy is held in one layer."""

    rows: Tensor  # (F,)
    levels: Tensor  # (F,); for those that follow, any number
    followers: Tensor  # where in the rows these are
    leaders: Tensor  # whom they follow


class _Held(NamedTuple):
    """Members and layers in which a property of W_QK is held."""

    rows: Tensor  # (P,)
    layers: Tensor
    levels: Tensor


class Interventions(Method):
    """Those of the members of one stack. A member that has none trains as it would without the others."""

    version = 1  # raised when a formula changes: what was trained by another does not go on

    def __init__(self, config: Config, members: Sequence[Member], strength: Tensor) -> None:
        super().__init__(config.model, strength)
        check_interventions(config.model, members)
        self._members = members
        self._numbers = {member.name: e for e, member in enumerate(members)}
        every = range(config.model.layers)
        own = [(e, m.intervention) for e, m in enumerate(members) if m.intervention is not None]
        where = {e: each.layers or tuple(every) for e, each in own}
        self._acting = strength.new_ones(len(members), config.model.layers)  # where LocAteR acts
        self._until = strength.new_full((len(members),), math.inf)  # the update at which it ends
        for e, each in own:
            self._acting[e] = self._float([layer in where[e] for layer in every])
            self._until[e] = math.inf if each.until == 1 else each.until * config.steps
        self._entropies = [
            self._entropy_in([e for e, each in own if each.holds_entropy and layer in where[e]]) for layer in every
        ]
        self._traces, self._scales = (
            self._held([(e, layer, level) for e, level in held if level is not None for layer in where[e]])
            for held in ([(e, each.trace) for e, each in own], [(e, each.scale) for e, each in own])
        )
        noisy = [(e, each) for e, each in own if each.noise_of is not None]
        self._noisy = self._whole([e for e, _ in noisy])
        self._noise_leaders = self._whole([self._numbers[each.noise_of or ""] for _, each in noisy])
        self._fresh = self._whole([not each.noise_fixed for _, each in noisy])  # 0 for a direction that stays
        self._seeds = self._whole([members[e].seed for e, _ in noisy])

    def _whole(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.strength.device)

    def _float(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=self.strength.dtype, device=self.strength.device)

    def _entropy_in(self, rows: list[int]) -> _Followed | None:
        own = [each for e in rows if (each := self._members[e].intervention) is not None]
        followers = [(i, self._numbers[each.entropy_of]) for i, each in enumerate(own) if each.entropy_of is not None]
        levels = self._float([0.0 if each.entropy is None else each.entropy for each in own])
        at, leaders = self._whole([i for i, _ in followers]), self._whole([e for _, e in followers])
        return _Followed(self._whole(rows), levels, at, leaders) if rows else None

    def _held(self, cases: list[tuple[int, int, float]]) -> _Held | None:
        if not cases:
            return None
        rows, layers, levels = zip(*cases, strict=True)
        return _Held(self._whole(rows), self._whole(layers), self._float(levels))

    # ------------------------------------------------------------------ what is carried from step to step

    def start(self, values: Parameters) -> None:
        shape = len(self._members), self.config.layers, self.config.heads
        self._log_factors = self.strength.new_zeros(shape)  # running means of ln c
        self._batches = torch.zeros((), dtype=torch.int64, device=self.strength.device)
        self._project(values)

    def state(self) -> dict[str, Tensor]:
        return {"log_factors": self._log_factors, "batches": self._batches}

    def temperatures(self, member: int) -> Tensor | None:
        """1/c of a member's layers and heads, (L, H), as validation has it; None for one without."""
        own = self._members[member].intervention
        return (-self._log_factors[member]).exp() if own is not None and own.holds_entropy else None

    # ------------------------------------------------------------------ entropy

    def begin(self, real: Tensor) -> None:
        self._real = real.unflatten(1, (-1, self.config.tokens))  # (E, B, T)
        self._batches += 1

    def compare(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        del p
        held = self._entropies[layer]
        if held is None:
            return q, k
        with torch.no_grad():
            own = _CausalLogits(q[held.rows], k[held.rows], self._real[held.rows])
            led = _CausalLogits(q[held.leaders], k[held.leaders], self._real[held.leaders])
            running = self._log_factors[:, layer]
            before = running[held.rows]  # (F, H)
            levels = held.levels[:, None].expand_as(before).clone()
            levels.index_copy_(0, held.followers, led.entropy(before.new_zeros(len(held.leaders), before.shape[1]))[0])
            found = _root(lambda x: own.excess(x, levels), before, _LOG_FACTORS)
            found = torch.where(levels.isfinite(), found, before)  # a leader that broke leads nobody
            share = 1 / self._batches.clamp(max=_HORIZON).to(found.dtype)  # the mean of all batches at first
            running.index_copy_(0, held.rows, torch.lerp(before, found, share))
            factors = torch.ones_like(running).index_copy_(0, held.rows, found.exp())
        return _scaled(q, factors), k

    def at_inference(self) -> Method:
        return _AtInference(self.config, self.strength, self._log_factors)

    # ------------------------------------------------------------------ W_Q and W_K

    def after_update(self, values: Parameters, rate: Tensor, factor: Tensor) -> bool:
        del rate, factor
        return self._project(values)

    def _project(self, values: Parameters) -> bool:
        """Gives W_QK the trace or scale that is held; says whether there is any."""
        w_q, w_k = (qk := all_heads(values, self.config, None).qk).w_q, qk.w_k  # (E, L, H, K, D), views
        for held, nearest in ((self._traces, with_trace), (self._scales, with_scale)):
            if held is not None:
                at = held.rows, held.layers
                found = nearest(QK(w_q[at], w_k[at]), held.levels[:, None])
                w_q.index_put_(at, found.w_q)
                w_k.index_put_(at, found.w_k)
        return self._traces is not None or self._scales is not None

    def pull(self, layer: int, of_q: Tensor, of_k: Tensor, clock: Tensor) -> tuple[Tensor, Tensor]:
        acting = self._acting[:, layer] * (clock < self._until)
        both = torch.stack([of_q, of_k], dim=1) * acting.view(-1, 1, 1, 1, 1)  # (E, 2, H, K, D)
        if len(self._noisy):
            sizes = torch.linalg.vector_norm(both[self._noise_leaders], dim=(-2, -1), keepdim=True)
            keys = site_key(self._seeds, clock * self._fresh, _NOISE_SITE + layer)
            noise = random_directions(keys, both.shape[1:]).to(both.dtype) * sizes.nan_to_num(0.0, 0.0)
            both.index_copy_(0, self._noisy, noise)
        return both[:, 0], both[:, 1]


def method_for(config: Config, members: Sequence[Member], strength: Tensor) -> Method:
    """The model's method, or the interventions of members, which a model with a method of its own does not take."""
    if any(member.intervention for member in members):
        return Interventions(config, members, strength)
    return method_of(config.model, strength)


class _AtInference(Method):
    """With a temperature for each head that had one in training."""

    def __init__(self, config: ModelConfig, strength: Tensor, log_factors: Tensor) -> None:
        super().__init__(config, strength)
        self._factors = log_factors.exp()  # 1 where it is not held

    def compare(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        del p
        return _scaled(q, self._factors[:, layer]), k


def _scaled(q: Tensor, factors: Tensor) -> Tensor:
    """Queries (E, B, H, T, K) times factors (E, H), which are not rounded to q's precision first."""
    return (q * factors[:, None, :, None, None]).to(q.dtype)


class _CausalLogits:
    """Of queries and keys (F, B, H, T, K), and the mean entropy of their softmax over queries that are `real`."""

    def __init__(self, q: Tensor, k: Tensor, real: Tensor) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        s = (q.to(wide) @ k.to(wide).mT) / math.sqrt(q.shape[-1])  # (F, B, H, T, T)
        masked = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1)
        s = s.masked_fill_(masked, -math.inf)
        self._below = s.sub_(s.amax(-1, keepdim=True))
        weights = real.to(wide)
        self._weights = (weights / weights.sum((1, 2), keepdim=True))[:, :, None]  # (F, B, 1, T)

    def entropy(self, log_factors: Tensor) -> tuple[Tensor, Tensor]:
        """With logits times a factor for each head (F, H); and how fast it falls as the logarithm of that rises."""
        z = (self._below * log_factors.exp()[:, None, :, None, None]).clamp_(min=-100.0)  # e⁻¹⁰⁰ is as good as 0
        p = z.exp()
        total = p.sum(-1)
        pz = p.mul_(z)
        mean = pz.sum(-1) / total
        square = pz.mul_(z).sum(-1) / total
        entropy, variance = total.log() - mean, square - mean.square()  # dH/d ln c = −Var(c s)
        return (entropy * self._weights).sum((1, 3)), (variance * self._weights).sum((1, 3))

    def excess(self, log_factors: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Of the levels over the entropy, and its slope."""
        entropy, fall = self.entropy(log_factors)
        return levels - entropy, fall


def _root(rising: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor, bound: float) -> Tensor:
    """Where a rising function is 0, between −bound and bound; it gives its value and slope.

    Newton's steps; where one leaves what is known to hold the root, that is halved instead.
    """
    x, low, high = start, torch.full_like(start, -bound), torch.full_like(start, bound)
    for _ in range(_NEWTON_STEPS):
        value, slope = rising(x)
        low, high = torch.where(value < 0, x, low), torch.where(value < 0, high, x)
        newton = x - value / slope
        x = torch.where((newton >= low) & (newton <= high), newton, (low + high) / 2)
    return x


def with_trace(qk: QK, trace: Tensor) -> QK:
    """The closest W_Q and W_K with this trace ⟨W_Q, W_K⟩.

    Lagrange: W_Q' − W_Q = μ W_K' and W_K' − W_K = μ W_Q', so their sum is divided by 1 − μ and their difference by
    1 + μ. The trace, a quarter of the difference of their squares, rises with μ from −∞ at −1 to ∞ at 1.
    """
    w_q, w_k = qk.w_q.double(), qk.w_k.double()
    plus, minus = ((w_q + sign * w_k).square().sum((-2, -1)) / 4 for sign in (1, -1))

    def excess(mu: Tensor) -> tuple[Tensor, Tensor]:
        right, left = 1 - mu, 1 + mu
        return plus / right**2 - minus / left**2 - trace, 2 * (plus / right**3 + minus / left**3)

    # where the larger term alone has about this trace: from 0, so few steps would not reach a far one
    above = 1 - (plus / (trace + minus).clamp_min(plus)).sqrt()
    below = (minus / (plus - trace).clamp_min(minus)).sqrt() - 1
    start = torch.where(trace > plus - minus, above, below).nan_to_num(0.0)  # 0/0: there is nothing to change
    mu = _root(excess, start, 1.0)[..., None, None]
    whole = 1 - mu.square()
    return QK(((w_q + mu * w_k) / whole).to(qk.w_q.dtype), ((w_k + mu * w_q) / whole).to(qk.w_k.dtype))


def with_scale(qk: QK, scale: Tensor) -> QK:
    """W_Q and W_K times one factor, so that tr(W_QKᵀW_QK), which has both twice, is `scale`."""
    factor = (scale / qk.scale()).pow(0.25)[..., None, None]
    return QK(qk.w_q * factor, qk.w_k * factor)


def random_directions(keys: Tensor, shape: Sequence[int]) -> Tensor:
    """(N, *shape): of unit norm in the last two dimensions, every direction as likely; a hash of the keys (N,)."""
    bits = dropout_bits(keys, math.prod(shape)) >> 8  # 24 of them, with a sign: exact in float32
    normal = torch.erfinv((bits.to(torch.float32) + 0.5) / (1 << 23)).view(len(keys), *shape)
    unit: Tensor = normal / torch.linalg.vector_norm(normal, dim=(-2, -1), keepdim=True)
    return unit
