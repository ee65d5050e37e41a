"""LocAteR beside the optimizer: a direct step on W_Q and W_K, as AdamW's decay is beside Adam's gradient.

A step of size learning rate × strength goes down  share · tr(W_QKᵀW_QK) + (tr W_QK − target)². Every part of it is
damped: divided by 1 + the step times the largest curvature it can have. Small steps are the gradient's, and no step,
however large, goes past the minimum along any direction (an implicit step would not either, at the cost of a K × K
solve).

Legend: K head width, D model width; leading dimensions are heads, with any before them (modules; models × layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from locater.control.grams import Grams, Move
from locater.control.heads import Heads
from locater.models import Rope
from locater.qk import QK

__all__ = ["VERSION", "Decoupled", "baseline_scale", "decoupled_step", "limit_factors"]

VERSION = 2  # raised when the formula changes: states of another version are refused
_ROUNDING = 1e-3  # growth below it is that of products in TF32
_LIMIT = 3.0  # times its baseline is the largest effective scale of a head
_UPDATES, _MOST_GROWTH = 250, 8.0  # the root of the baseline grows by the initial one in so many updates; so many times


@dataclass(frozen=True)
class Decoupled:
    """The rule: raise the trace to `target`, shrink the scale of heads that grow (or of all), limit it.

    Without a target it is 2 / logit_scale (chosen by training; docs/locater.md), and with rotary positions, where the
    trace is that of offset 0 alone, the trace is left alone.
    """

    target: float | None = None
    growing_only: bool = True

    def start(self, grams: Grams) -> Tensor:
        """What has to be remembered: the initial scales (…, 2), W_QK's own and the effective one."""
        return torch.stack([grams.scale(), grams.effective_scale()], dim=-1)

    def pulls(self, rope: Rope | None, square: bool) -> bool:
        """Whether the trace is moved: grams have to know then what it does to the effective scale."""
        return square and (self.target is not None or rope is None)

    def step(
        self,
        grams: Grams,
        logit_scale: float,
        initial: Tensor,
        update: Tensor | int,
        rates: tuple[Tensor, Tensor],
        strength: Tensor | float,
        factor: Tensor | float,
        trained: tuple[bool, bool] = (True, True),
    ) -> Move:
        """What one step does. `rates` are those of W_Q and W_K, `factor` is the schedule's.

        Where one rate is smaller, that factor moves by its part of the step.
        """
        rate = rates[0] if rates[0] is rates[1] else torch.maximum(*rates)
        size = rate * strength * factor
        pulled = size if self.pulls(grams.rope, grams.trace is not None) else None
        target = torch.full_like(size, 2 / logit_scale if self.target is None else self.target)
        baseline = None
        if self.growing_only:
            baseline, effective_baseline = baseline_scale(initial, logit_scale, update).unbind(-1)
        move = _move(grams, size, pulled, target, baseline)
        if rates[0] is not rates[1]:
            move = _in_parts(move, [torch.where(rate > 0, one / rate, 0.0) for one in rates])
        if baseline is None:
            return move
        growth = grams.moved(move).effective_scale() / effective_baseline
        held = factor.clamp(max=1) if isinstance(factor, Tensor) else min(factor, 1.0)
        limit = limit_factors(growth, held, trained, grams.shared_keys)
        # a step that a GradScaler skips has rates of 0 on the device
        f_q, f_k = (torch.where(rate > 0, one, 1.0) for one in limit)
        return replace(move, factors=(f_q, f_k))


def _in_parts(move: Move, parts: Sequence[Tensor]) -> Move:
    q, k = parts
    pull = None if move.pull is None else (move.pull[0] * q, move.pull[1] * k)
    return replace(move, shrink=(move.shrink[0] * q[..., None, None], move.shrink[1] * k[..., None, None]), pull=pull)


def baseline_scale(initial: Tensor, logit_scale: float, update: Tensor | int = 0) -> Tensor:
    """The scale beyond which a head has grown too fast: the initial one, or d_head / 8 if that is more, and from the
    250th update on that times (update / 250)², up to 64 times.

    At d_head / 8, logits between independent tokens have a standard deviation of 0.35; a customary start has 0.5 to 1.
    Their standard deviation may grow by its initial value every 250 updates, to eight times it: heads of a model that
    learns do grow, and only abrupt growth is limited.
    """
    growth = torch.as_tensor(update / _UPDATES).clamp(1, _MOST_GROWTH).square()
    return initial.clamp(min=1 / (8 * logit_scale**2)) * growth


