"""Host two of the rules in `control.rules`: methods against collapse, on a stack of models.

A method may replace weights before they are used (σReparam), change queries and keys (QK-norm), change the attention
itself (softcap), add to the gradient (z-loss), or act on W_Q and W_K around an update (decay, QK-clip, LocAteR beside
the optimizer). Each member has one number of its own, its strength; what that means is said at each method.

Legend: E stacked models, B blocks, L layers, T tokens, H heads, K head width, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from locater.control.heads import Heads
from locater.control.rules import sigma_reparam as sigma
from locater.control.rules.decay import decay_factor
from locater.control.rules.decoupled import (
    SEQUENCES,
    VERSION,
    Decoupled,
    initial_spread,
    logit_moments,
    part_of,
    sampled_positions,
)
from locater.control.rules.logsumexp import logsumexp
from locater.control.rules.qk_clip import clip_factors
from locater.control.rules.qk_norm import normalised
from locater.control.rules.softcap import softcapped
from locater.control.rules.z_loss import penalised, squared
from locater.hooks import of_stack
from locater.lab.config import METHOD_NAMES, ModelConfig
from locater.lab.engine.heads import Parameters, all_heads, rope_of, set_heads
from locater.measure import max_logits

__all__ = ["METHODS", "Method", "method_of"]


class Method:
    """No change at all, and what the others start from. `strength` is (E,)."""

    version = 1  # raised when a formula changes: what was trained by another does not go on, nor into one table
    added: tuple[str, ...] = ()  # how the names of parameters end that the method adds; they are not decayed

    def __init__(self, config: ModelConfig, strength: Tensor) -> None:
        self.config, self.strength = config, strength

    def start(self, values: Parameters) -> None:
        """Sets the parameters that the method added, and its own state, from float32 values (E, …)."""

    def state(self) -> dict[str, Tensor]:
        """What it carries from step to step."""
        return {}

    def refresh(self, values: Parameters) -> None:
        """Before a training forward; `values` are the float32 parameters."""

    def begin(self, real: Tensor) -> None:
        """Before a training forward of a batch whose queries (E, N) are `real`, or padding."""

    def weights(self, p: Parameters) -> Parameters:
        """What the forward uses in place of p."""
        return p

    def entering(self, layer: int, states: Tensor) -> None:
        """The states (E, N, D) that enter attention."""

    def before_rope(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (E, B, H, T, K) before rotary positions, if positions are rotary."""
        del p, layer
        return q, k

    def compare(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (E, B, H, T, K) as the attention compares them."""
        del p, layer
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """(E·B, H, T, ·) from (E, B, H, T, ·)."""
        q, k, v = (a.flatten(0, 1) for a in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    def cap(self, member: int) -> float | None:
        """The cap on a member's logits, which statistics need."""
        del member
        return None

    def pull(self, layer: int, of_q: Tensor, of_k: Tensor, clock: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of LocAteR's penalty (E, H, K, D), as the optimizer gets them after `clock` updates."""
        del layer, clock
        return of_q, of_k

    def temperatures(self, member: int) -> Tensor | None:
        """By which a member's logits are divided, (L, H), if that is not 1."""
        del member
        return None

    def before_update(self, values: Parameters, rate: Tensor, decay: Tensor, factor: Tensor) -> None:
        """Acts on the float32 parameters before the optimizer, which will multiply them by 1 − rate · decay.

        `rate` and `decay` (E,) are the update's; `factor`, from 1 to 0 at the end of training, is the strength's.
        """
        del factor
        for name, value in values.items() if self.added else ():
            if name.endswith(self.added):
                value *= self._column(decay_factor(rate, 0.0, decay), value)

    def after_update(self, values: Parameters, rate: Tensor, factor: Tensor) -> bool:
        """Acts on the float32 parameters after the optimizer; says whether W_Q and W_K changed."""
        del values, rate, factor
        return False

    def at_inference(self) -> Method:
        """What remains of it when training is over."""
        return Method(self.config, self.strength)

    @staticmethod
    def _column(x: Tensor | float, like: Tensor) -> Tensor:
        """(E,) against (E, …)."""
        return torch.as_tensor(x).view(-1, *[1] * (like.ndim - 1))


# ---------------------------------------------------------------------- changes of the forward


class _Remaining(Method):
    """One that is part of the model, at inference too."""

    def at_inference(self) -> Method:
        return self


class QKNorm(_Remaining):
    """With gains (K,) for all heads of a layer. The strength is the gains' product at the start."""

    version = 2
    added = (".q_gain", ".k_gain")

    def start(self, values: Parameters) -> None:
        for name, value in values.items():
            if name.endswith(self.added):
                value.copy_(self.strength.sqrt()[:, None].expand_as(value))

    def before_rope(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        gains = (p[f"layers.{layer}{name}"][:, None, None, None] for name in self.added)
        q, k = map(normalised, (q, k), gains)
        return q, k


class Softcap(_Remaining):
    """The strength is the cap. T × T is formed."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        s = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
        s = softcapped(s, self.strength[:, None, None, None, None])
        masked = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1)
        return (s.masked_fill(masked, -math.inf).softmax(-1).to(v.dtype) @ v).flatten(0, 1)

    def cap(self, member: int) -> float | None:
        return float(self.strength[member])


class ZLoss(Method):
    """Adds the penalty of every layer to the loss, through the gradients of queries and keys."""

    def compare(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        del p, layer
        real = torch.ones(1, device=q.device, dtype=torch.bool).expand(*q.shape[:2], q.shape[3])
        lse = logsumexp(of_stack(q, k, q.shape[-1] ** -0.5, real)).unflatten(0, q.shape[:2])  # (E, B, H, T)
        penalty = self.strength * squared(lse)[0].mean((1, 2, 3))
        return penalised(q, penalty.sum()), k


class SigmaReparam(_Remaining):
    """On every linear layer of the blocks; γ starts at σ₁(W). It has no strength."""

    version = 2
    added = (".gamma",)
    matrices: dict[str, int] = {"qkv": 3, "out": 1, "fc1": 1, "fc2": 1}  # noqa: RUF012

    def start(self, values: Parameters) -> None:
        self._vectors: dict[str, tuple[Tensor, Tensor]] = {}  # u (E, O, P), v (E, I, P)
        self._parts: dict[str, Tensor] = {}  # (O,): to which matrix of a weight each output belongs
        for layer in range(self.config.layers):
            for kind, count in self.matrices.items():
                name = f"layers.{layer}.{kind}"
                w = values[f"{name}.weight"]
                part = torch.arange(w.shape[1], device=w.device) // (w.shape[1] if kind != "qkv" else self.config.width)
                self._parts[name] = part = part.masked_fill(part >= count, -1)
                self._vectors[name] = u, v = sigma.first_singular_vectors(w, part, count)
                values[f"{name}.gamma"].copy_(sigma.spectral_norms(w, u, v))

    def state(self) -> dict[str, Tensor]:
        return {f"{kind}.{name}": x for name, pair in self._vectors.items() for kind, x in zip("uv", pair, strict=True)}

    @torch.no_grad()
    def refresh(self, values: Parameters) -> None:
        for name, (u, v) in self._vectors.items():
            found = sigma.power_iteration(values[f"{name}.weight"], u, self._parts[name])
            for old, new in zip((u, v), found, strict=True):
                old.copy_(new)

    def weights(self, p: Parameters) -> Parameters:
        new = dict(p)
        for name, (u, v) in self._vectors.items():
            w, gamma = p[f"{name}.weight"], p[f"{name}.gamma"]
            sigma_1 = sigma.spectral_norms(w.to(self.strength.dtype), u, v)
            factors = sigma.row_factors(gamma, sigma_1, self._parts[name])
            new[f"{name}.weight"] = w * factors[..., None].to(w.dtype)
        return new


class SigmaReparamQK(SigmaReparam):
    """The same on W_Q and W_K alone."""

    matrices = {"qkv": 2}  # noqa: RUF012


# ---------------------------------------------------------------------- on W_Q and W_K, around an update


class QKClip(Method):
    """The strength is the threshold τ of a head's largest logit in the batch."""

    def start(self, values: Parameters) -> None:
        del values
        shape = (len(self.strength), self.config.layers, self.config.heads)
        self._largest = self.strength.new_zeros(shape)

    def compare(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        del p
        found = max_logits(q.detach().flatten(0, 1), k.detach().flatten(0, 1))  # (E·B, H)
        self._largest[:, layer] = found.unflatten(0, (len(self.strength), -1)).amax(1)
        return q, k

    def after_update(self, values: Parameters, rate: Tensor, factor: Tensor) -> bool:
        del rate, factor
        heads = all_heads(values, self.config, None)
        set_heads(heads, heads.scaled(*clip_factors(self._largest, self.strength[:, None, None])))
        return True


class QKDecay(Method):
    """The strength is the decay of W_Q and W_K, in place of that which all weights have."""

    version = 2

    def before_update(self, values: Parameters, rate: Tensor, decay: Tensor, factor: Tensor) -> None:
        qk = all_heads(values, self.config, None).qk
        for w in (qk.w_q, qk.w_k):
            w *= self._column(decay_factor(rate, factor * self.strength, decay), w)


class AutoLocAteR(Method):
    """`locater.control.DecoupledLocAteR`. The strength is the bound on a change of logits, in nats."""

    version = VERSION

    def __init__(self, config: ModelConfig, strength: Tensor) -> None:
        super().__init__(config, strength)
        self._rope = rope_of(config, strength.device)

    def start(self, values: Parameters) -> None:
        w_q = all_heads(values, self.config, None).qk.w_q
        self._positions = sampled_positions(self.config.tokens, w_q.device)  # (n,)
        self._states = w_q.new_zeros(*w_q.shape[:2], SEQUENCES, len(self._positions), w_q.shape[-1])  # (E, L, B, n, D)
        self._initial = w_q.new_full(w_q.shape[:3], -1.0)  # the spread of every head before its first update; then ≥ 0

    def state(self) -> dict[str, Tensor]:
        return {"initial": self._initial}

    def entering(self, layer: int, states: Tensor) -> None:
        sample = states.detach().view(len(states), -1, self.config.tokens, states.shape[-1])
        self._states[:, layer].copy_(sample[:, :SEQUENCES].index_select(2, self._positions))

    def before_update(self, values: Parameters, rate: Tensor, decay: Tensor, factor: Tensor) -> None:
        super().before_update(values, rate, decay, factor)
        heads = self._heads(values)
        self._old = [x.clone() for x in (heads.qk.w_q, heads.qk.w_k, *heads.biases) if x is not None]
        self._rows = heads.compared(self._states, self._positions)

    def after_update(self, values: Parameters, rate: Tensor, factor: Tensor) -> bool:
        del rate
        heads, rule = self._heads(values), Decoupled(self.strength[:, None, None])
        rows = heads.compared(self._states, self._positions)
        before = heads.product(*self._rows)
        moments = logit_moments(before, heads.product(*rows))
        self._initial.copy_(initial_spread(moments, self._initial))
        if not moments.is_cuda and rule.holds(moments, factor):
            return False
        keep = rule.keep(moments, factor)
        left = heads.product(*(part_of(keep, old, new) for old, new in zip(self._rows, rows, strict=True)))
        found = rule.factors(logit_moments(before, left), self._initial, factor)
        found = found._replace(keep=keep * found.keep)
        # W ← f · (old + keep · (W − old)), of weights and biases
        for one, old, f in zip((heads.qk.w_q, heads.qk.w_k, *heads.biases), self._old, 2 * found[1:], strict=True):
            assert one is not None
            new, was = (x.view(*x.shape, *[1] * (one.ndim - x.ndim)) for x in (f * found.keep, f * (1 - found.keep)))
            one.mul_(new).addcmul_(was, old)
        return True

    def _heads(self, values: Parameters) -> Heads:
        return all_heads(values, self.config, self._rope)


METHODS: dict[str, type[Method]] = dict(
    zip(
        METHOD_NAMES,
        (Method, QKNorm, Softcap, ZLoss, SigmaReparam, SigmaReparamQK, QKClip, QKDecay, AutoLocAteR),
        strict=True,
    )
)


def method_of(config: ModelConfig, strength: Tensor) -> Method:
    return METHODS[config.method](config, strength)
