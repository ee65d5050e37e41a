"""Methods that act on W_Q and W_K after an update: QK-clip, decay, and LocAteR beside the optimizer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locater.control.stacked import RULE, decoupled_step, ordinary_scale, seen_scale, within_limit
from locater.lab.config import ModelConfig
from locater.lab.engine._method import Method, Parameters, all_layers, biases, factors, rope_of
from locater.measure import max_logits
from locater.models.attention import Norm
from locater.qk import QK

__all__ = ["AutoLocAteR", "DecoupledLocAteR", "QKClip", "QKDecay", "TracedLocAteR"]


class QKClip(Method):
    """Heads whose largest logit S in the batch exceeded τ, the strength, have W_Q and W_K scaled by √(τ / S)."""

    def start(self, values: Parameters, seeds: Tensor) -> None:
        del values, seeds
        shape = (len(self.strength), self.config.layers, self.config.heads)
        self._largest = torch.zeros(shape, device=self.strength.device)

    def compare(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        del p
        found = max_logits(q.detach().flatten(0, 1), k.detach().flatten(0, 1))  # (E·B, H)
        self._largest[:, layer] = found.unflatten(0, (len(self.strength), -1)).amax(1)
        return q, k

    def after_update(self, values: Parameters, rate: Tensor, hold: Tensor) -> bool:
        del rate, hold
        most, largest = self.strength[:, None, None], self._largest
        too_large = (largest > most) & largest.isfinite()
        factor = torch.where(too_large, most / largest, 1.0).sqrt()  # (E, L, H)
        for w in factors(values, self.config):
            w *= factor[..., None, None]
        for b in biases(values, self.config):
            b *= factor[..., None]
        return True


class QKDecay(Method):
    """W_Q and W_K shrink by rate · strength at each update, beside the decay that all weights have."""

    def after_update(self, values: Parameters, rate: Tensor, hold: Tensor) -> bool:
        factor = (1 - rate * hold * self.strength).clamp(min=0)[:, None, None, None, None]
        for w in factors(values, self.config):
            w *= factor
        return True


class DecoupledLocAteR(Method):
    """LocAteR beside the optimizer, not through it: a step of rate · strength down tr(W_QKᵀW_QK)."""

    def __init__(self, config: ModelConfig, strength: Tensor) -> None:
        super().__init__(config, strength)
        self._rope = rope_of(config, strength.device)

    def after_update(self, values: Parameters, rate: Tensor, hold: Tensor) -> bool:
        w_q, w_k = factors(values, self.config)
        step = (rate * hold * self.strength)[:, None, None]
        # products of what does not lie together would copy it each time
        new_q, new_k = self._stepped(QK(w_q.contiguous(), w_k.contiguous()), step, values, hold)
        w_q.copy_(new_q)
        w_k.copy_(new_k)
        return True

    def _stepped(self, qk: QK, step: Tensor, values: Parameters, hold: Tensor) -> tuple[Tensor, Tensor]:
        del values, hold
        nothing = torch.zeros_like(step)
        return decoupled_step(qk, step, nothing, nothing, rope=self._rope)

    def _target(self, like: Tensor) -> Tensor:
        """Of the trace: where ρ of the paper's random walk begins to localise."""
        return torch.full_like(like, 2 * math.sqrt(self.config.head_width))


class TracedLocAteR(DecoupledLocAteR):
    """The same, with the trace pulled as strongly to 2 √K."""

    def _stepped(self, qk: QK, step: Tensor, values: Parameters, hold: Tensor) -> tuple[Tensor, Tensor]:
        del values, hold
        return decoupled_step(qk, step, step, self._target(step), rope=self._rope)


class AutoLocAteR(DecoupledLocAteR):
    """That too, but a trace is only raised (with rotary positions not even that), a scale pressed only by how far it
    grew too fast, and limited.

    The rule of `locater.control.DecoupledLocAteR`.
    """

    rule = RULE

    def start(self, values: Parameters, seeds: Tensor) -> None:
        del seeds
        qk = QK(*factors(values, self.config))
        own = seen_scale(qk, None, (None, None), self._rope)
        self._first = torch.stack([own, self._seen(qk, values)], dim=-1)  # (E, L, H, 2)
        self._updates = torch.zeros_like(self.strength)

    def state(self) -> dict[str, Tensor]:
        return {"first": self._first, "updates": self._updates}

    def _seen(self, qk: QK, values: Parameters) -> Tensor:
        """(E, L, H)"""
        norm = None
        if self.config.norm == "pre":
            gain, shift = (
                all_layers(values, f"attention_norm.{part}", self.config)[:, :, None, None]  # (E, L, 1, 1, D)
                for part in ("weight", "bias")
            )
            norm = Norm(gain, 0.0, centred=True, bias=shift)
        return seen_scale(qk, norm, biases(values, self.config), self._rope)

    def _stepped(self, qk: QK, step: Tensor, values: Parameters, hold: Tensor) -> tuple[Tensor, Tensor]:
        self._updates += step[:, 0, 0] > 0
        update = self._updates[:, None, None, None]
        ordinary, ordinary_seen = ordinary_scale(self._first, self.config.head_width**-0.5, update).unbind(-1)
        pull = step if self._rope is None else torch.zeros_like(step)
        new = QK(*decoupled_step(qk, step, pull, self._target(step), ordinary, self._rope))
        factor, _ = within_limit(self._seen(new, values) / ordinary_seen, hold)
        for bias in biases(values, self.config):
            bias *= factor[..., None]
        return new.w_q * factor[..., None, None], new.w_k * factor[..., None, None]