def limit_factors(
    growth: Tensor,
    strength_factor: Tensor | float = 1.0,
    trained: tuple[bool, bool] = (True, True),
    shared_keys: bool = False,
) -> tuple[Tensor, Tensor]:
    """What queries and keys of every head are multiplied by, so that no effective scale exceeds three baselines.

    The limit is divided by the strength factor, from 1 to 0, where it is released. Both factors that are trained share
    what is to be shrunk; where query heads share a key, the queries take all of it.
    """
    ratio = (_LIMIT / (strength_factor * growth)).clamp(max=1)
    if trained == (True, True) and not shared_keys:
        return ratio**0.25, ratio**0.25
    if trained[0]:
        return ratio.sqrt(), torch.ones_like(ratio[..., :1] if shared_keys else ratio)
    return torch.ones_like(ratio), (ratio.amin(-1, keepdim=True) if shared_keys else ratio).sqrt()


# ---------------------------------------------------------------------- one step


def decoupled_step(
    qk: QK,
    scale_step: Tensor,
    mean_step: Tensor,
    target: Tensor,
    baseline: Tensor | None = None,
    rope: Rope | None = None,
) -> tuple[Tensor, Tensor]:
    """W_Q and W_K after one step down  scale_step · scale + mean_step · (trace − target)².

    With a `baseline`, the scale's step is multiplied by clamp(scale/baseline − 1, 0, 1), by 0 up to a thousandth, and a
    trace above its target is not lowered. With rotary positions the scale is the mean of that at offset 0 and of its
    mean over all offsets, and growth is that of the largest scale that any rotary angles can give; the trace is that of
    offset 0. A W_QK without a trace makes the scale's step alone.
    """
    heads = Heads(qk, 1.0, rope=rope)
    moved = heads.moved(_move(heads.grams(), scale_step, mean_step if qk.square else None, target, baseline)).qk
    return moved.w_q, moved.w_k


def _move(grams: Grams, scale_step: Tensor, mean_step: Tensor | None, target: Tensor, baseline: Tensor | None) -> Move:
    products = _Products(grams.q, grams.k, grams.shared_keys)
    if baseline is not None:
        growth = grams.scale() / baseline - 1
        scale_step = scale_step * torch.where(growth > _ROUNDING, growth.clamp(max=1), 0.0)
    shrink = products.averaged(grams.rope).damped(scale_step)
    if mean_step is None or grams.trace is None:
        return Move(shrink, None, scale_step > 0)
    if baseline is not None:
        target = torch.maximum(target, grams.trace)
    pull = products.damped_pull(grams.trace, mean_step, target)
    return Move(shrink, (pull, pull), scale_step > 0)


@dataclass(frozen=True)
class _Products:
    """W_Q W_Qᵀ and W_K W_Kᵀ (…, K, K): what the size of a step is computed from."""

    gram_q: Tensor
    gram_k: Tensor
    shared_keys: bool

    def averaged(self, rope: Rope | None) -> _Products:
        """With rotary positions, each gram is the mean of itself and of its mean over all offsets."""
        if rope is None:
            return self
        gram_q, gram_k = ((gram + rope.mean_gram(gram)) / 2 for gram in (self.gram_q, self.gram_k))
        return replace(self, gram_q=gram_q, gram_k=gram_k)

    def over_heads(self, x: Tensor, dim: int) -> Tensor:
        """Summed over the query heads that share a key."""
        return x.sum(dim, keepdim=True) if self.shared_keys else x

    def damped(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """2 step · gram of the other factor, damped, for W_Q and for W_K.

        Both factors are divided by the same: a gradient does not let one of them grow at the other's expense.
        """
        largest = torch.maximum(self.over_heads(step * _norm(self.gram_q), -1), step * _norm(self.gram_k))
        if self.shared_keys:
            largest = largest.amax(-1, keepdim=True)
        shrink = (2 * step / (1 + 2 * largest))[..., None, None]
        return shrink * self.gram_k, self.over_heads(shrink * self.gram_q, -3)

    def damped_pull(self, trace: Tensor, step: Tensor, target: Tensor) -> Tensor:
        """c of the step W_Q − c W_K, W_K − c W_Q down (trace − target)².

        The trace becomes trace − c S + c² trace, where S is the sum of the squared norms of the factors. That is
        monotone for |c| ≤ 1, and the target where c = 2 off / (S + √(S² − 4 trace · off)): c goes no further than
        either.
        """
        squares_q, squares_k = (gram.diagonal(dim1=-2, dim2=-1).sum(-1) for gram in (self.gram_q, self.gram_k))
        squares_q = self.over_heads(squares_q, -1)
        off, both = trace - target, squares_q + squares_k
        c = 2 * step * off / (1 + 4 * step * torch.maximum(squares_q, squares_k))
        there = 2 * off.abs() / (both + (both.square() - 4 * trace * off).clamp(min=0).sqrt()).clamp(min=1e-30)
        most = there.clamp(max=1)
        return c.clamp(-most, most)


def _norm(gram: Tensor) -> Tensor:
    """At least gram's largest eigenvalue, half the largest curvature of the scale, and at most K^¼ of it."""
    norm: Tensor = torch.linalg.matrix_norm(gram @ gram)
    return norm.sqrt()
