"""What is wrong with a model's attention, and what to do: one question in front of scan, observe and alarms.

    diagnosis = doctor(model, batches)
    for sentence in diagnosis.sentences():
        print(sentence)

Five sicknesses are looked for in what a model does with a text, and a log of its training has its alarms:

not finite          A module puts out numbers that are not finite: the first that does is named.
blown-up logits     A head is sharp, and its largest logit is beyond twice the alarms' level, or as far below zero, or
                    its scale is far beyond the others'.
uniform attention   A head gives every key the same weight, whatever the query is.
tokens alike        The tokens that enter attention are nearly one and the same.
dead attention      What attention adds is the same for every token, or nothing.

Sharp heads are no sickness: healthy models have heads that always look at one key. Nor are large logits by themselves:
softmax does not see a number that is added to all. A finding is sure where the weights say the same as the text: the
scale of W_QK or the softmax law's entropy for logits, the latter for uniform heads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from locater.errors import LocaterError, reason
from locater.io import nulled
from locater.measure import _findings as findings_of
from locater.measure._examination import Examination, examine
from locater.measure._findings import (
    DEAD,
    LIMIT,
    LOGITS,
    NOT_FINITE,
    ORDER,
    TEXT,
    TOKENS,
    TRAINING,
    TREATMENTS,
    UNIFORM,
    Finding,
    Treatment,
)
from locater.models import attentions, scan

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "DEAD", "LOGITS", "NOT_FINITE", "TEXT", "TOKENS", "TRAINING", "TREATMENTS", "UNIFORM", "Diagnosis", "Examination",
    "Finding", "Treatment", "diagnose", "doctor", "examine",
]  # fmt: skip

_FEW = 4  # sequences under which nothing is sure
_OF_WEIGHTS = ("scale", "law_share", "softcap", "qk_norm")


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and the numbers it was found in."""

    findings: tuple[Finding, ...]  # the worst kind first, each in the order the modules run
    # a row a head: as `Observation.table`, with scale, law_share, softcap and qk_norm of the weights where read
    heads: pd.DataFrame
    layers: pd.DataFrame  # a row a module, as they run: rank_residual, mean_cosine, output (`Examination`)
    notes: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        return not self.findings

    def sentences(self) -> list[str]:
        """At most five: for each kind where it is, how sure that is, and what to do."""
        if self.healthy:
            return [self._healthy()]
        kinds = list(dict.fromkeys(finding.kind for finding in self.findings))
        return [_sentence([one for one in self.findings if one.kind == kind]) for kind in kinds][:5]

    def to_json(self) -> dict[str, Any]:
        return {
            "healthy": self.healthy,
            "sentences": self.sentences(),
            "findings": [finding.to_json() for finding in self.findings],
            "notes": list(self.notes),
            "examined": nulled(self.heads.to_dict("records")),
            "examined_layers": nulled(self.layers.to_dict("records")),
        }

    def _healthy(self) -> str:
        heads, layers = self.heads, self.layers
        rank = "" if layers["rank_residual"].isna().all() else f", rank residual {layers['rank_residual'].min():.2f}"
        return (
            f"Nothing is wrong with the attention of {len(heads)} heads in {len(layers)} modules: largest logit "
            f"{heads['max_logit'].max():.3g} (of sharp heads a sickness from {LIMIT:g} on), entropy shares from "
            f"{heads['entropy_share'].min():.2g} to {heads['entropy_share'].max():.2g}{rank} or more."
        )


