"""What the theory predicts for the heads of a real model, beside what they do.

Half of the sequences give the moments, the other half what is measured. Of softmax attention, for chosen queries, the
expected entropy and the mean weight of every key, by three laws:

* `general`: queries and keys as the head compares them (after norms, biases and RoPE), jointly Gaussian with the means
  and covariances they have at each position, keys independent given the query: `theory.attention_from_gaussian`.
* `separable`: hidden states at the module's input with mean zero and covariance K_ij Σ; no RoPE, no biases:
  `theory.attention`.
* `three-number`: of the same tokens, but of W_QK the trace, the trace of its square and the scale alone.

Of the paper's ρ, for the last query, by the general law, for K ⊗ Σ (`separable`) and for the paper's random walk
(`walk`: K_ij = min(i, j), Σ the covariance of the steps between tokens); all three by a normal law with the exact first
two moments, or all exactly.

Legend: T tokens, G key heads, R query heads of each, Q queries of a sequence, K head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.hooks import attention_sites
from locater.measure._regression import query_key_law
from locater.measure._split import SplitRecorder, query_positions
from locater.measure._tracker import Tracker
from locater.models import Attention, attentions
from locater.names import plain_name
from locater.qk import QK
from locater.theory import (
    AttentionLaw,
    TokenProcess,
    attention,
    attention_from_gaussian,
    rho,
    rho_from_gaussian,
)
from locater.theory.attention import joined

__all__ = ["LAWS", "Agreement", "AttentionPrediction", "Prediction", "agreement", "predict"]

LAWS = ("general", "separable", "three-number")

Array = NDArray[np.float64]

_SAMPLES = 1 << 12  # of the laws of softmax, a head: standard errors of entropy below 0.01 nats


@dataclass(frozen=True)
class AttentionPrediction:
    """Softmax attention of every head of a module for one query, measured and by each law."""

    query: int  # its position, from 0
    sequences: int  # that were measured
    entropy: Array  # (heads,): mean over them, nats
    entropy_error: Array  # the standard error of that
    weights: Array  # (heads, T): mean weight of every key; zero for those that are masked
    laws: Mapping[str, AttentionLaw]  # by name, of LAWS; `general` alone where the module's W_QK is not known


@dataclass(frozen=True)
class Prediction:
    """Of every head of a module: ρ at every key position for the last query, (heads, T) each, and softmax attention."""

    module: str
    layer: int
    sequences: int  # that were measured; as many others were estimated from
    measured: Array
    general: Array
    separable: Array | None  # None where the module's W_QK is not known
    walk: Array | None
    attention: tuple[AttentionPrediction, ...]  # a query each

    def errors(self) -> dict[str, float]:
        """Mean distance of each prediction of ρ from what was measured, over heads and positions."""
        made = {"general": self.general, "separable": self.separable, "walk": self.walk}
        return {name: float(np.abs(p - self.measured).mean()) for name, p in made.items() if p is not None}

    def sampling_error(self) -> float:
        """The mean distance that counting in so many sequences gives a perfect prediction of ρ."""
        return float(np.sqrt(2 / np.pi * self.measured * (1 - self.measured) / self.sequences).mean())


@dataclass(frozen=True)
class Agreement:
    """How far the entropies that a law expects are from those measured, over heads."""

    law: str
    heads: int
    median: float  # of |predicted − measured|, nats
    percentile_90: float
    rank_correlation: float  # Spearman's
    floor: float  # the median that measuring in so few sequences leaves a perfect prediction


def agreement(predictions: Iterable[Prediction], query: int = 0) -> list[Agreement]:
    """A row a law, over all heads for which it made a prediction, of the `query`-th of the chosen queries."""
    from scipy.stats import spearmanr

    given = list(predictions) if isinstance(predictions, Iterable) else []
    if not given or not all(isinstance(one, Prediction) for one in given):
        raise LocaterError(f"predictions must be a list of one or more, as predict returns, got {predictions!r:.80}")
    queries = min(len(one.attention) for one in given)
    if not isinstance(query, int | np.integer) or not -queries <= query < queries:
        raise LocaterError(f"query must be one of the {queries} that were predicted, from 0 on, got {query!r:.80}")
    found = [one.attention[query] for one in given]
    rows = []
    for law in LAWS:
        parts = [(one.entropy, one.laws[law].entropy, one.entropy_error) for one in found if law in one.laws]
        if parts:
            measured, predicted, error = (np.concatenate(each) for each in zip(*parts, strict=True))
            distance = np.abs(predicted - measured)
            rank = float(spearmanr(measured, predicted)[0]) if len(measured) > 2 else float("nan")
            floor = float(np.median(np.sqrt(2 / np.pi) * error))
            median, far = (float(x) for x in np.quantile(distance, [0.5, 0.9]))
            rows.append(Agreement(law, len(distance), median, far, rank, floor))
    return rows


@torch.no_grad()
def predict(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor] | Tensor],
    *,
    layers: Sequence[int] | None = None,
    queries: Sequence[int] = (-1,),
    rho_method: str = "gaussian",
) -> list[Prediction]:
    """Runs the model on batches of sequences of one length, without padding, and predicts its self-attention.

    Every second sequence is held out: nothing but what is measured is taken from it. `queries` are the positions that
    softmax attention is predicted for, under the model's own mask; negative ones count from the end. The queries and
    keys of the sequences to estimate from are kept until the end, in float32. `rho_method` is that of
    `theory.rho`, "gaussian" or "exact" (seconds a module), for ρ by all three models of the tokens.
    """
    rows, given = query_positions(queries), _several(batches)
    recorders = [SplitRecorder(site, rows) for site in attention_sites(model, layers) if not site.cross]
    modes = [(module, module.training) for module in model.modules()]  # parts may have one of their own
    model.eval()
    try:
        with ExitStack() as undo:
            Tracker(model, 1, recorders).attach(undo)
            for batch in given:
                model(**batch) if isinstance(batch, Mapping) else model(batch)
    finally:
        for module, training in modes:
            module.training = training
    return predictions_of(model, recorders, rho_method)


def _several(batches: Iterable[Mapping[str, Tensor] | Tensor]) -> Iterator[Mapping[str, Tensor] | Tensor]:
    try:
        if isinstance(batches, Mapping | str) or (isinstance(batches, Tensor) and batches.ndim < 3):
            raise TypeError  # its parts are no batches
        return iter(batches)
    except TypeError as error:
        raise LocaterError(
            f"batches must be a list of them, each a tensor or a mapping, got one {type(batches).__name__}"
        ) from error


def predictions_of(
    model: nn.Module, recorders: Iterable[SplitRecorder], rho_method: str = "gaussian"
) -> list[Prediction]:
    """From what was recorded of modules of a model, of those that were called."""
    if rho_method not in ("gaussian", "exact"):
        raise LocaterError(f"rho_method must be gaussian or exact, got {rho_method!r:.80}")
    called = [one for one in recorders if one.sequences]
    if not called:
        raise LocaterError("no sequence was run: the batches are empty")
    known = {plain_name(one.module): one for one in attentions(model)}
    return [_prediction(one, known.get(one.site.name), rho_method) for one in called]


def _prediction(one: SplitRecorder, head: Attention | None, rho_method: str) -> Prediction:
    if one.sequences < 4:
        raise LocaterError(f"predicting needs at least 4 sequences, got {one.sequences}")
    queries, last, keys = one.kept()
    temperature, count = 1 / one.scale, one.measured.sequences
    measured = one.measured.rho.numpy()
    general = _general_rho(last, keys - keys.mean(2, keepdim=True), temperature, rho_method)
    if head is None or head.query is None or not head.qk().square or one.states is None:
        process = tokens = None
        simple: dict[str, Any] = {"separable": None, "walk": None}
    else:
        tokens, steps = one.states.about_zero(), one.steps.about_zero()
        process, walk = TokenProcess(tokens.position_covariance), TokenProcess.random_walk(one.tokens)
        simple = {
            "separable": _rho_of_tokens(head, process, tokens.covariance, temperature, rho_method),
            "walk": _rho_of_tokens(head, walk, steps.covariance, temperature, rho_method),
        }
    made = []
    for index, position in enumerate(one.positions()):
        attended = position + 1 if one.causal else one.tokens
        laws = {"general": _general(queries[:, :, :, index], keys[:, :, :attended], temperature, position, one.tokens)}
        if head is not None and process is not None and tokens is not None:
            laws |= _of_tokens(head, process, tokens.covariance, temperature, query=position, causal=one.causal)
        made.append(
            AttentionPrediction(
                position,
                count,
                one.measured.entropy[:, index].numpy(),
                one.measured.entropy_error[:, index].numpy(),
                one.measured.weights[:, index].numpy(),
                laws,
            )
        )
    return Prediction(one.site.name, one.site.layer, count, measured, general, **simple, attention=tuple(made))


# ---------------------------------------------------------------------- softmax attention


def _general(q: Tensor, k: Tensor, temperature: float, position: int, tokens: int) -> AttentionLaw:
    """Of queries (n, G, R, K) and the keys (n, G, attended, K) that they attend to, a key head at a time."""
    laws = []
    for head in range(k.shape[1]):
        parts = (part.numpy() for part in query_key_law(q[:, head], k[:, head]))
        laws.append(attention_from_gaussian(*parts, temperature=temperature, query=position, samples=_SAMPLES))
    law = joined(laws, np.concatenate)
    masked = ((0, 0), (0, tokens - law.tokens))
    return replace(law, weights=np.pad(law.weights, masked), weights_error=np.pad(law.weights_error, masked))


def _of_tokens(
    head: Attention, process: TokenProcess, covariance: Array, temperature: float, **query: Any
) -> dict[str, AttentionLaw]:
    """The laws of tokens K ⊗ Σ."""
    w_q, w_k = head.qk().w_q.flatten(0, 1), head.qk().w_k.expand_as(head.qk().w_q).flatten(0, 1)  # (H, K, D)
    more = {"covariance": covariance, "samples": _SAMPLES, **query}
    return {
        name: attention(QK(w_q, w_k), process, temperature, method, **more)
        for name, method in (("separable", "exact"), ("three-number", "three-number"))
    }


# ---------------------------------------------------------------------- ρ


def _general_rho(q: Tensor, u: Tensor, temperature: float, method: str) -> Array:
    """The law for q (n, G, R, K) and centred keys u (n, G, T, K) with the moments they have."""
    q_mean, u_mean = q.mean(0), u.mean(0)
    q, u, count, tokens = q - q_mean, u - u_mean, len(q), u.shape[2]
    found = rho_from_gaussian(
        q_mean[:, :, None].numpy(),
        u_mean[:, None].numpy(),
        (torch.einsum("bgrk,bgrl->grkl", q, q) / count)[:, :, None].numpy(),
        (torch.einsum("bgtk,bgtl->gtkl", u, u) / count)[:, None].numpy(),
        (torch.einsum("bgrk,bgtl->grtkl", q, u) / count).numpy(),
        tokens=tokens,
        temperature=temperature,
        method=method,
    )
    return np.asarray(found).reshape(-1, tokens)


def _rho_of_tokens(head: Attention, process: TokenProcess, covariance: Array, temperature: float, method: str) -> Array:
    found = rho(head.qk(), process, temperature, method, covariance=covariance)
    return np.asarray(found).reshape(-1, process.tokens)
