"""Ways to keep attention from collapsing, as they enter a stack of models: what each changes, and where.

A method may replace weights before they are used (σReparam), change queries and keys (QK-norm), change the attention
itself (softcap), add to the gradient (z-loss), or act on W_Q and W_K after an update (QK-clip, decay, LocAteR's
decoupled forms). Each member has one number of its own, its strength; what that means is said at each method.
`at_inference()` is what remains when training is over.

Legend: E stacked models, B blocks, T tokens, H heads, K head width, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from locater.control.stacked import decoupled_step, ordinary_scale, seen_scale, within_limit
from locater.lab.config import ModelConfig
from locater.measure import max_logits
from locater.models.attention import Norm
from locater.qk import QK

__all__ = ["METHODS", "Method", "method_of"]

Parameters = Mapping[str, Tensor]


class Method:
    """No change at all, and what the others start from. `strength` is (E,)."""

    def __init__(self, config: ModelConfig, strength: Tensor) -> None:
        self.config, self.strength = config, strength

    def start(self, values: Parameters, seeds: Tensor) -> None:
        """Sets the parameters that the method added, and its own state, from float32 values (E, …)."""

    def state(self) -> dict[str, Tensor]:
        """What it carries from step to step."""
        return {}

    def refresh(self, values: Parameters) -> None:
        """Before a training forward; `values` are the float32 parameters."""

    def settle(self, values: Parameters) -> None:
        """After the parameters were set to others."""

    def weights(self, p: Parameters) -> Parameters:
        """What the forward uses in place of p."""
        return p

    def compare(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (E, B, H, T, K) as the attention compares them."""
        del p, layer
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """(E·B, H, T, ·) from (E, B, H, T, ·)."""
        q, k, v = (a.flatten(0, 1) for a in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    def cap(self, member: int) -> float | None:
        """Of a member's logits, for those who measure them."""
        del member
        return None

    def after_update(self, values: Parameters, rate: Tensor, hold: Tensor) -> bool:
        """Acts on the float32 parameters; says whether W_Q and W_K changed.

        `rate` (E,) is the update's; `hold`, from 1 to 0 at the end of training, how far the method still holds.
        """
        del values, rate, hold
        return False

    def at_inference(self) -> Method:
        return Method(self.config, self.strength)


def _all_layers(p: Parameters, name: str, config: ModelConfig) -> Tensor:
    """(E, L, …), a view: parameters of a stack lie in one tensor, every layer's as far from the one before."""
    first, second = (p[f"layers.{i}.{name}"] for i in (0, min(1, config.layers - 1)))
    step = second.storage_offset() - first.storage_offset()
    return first.as_strided((len(first), config.layers, *first.shape[1:]), (first.stride(0), step, *first.stride()[1:]))


def _factors(p: Parameters, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """W_Q and W_K (E, L, H, K, D), views."""
    w_q, w_k, _ = _all_layers(p, "qkv.weight", config).unflatten(2, (3, config.heads, -1)).unbind(2)
    return w_q, w_k


def _biases(p: Parameters, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """(E, L, H, K), views."""
    b_q, b_k, _ = _all_layers(p, "qkv.bias", config).unflatten(2, (3, config.heads, -1)).unbind(2)
    return b_q, b_k


# ---------------------------------------------------------------------- in the model


class QKNorm(Method):
    """RMS norm of each query and key, with learned gains (K,) for all heads of a layer; stays at inference.

    The strength is the gains' product at the start: logits are then at most √K times it.
    """

    def start(self, values: Parameters, seeds: Tensor) -> None:
        del seeds
        for name, value in values.items():
            if name.endswith((".q_gain", ".k_gain")):
                value.copy_(self.strength.sqrt()[:, None].expand_as(value))

    def compare(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        def normed(x: Tensor, name: str) -> Tensor:
            gain = p[f"layers.{layer}.{name}"][:, None, None, None]
            return functional.rms_norm(x, x.shape[-1:], eps=1e-6) * gain

        return normed(q, "q_gain"), normed(k, "k_gain")

    def at_inference(self) -> Method:
        return self


class Softcap(Method):
    """c · tanh(s / c) of every logit s, c being the strength; T × T is formed, and stays at inference."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        cap = self.strength[:, None, None, None, None]
        s = (q @ k.mT).float() * (scale / cap)
        s = s.tanh() * cap
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1)
        return (s.masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype) @ v).flatten(0, 1)

    def cap(self, member: int) -> float | None:
        return float(self.strength[member])

    def at_inference(self) -> Method:
        return self


class ZLoss(Method):
    """Adds strength · Σ_layers mean(logsumexp²) to the loss, through the gradients of queries and keys."""

    def compare(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        del p, layer
        out: tuple[Tensor, Tensor] = _add_gradient(q, k, *_z_gradient(q.detach(), k.detach(), self.strength))
        return out


def _z_gradient(q: Tensor, k: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
    scale = 1 / math.sqrt(q.shape[-1])
    s = (q @ k.mT).float() * scale
    s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1), -math.inf)
    lse = s.logsumexp(-1, keepdim=True)
    p = s.sub_(lse).exp_()
    p *= lse * (2 * scale * strength[:, None, None, None, None] / lse[0].numel())
    p = p.to(q.dtype)
    return p @ k, p.mT @ q


class _AddGradient(torch.autograd.Function):
    """q and k as they are; backward adds what is given."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, more_q: Tensor, more_k: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(more_q, more_k)
        return q.view_as(q), k.view_as(k)

    @staticmethod
    def backward(ctx: Any, *up: Any) -> tuple[Tensor, Tensor, None, None]:
        more_q, more_k = ctx.saved_tensors
        return up[0] + more_q, up[1] + more_k, None, None


_add_gradient: Any = _AddGradient.apply


class SigmaReparam(Method):
    """Ŵ = (γ / σ₁(W)) W for every linear layer of the blocks; γ is learned and starts at the strength.

    σ₁ by one power iteration a training step, in float32. Ŵ can be stored in W's place when training is over.
    """

    names: tuple[str, ...] = ("qkv", "out", "fc1", "fc2")
    parts = 3  # of qkv

    def start(self, values: Parameters, seeds: Tensor) -> None:
        self._right: dict[str, Tensor] = {}  # (E, n, N)
        self._left: dict[str, Tensor] = {}  # (E, n, M)
        self._sigma: dict[str, Tensor] = {}  # (E, n)
        for i in range(self.config.layers):
            for name in self.names:
                full = f"layers.{i}.{name}"
                values[full + ".gamma"].copy_(self.strength[:, None].expand_as(values[full + ".gamma"]))
                w = self._matrices(values, full)
                drawn = [
                    torch.randn(w.shape[1], w.shape[3], generator=torch.Generator().manual_seed(seed + i))
                    for seed in seeds.tolist()
                ]
                self._right[full] = functional.normalize(torch.stack(drawn).to(w.device), dim=-1)
                self._left[full], self._sigma[full] = w.new_empty(w.shape[:3]), w.new_empty(w.shape[:2])
        for _ in range(60):
            self.refresh(values)

    def _matrices(self, p: Parameters, full: str) -> Tensor:
        """(E, n, M, N): what has a γ each."""
        weight = p[full + ".weight"]
        return weight.unflatten(1, (3, -1))[:, : self.parts] if full.endswith("qkv") else weight[:, None]

    def state(self) -> dict[str, Tensor]:
        return {f"right.{name}": v for name, v in self._right.items()}

    @torch.no_grad()
    def refresh(self, values: Parameters) -> None:
        """One power iteration."""
        for full, v in self._right.items():
            w = self._matrices(values, full)
            u = functional.normalize((w @ v[..., None])[..., 0], dim=-1)
            v.copy_(functional.normalize((w.mT @ u[..., None])[..., 0], dim=-1))
        self.settle(values)

    @torch.no_grad()
    def settle(self, values: Parameters) -> None:
        """σ₁ along the vectors there are."""
        for full, v in self._right.items():
            u = (self._matrices(values, full) @ v[..., None])[..., 0]
            sigma = torch.linalg.vector_norm(u, dim=-1)
            self._sigma[full].copy_(sigma)
            self._left[full].copy_(u / sigma[..., None])

    def weights(self, p: Parameters) -> Parameters:
        new = dict(p)
        for full, v in self._right.items():
            w = self._matrices(p, full)
            scaled = _reparam(w, p[full + ".gamma"], self._sigma[full], self._left[full], v)
            if full.endswith("qkv"):
                rest = p[full + ".weight"].unflatten(1, (3, -1))[:, self.parts :]
                new[full + ".weight"] = torch.cat([scaled, rest], dim=1).flatten(1, 2)
            else:
                new[full + ".weight"] = scaled[:, 0]
        return new

    def at_inference(self) -> Method:
        return self

    def after_update(self, values: Parameters, rate: Tensor, hold: Tensor) -> bool:
        """The weights moved, and may be measured before the next step."""
        del rate, hold
        self.settle(values)
        return False


class SigmaReparamQK(SigmaReparam):
    """The same on W_Q and W_K alone."""

    names = ("qkv",)
    parts = 2


class _Reparam(torch.autograd.Function):
    """(γ / σ) W with σ = uᵀ W v, u and v fixed."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, gamma: Tensor, sigma: Tensor, u: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(w, gamma, sigma, u, v)
        return (w * (gamma / sigma)[..., None, None]).to(w.dtype)  # σ, and so the product, is float32

    @staticmethod
    def backward(ctx: Any, *up: Any) -> tuple[Tensor, Tensor, None, None, None]:
        w, gamma, sigma, u, v = ctx.saved_tensors
        along = (up[0] * w).sum((-2, -1), dtype=sigma.dtype) / sigma  # ∂/∂γ
        factor = (gamma / sigma)[..., None, None]
        turn = torch.einsum("enm,enk->enmk", u, v) * along[..., None, None]
        return (factor * (up[0] - turn)).to(w.dtype), along.to(gamma.dtype), None, None, None


_reparam: Any = _Reparam.apply

# ---------------------------------------------------------------------- after an update


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
        for w in _factors(values, self.config):
            w *= factor[..., None, None]
        for b in _biases(values, self.config):
            b *= factor[..., None]
        return True


class QKDecay(Method):
    """W_Q and W_K shrink by rate · strength at each update, beside the decay that all weights have."""

    def after_update(self, values: Parameters, rate: Tensor, hold: Tensor) -> bool:
        factor = (1 - rate * hold * self.strength).clamp(min=0)[:, None, None, None, None]
        for w in _factors(values, self.config):
            w *= factor
        return True


class DecoupledLocAteR(Method):
    """LocAteR beside the optimizer, not through it: a step of rate · strength down tr(W_QKᵀW_QK)."""

    def after_update(self, values: Parameters, rate: Tensor, hold: Tensor) -> bool:
        w_q, w_k = _factors(values, self.config)
        step = (rate * hold * self.strength)[:, None, None]
        # products of what does not lie together would copy it each time
        new_q, new_k = self._stepped(QK(w_q.contiguous(), w_k.contiguous()), step, values, hold)
        w_q.copy_(new_q)
        w_k.copy_(new_k)
        return True

    def _stepped(self, qk: QK, step: Tensor, values: Parameters, hold: Tensor) -> tuple[Tensor, Tensor]:
        del values, hold
        nothing = torch.zeros_like(step)
        return decoupled_step(qk, step, nothing, nothing)

    def _target(self, like: Tensor) -> Tensor:
        """Of the trace: where the theory has tokens begin to localise."""
        return torch.full_like(like, 2 * math.sqrt(self.config.head_width))


class TracedLocAteR(DecoupledLocAteR):
    """The same, with the trace pulled as strongly to 2 √K."""

    def _stepped(self, qk: QK, step: Tensor, values: Parameters, hold: Tensor) -> tuple[Tensor, Tensor]:
        del values, hold
        return decoupled_step(qk, step, step, self._target(step))


class AutoLocAteR(DecoupledLocAteR):
    """That too, but a trace is only raised, a scale pressed only by how far it grew too fast, and limited.

    The rule of `locater.control.DecoupledLocAteR`.
    """

    def start(self, values: Parameters, seeds: Tensor) -> None:
        del seeds
        qk = QK(*_factors(values, self.config))
        self._first = torch.stack([qk.scale(), self._seen(qk, values)], dim=-1)  # (E, L, H, 2)
        self._updates = torch.zeros_like(self.strength)

    def state(self) -> dict[str, Tensor]:
        return {"first": self._first, "updates": self._updates}

    def _seen(self, qk: QK, values: Parameters) -> Tensor:
        """(E, L, H)"""
        norm = None
        if self.config.norm == "pre":
            gain, shift = (
                _all_layers(values, f"attention_norm.{part}", self.config)[:, :, None, None]  # (E, L, 1, 1, D)
                for part in ("weight", "bias")
            )
            norm = Norm(gain, 0.0, centred=True, bias=shift)
        return seen_scale(qk, norm, _biases(values, self.config))

    def _stepped(self, qk: QK, step: Tensor, values: Parameters, hold: Tensor) -> tuple[Tensor, Tensor]:
        self._updates += 1
        update = self._updates[:, None, None, None]
        ordinary, ordinary_seen = ordinary_scale(self._first, self.config.head_width**-0.5, update).unbind(-1)
        new = QK(*decoupled_step(qk, step, step, self._target(step), ordinary))
        factor, _ = within_limit(self._seen(new, values) / ordinary_seen, hold)
        for bias in _biases(values, self.config):
            bias *= factor[..., None]
        return new.w_q * factor[..., None, None], new.w_k * factor[..., None, None]


METHODS: dict[str, type[Method]] = {
    "none": Method,
    "qk-norm": QKNorm,
    "softcap": Softcap,
    "z-loss": ZLoss,
    "sigma-reparam": SigmaReparam,
    "sigma-reparam-qk": SigmaReparamQK,
    "qk-clip": QKClip,
    "qk-decay": QKDecay,
    "locater-decoupled": DecoupledLocAteR,
    "locater-traced": TracedLocAteR,
    "locater-auto": AutoLocAteR,
}


def method_of(config: ModelConfig, strength: Tensor) -> Method:
    return METHODS[config.method](config, strength)