def _sentence(found: Sequence[Finding]) -> str:
    worst = max(found, key=lambda one: (one.worst, one.sure))
    where = "; ".join(one.where for one in found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    count = sum(one.sure for one in found)
    sure = "sure" if count == len(found) else "mostly sure" if count else "likely"
    todo, whose = worst.treatment, ""
    if len(found) > 1:
        whose = f"{'first' if worst.kind == TRAINING else 'worst'} in {worst.evidence_of}: "
    elif len(worst.heads) > 1 and worst.head is not None:
        whose = f"worst in head {worst.head}: "
    return (
        f"{worst.kind[0].upper()}{worst.kind[1:]} ({sure}) in {where}: {whose}{worst.evidence}; {todo.advice} "
        f"(cost: {todo.cost}): {todo.code}"
    )


def doctor(
    model: nn.Module,
    batches: Iterable[Tensor | Mapping[str, Any]] | Tensor | Mapping[str, Any],
    *,
    log: pd.DataFrame | str | Path | None = None,
) -> Diagnosis:
    """Runs a model over some batches, as `model(**batch)` or `model(batch)`, and says what is wrong with its attention.

    A tensor or a mapping is taken for one batch. `log`, the file of an `AttentionLog` or what `measure.logs.read_log`
    gives, adds the alarms of its training. The model is run in evaluation mode, without gradients, and left as it was.
    """
    if not isinstance(model, nn.Module):
        raise LocaterError(f"doctor takes a torch module and batches to run it on, got {type(model).__name__}")
    history = _history(log)
    return diagnose(examine(model, batches), model, log=history)


def _history(log: Any) -> pd.DataFrame | None:
    import pandas as pd

    from locater.measure.logs import read_log

    if log is None or isinstance(log, pd.DataFrame):
        return log
    if isinstance(log, str | Path):
        return read_log(log)
    raise LocaterError(f"log must be the file of an AttentionLog, or the table read_log makes of it, got {log!r:.80}")


def diagnose(examined: Examination, model: Any, *, log: pd.DataFrame | None = None) -> Diagnosis:
    """`model` is what `scan` takes: the model itself, or where its weights lie."""
    heads = examined.seen.table()
    if heads.empty:
        raise LocaterError("none of the model's attention was seen while it ran: there is nothing to judge")
    layers = _layers(examined, heads)
    heads, notes = _with_weights(heads, model)
    findings = _judged(examined, heads, layers)
    if log is not None and log.empty:
        notes.append("The log has no whole line yet, and tells of no alarms.")
    elif log is not None:
        in_log = findings_of.training(log)
        findings += in_log
        if not in_log:
            notes.append(f"The log's {log['step'].nunique():,} steps raise no alarm.")
    if not layers["sequences"].max() >= _FEW:
        findings = [replace(one, sure=one.sure and math.isinf(one.worst)) for one in findings]
    named, rank = findings_of.places(layers), {name: index for index, name in enumerate(layers["module"])}
    findings = [replace(one, place=one.place or named.get(one.module, "")) for one in findings]
    if findings:
        bounded = _bounded(model, heads)
        findings = [replace(one, bounded=bounded.get(one.module, True)) for one in findings]
    findings.sort(key=lambda one: (ORDER.index(one.kind), rank.get(one.module, len(rank))))
    return Diagnosis(tuple(findings), heads, layers, tuple(notes))


def _layers(examined: Examination, heads: pd.DataFrame) -> pd.DataFrame:
    """A row a module, in the order they ran; those that were not seen to end come last."""
    tokens = examined.seen.tokens().drop(columns=["layer", "kind"])
    layers = heads[["module", "layer", "kind"]].drop_duplicates().merge(tokens, on="module", how="left")
    layers["output"] = [examined.output.get(name, math.nan) for name in layers["module"]]
    rank = {name: index for index, name in enumerate(examined.output)}
    return layers.sort_values("module", key=lambda names: names.map(rank), kind="stable", ignore_index=True)


def _with_weights(heads: pd.DataFrame, model: Any) -> tuple[pd.DataFrame, list[str]]:
    """With scale of W_QK, and law_share: the entropy that the softmax law expects of such weights, over ln T."""
    tokens = _tokens(heads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is not read has no weights to compare
            weights = scan(model, fold_norm=True, tokens=tokens)
    except LocaterError as error:
        missing = dict.fromkeys(_OF_WEIGHTS, math.nan) | {"qk_norm": False}
        return heads.assign(**missing), [f"The weights were not read: {reason(error)}"]
    weights = weights.assign(law_share=weights["attention_entropy"] / math.log(tokens))
    return heads.merge(weights[["module", "head", *_OF_WEIGHTS]], on=["module", "head"], how="left"), []


def _bounded(model: Any, heads: pd.DataFrame) -> dict[str, bool]:
    """By module, whether LocAteR beside the optimizer bounds its logits.

    It writes W_Q and W_K, which have to be read and be parameters themselves; norms of queries and keys undo that.
    """
    taken = True
    if isinstance(model, nn.Module):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is not read is left alone
                parts = [part for one in attentions(model) for part in (one.query, one.key)]
            taken = all(part is not None and (part.others or not part.computed) for part in parts)
        except LocaterError:
            taken = False
    normed = set(heads["module"][heads["qk_norm"].eq(True)])
    return {str(name): taken and name not in normed for name in heads["module"]}


def _tokens(heads: pd.DataFrame) -> int:
    """How many keys a query has, as the ratio of entropy to its share tells; `scan`'s 64 where no head does."""
    told = heads[(heads["entropy"] > 0) & (heads["entropy"] < math.inf)]
    log_keys = float((told["entropy"] / told["entropy_share"]).median())
    return max(2, round(math.exp(log_keys))) if math.isfinite(log_keys) else 64


def _judged(examined: Examination, heads: pd.DataFrame, layers: pd.DataFrame) -> list[Finding]:
    """What is found in what the model did, less what only follows from something else."""
    begun, large = findings_of.not_finite(heads, examined.not_finite), findings_of.logits(heads)
    text = findings_of.no_variety(heads, examined.repeated)
    if text:
        return [*begun, *large, *text]
    alike, even = findings_of.tokens(layers), findings_of.uniform(heads)
    judged = layers[~layers["module"].isin(findings_of.modules_alike(layers))]  # of tokens that are one nothing varies
    dead = findings_of.dead(judged, heads)
    gone = {one.module for one in dead}  # whose attention does not matter
    even = [one for one in even if one.module in set(judged["module"])]
    return [*begun, *dead, *(one for one in (*large, *alike, *even) if one.module not in gone)]
