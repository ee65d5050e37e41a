"""Ways to keep attention from collapsing, as they enter a stack of models: what each changes, and where.

A method may replace weights before they are used (σReparam), change queries and keys (QK-norm), change the attention
itself (softcap), add to the gradient (z-loss), or act on W_Q and W_K after an update (QK-clip, decay, LocAteR's
decoupled forms). Each member has one number of its own, its strength; what that means is said at each method.
`at_inference()` is what remains when training is over.

Legend: E stacked models, B blocks, T tokens, H heads, K head width, D width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from locater.lab.config import ModelConfig
from locater.lab.engine._method import Method, Parameters
from locater.lab.engine._weight_methods import AutoLocAteR, DecoupledLocAteR, QKClip, QKDecay, TracedLocAteR

__all__ = ["METHODS", "Method", "method_of"]


class QKNorm(Method):
    """RMS norm of each query and key, with learned gains (K,) for all heads of a layer; stays at inference.

    The strength is the gains' product at the start: logits are then at most √K times it.
    """

    def start(self, values: Parameters, seeds: Tensor) -> None:
        del seeds
        for name, value in values.items():
            if name.endswith((".q_gain", ".k_gain")):
                value.copy_(self.strength.sqrt()[:, None].expand_as(value))

    def before_turning(self, p: Parameters, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
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
        s = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * (scale / cap)
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
    s = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
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
                self._right[full] = functional.normalize(torch.stack(drawn).to(w), dim=-1)
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
