"""What the theory predicts for the heads of a real model, beside what they do.

Half of the sequences give the moments, the other half the measured ρ. Three models of the tokens:

* `general`: queries and keys as the head compares them (after norms, biases and RoPE), jointly Gaussian with the means
  and covariances they have at each position. The law is `theory.rho_from_gaussian`.
* `separable`: hidden states at the module's input with mean zero and covariance K_ij Σ; no RoPE, no biases.
* `walk`: the paper's, K_ij = min(i, j), with Σ the covariance of the steps from token to token.

The latter two by their exact first two moments.

Legend: B sequences, T tokens, G key heads, R query heads for each, K head width, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.hooks import AttentionSite, Call, attention_sites
from locater.measure._moments import Moments
from locater.measure._tracker import Tracker
from locater.models import Attention, attentions
from locater.theory import TokenProcess, rho, rho_from_gaussian

__all__ = ["Prediction", "predict"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """ρ of every head of a module at every key position, for the last query: (heads, T) each."""

    module: str
    layer: int
    sequences: int  # that were measured; as many others were estimated from
    measured: Array
    general: Array
    separable: Array | None  # None where the module's W_QK is not known
    walk: Array | None

    def errors(self) -> dict[str, float]:
        """Mean distance of each prediction from what was measured, over heads and positions."""
        made = {"general": self.general, "separable": self.separable, "walk": self.walk}
        return {name: float(np.abs(p - self.measured).mean()) for name, p in made.items() if p is not None}

    def sampling_error(self) -> float:
        """The mean distance that counting in so many sequences gives a perfect prediction."""
        return float(np.sqrt(2 / np.pi * self.measured * (1 - self.measured) / self.sequences).mean())


@torch.no_grad()
def predict(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor] | Tensor], *, layers: Sequence[int] | None = None
) -> list[Prediction]:
    """Runs the model on batches of sequences of one length, without padding, and predicts ρ of its self-attention.

    Every second sequence is held out: nothing but the measured ρ is taken from it.
    """
    kept = [_Kept(site) for site in attention_sites(model, layers)]
    modes = [(module, module.training) for module in model.modules()]  # parts may have one of their own
    model.eval()
    try:
        with ExitStack() as undo:
            Tracker(model, 1, kept).attach(undo)
            for batch in batches:
                model(**batch) if isinstance(batch, Mapping) else model(batch)
    finally:
        for module, training in modes:
            module.training = training
    called = [one for one in kept if one.queries]
    if not called:
        raise LocaterError("no sequence was run: the batches are empty")
    known = {attention.module: attention for attention in attentions(model)}
    return [one.prediction(known.get(one.site.name)) for one in called]


class _Kept:
    """The last query and all keys of every sequence of one module, and moments of the states that enter it."""

    def __init__(self, site: AttentionSite) -> None:
        self.site = site
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.scale = 1.0
        self.states: Moments | None = None
        self.steps: Moments  # from token to token

    def add(self, calls: Sequence[Call], states: Tensor | None) -> None:
        before = sum(len(some) for some in self.queries)
        for call in calls:
            self._check(call)
            self.scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
            self.queries.append(call.q[:, :, -1].float().cpu())  # (B, H, K)
            self.keys.append(call.k.float().cpu())  # (B, G, T, K)
        if states is not None:
            x = states[before % 2 :: 2]  # of all sequences, every second
            if self.states is None:
                self.states, self.steps = Moments(x.shape[1]), Moments(x.shape[1] - 1)
            self.states.add(x)
            self.steps.add(x.float().diff(dim=1))

    def _check(self, call: Call) -> None:
        _, _, tq, tk = call.sizes
        padded = call.key_mask is not None or (call.real is not None and not bool(call.real.all()))
        if padded or (self.keys and self.keys[0].shape[2] != tk):
            raise LocaterError(f"{self.site.name}: predicting needs sequences of one length, without padding")
        if call.bias is not None or call.softcap is not None or (call.window is not None and call.window < tk):
            raise LocaterError(
                f"{self.site.name}: predicting is for attention whose last query has all keys by their products alone; "
                "this one has a position bias, a softcap, a window or a mask of its own"
            )
        if tq != tk or tk < 2:
            raise LocaterError(
                f"{self.site.name}: predicting needs whole sequences of 2 tokens or more, got {tq} queries, {tk} keys"
            )

    def prediction(self, attention: Attention | None) -> Prediction:
        q, k = torch.cat(self.queries).double(), torch.cat(self.keys).double()
        if len(q) < 4:
            raise LocaterError(f"predicting needs at least 4 sequences, got {len(q)}")
        q = q.unflatten(1, (k.shape[1], -1))  # (B, G, R, K)
        u = k - k.mean(2, keepdim=True)
        tokens, fit, held = k.shape[2], slice(0, None, 2), slice(1, None, 2)
        z = (1 + self.scale * torch.einsum("bgrk,bgtk->bgrt", q[held], u[held])) / tokens
        measured = ((z >= 0) & (z <= 1)).double().mean(0).flatten(0, 1).numpy()
        general = _general(q[fit], u[fit], tokens, 1 / self.scale)
        simple: dict[str, Any] = {"separable": None, "walk": None}
        if attention is not None and attention.query is not None and self.states is not None:
            found, steps = self.states.about_zero(), self.steps.about_zero()
            process, walk = TokenProcess(found.position_covariance), TokenProcess.random_walk(tokens)
            simple["separable"] = _by_moments(attention, process, found.covariance, 1 / self.scale)
            simple["walk"] = _by_moments(attention, walk, steps.covariance, 1 / self.scale)
        return Prediction(self.site.name, self.site.layer, len(z), measured, general, **simple)


def _general(q: Tensor, u: Tensor, tokens: int, temperature: float) -> Array:
    """The law for q (B, G, R, K) and centred keys u (B, G, T, K) with the moments they have."""
    q_mean, u_mean = q.mean(0), u.mean(0)
    q, u, count = q - q_mean, u - u_mean, len(q)
    found = rho_from_gaussian(
        q_mean[:, :, None].numpy(),
        u_mean[:, None].numpy(),
        (torch.einsum("bgrk,bgrl->grkl", q, q) / count)[:, :, None].numpy(),
        (torch.einsum("bgtk,bgtl->gtkl", u, u) / count)[:, None].numpy(),
        (torch.einsum("bgrk,bgtl->grtkl", q, u) / count).numpy(),
        tokens=tokens,
        temperature=temperature,
    )
    return np.asarray(found).reshape(-1, tokens)


def _by_moments(attention: Attention, process: TokenProcess, covariance: Array, temperature: float) -> Array:
    found = rho(attention.qk(), process, temperature, "gaussian", covariance=covariance)
    return np.asarray(found).reshape(-1, process.tokens)
