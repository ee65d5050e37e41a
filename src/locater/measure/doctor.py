"""What is wrong with a model's attention, and what to do: one question in front of scan, observe and alarms.

    diagnosis = doctor(model, batches)
    for sentence in diagnosis.sentences():
        print(sentence)

Four sicknesses are looked for in what a model does with a text, and a log of its training has its alarms:

blown-up logits     The largest logit of a head is beyond the alarms' level, twice what healthy training needs; or one
                    is not finite.
uniform attention   A head gives every key the same weight, whatever the query is.
tokens alike        The tokens that enter attention are nearly one and the same.
dead attention      What a module puts out is nothing beside what the others do.

Sharp heads are no sickness: healthy models have heads that always look at one key. A finding is sure where the weights
say the same as the text: the scale of W_QK for logits, the softmax law's entropy for uniform heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError, reason
from locater.hooks import attention_sites
from locater.io import nulled
from locater.measure.alarms import Thresholds, alarms_of
from locater.measure.observe import Observation, observe
from locater.models import scan

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Diagnosis", "Examination", "Finding", "diagnose", "doctor", "examine"]

_UNIFORM = 0.995  # of ln(keys): the most even head of SmolLM2 has 0.92, of MiniLM 0.97
_ALIKE, _COSINE = 0.05, 0.99  # rank residual and mean cosine; the healthy ones' are 0.41 and 0.83 at worst
_DEAD = 1e-3  # of what the median module puts out, beside what enters it
_GROWN = 16.0  # times the median scale of the model's heads
_FEW = 4  # sequences under which nothing is sure

LOGITS, UNIFORM, TOKENS, DEAD, TRAINING = (
    "blown-up logits", "uniform attention", "tokens alike", "dead attention", "alarms in training"
)  # fmt: skip


@dataclass(frozen=True)
class Treatment:
    """What helps against one kind of sickness, at what cost."""

    advice: str
    code: str
    cost: str


TREATMENTS = {
    LOGITS: Treatment(
        "go back to a checkpoint from before, and train on with LocAteR beside the optimizer",
        "DecoupledLocAteR(model).attach(optimizer)",
        "a millisecond or a few an update, nothing at inference",
    ),
    UNIFORM: Treatment(
        "look whether W_Q and W_K of these heads are trained, and let no decay act on them",
        "QKDecay(0.0).apply(model, optimizer)",
        "nothing",
    ),
    TOKENS: Treatment(
        "lower the learning rate from the last good checkpoint, or bound every layer's weights",
        'SigmaReparam("all").apply(model, optimizer)',
        "half as much time again for an update, nothing at inference",
    ),
    DEAD: Treatment(
        "look which of its weights are zero; a layer that adds nothing can be removed, or started anew",
        'print({n: float(p.norm()) for n, p in model.get_submodule("MODULE").named_parameters()})',
        "nothing",
    ),
    TRAINING: Treatment(
        "go back to a checkpoint from before the first alarm, and train on with LocAteR beside the optimizer",
        "DecoupledLocAteR(model).attach(optimizer)",
        "a millisecond or a few an update, nothing at inference",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One sickness of one module."""

    kind: str
    module: str
    layer: int  # −1 where it is not known
    heads: tuple[int, ...]  # empty where it is the module as a whole
    evidence: str
    sure: bool
    worst: float  # how many times beyond its threshold

    @property
    def treatment(self) -> Treatment:
        found = TREATMENTS[self.kind]
        return Treatment(found.advice, found.code.replace("MODULE", self.module), found.cost)

    def to_json(self) -> dict[str, Any]:
        return {**nulled(asdict(self)), **asdict(self.treatment)}


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and the numbers it was found in."""

    findings: tuple[Finding, ...]  # the worst kind first
    heads: pd.DataFrame  # a row a head: as `Observation.table`, with scale and law_share of the weights where read
    layers: pd.DataFrame  # a row a module: rank_residual, mean_cosine, output (beside what enters)
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
            f"{heads['max_logit'].max():.3g} (a sickness from {Thresholds().logit:g} on), entropy shares from "
            f"{heads['entropy_share'].min():.2g} to {heads['entropy_share'].max():.2g}{rank} or more."
        )


def _sentence(found: Sequence[Finding]) -> str:
    worst = max(found, key=lambda one: (one.worst, one.sure))
    where = "; ".join(_where(one) for one in found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    count = sum(one.sure for one in found)
    sure = "sure" if count == len(found) else "mostly sure" if count else "likely"
    todo = worst.treatment
    return (
        f"{worst.kind[0].upper()}{worst.kind[1:]} ({sure}) in {where}: {worst.evidence}; {todo.advice} "
        f"(cost: {todo.cost}): {todo.code}"
    )


def _where(one: Finding) -> str:
    place = f"layer {one.layer}" if one.layer >= 0 else one.module
    if not one.heads:
        return place
    some = ", ".join(map(str, one.heads[:6])) + (" …" if len(one.heads) > 6 else "")
    return f"{place}, {'head' if len(one.heads) == 1 else 'heads'} {some}"


# ---------------------------------------------------------------------- looking


@dataclass(frozen=True)
class Examination:
    """A model that has run over some batches: what its attention did, and how much each module put out."""

    seen: Observation
    output: dict[str, float]  # by module: root mean square of what it puts out, over that of what enters it


def doctor(
    model: nn.Module, batches: Iterable[Tensor | Mapping[str, Any]], *, log: pd.DataFrame | None = None
) -> Diagnosis:
    """Runs a model over some batches, as `model(**batch)` or `model(batch)`, and says what is wrong with its attention.

    `log`, such as `measure.logs.read_log` gives, adds the alarms of its training. The model is run in evaluation mode,
    without gradients, and left as it was.
    """
    if not isinstance(model, nn.Module):
        raise LocaterError(f"doctor takes a torch module and batches to run it on, got {type(model).__name__}")
    return diagnose(examine(model, batches), model, log=log)


def examine(
    model: nn.Module, batches: Iterable[Any], run: Callable[[Any], object] | None = None, **options: Any
) -> Examination:
    """`run` runs the model on a batch, if `doctor`'s way does not do; `options` are those of `observe`."""
    outputs = _Outputs()
    modes = {module: module.training for module in model.modules()}
    ran = False
    try:
        model.eval()
        with ExitStack() as undo, torch.no_grad():
            outputs.attach(model, undo)
            seen = undo.enter_context(observe(model, **options))
            for batch in batches:
                ran = True
                if run is not None:
                    run(batch)
                elif isinstance(batch, Mapping):
                    model(**batch)
                else:
                    model(batch)
    finally:
        for module, training in modes.items():
            module.training = training
    if not ran:
        raise LocaterError("there is no batch to run the model on: give one or more")
    return Examination(seen, outputs.ratios())


class _Outputs:
    """Mean squares of what enters each attention module and of what it puts out."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}

    def attach(self, model: nn.Module, undo: ExitStack) -> None:
        for site in attention_sites(model):
            if isinstance(site.module, nn.MultiheadAttention):  # torch's encoder layer leaves its fast path for a hook
                continue
            hook = self._hook(site.name)
            undo.callback(site.module.register_forward_hook(hook, with_kwargs=True).remove)

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            del module
            into = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
            out = result[0] if isinstance(result, tuple | list) else result
            if into is None or not isinstance(out, Tensor):
                return
            pair = torch.stack([x.detach().float().square().mean() for x in (into, out)])
            self._sums.setdefault(name, []).append(pair)

        return hook

    def ratios(self) -> dict[str, float]:
        found = {}
        for name, pairs in self._sums.items():
            into, out = torch.stack(pairs).mean(0).tolist()
            found[name] = math.sqrt(out / into) if into > 0 else math.nan
        return found


# ---------------------------------------------------------------------- judging


def diagnose(examined: Examination, model: Any, *, log: pd.DataFrame | None = None) -> Diagnosis:
    """`model` is what `scan` takes: the model itself, or where its weights lie."""
    heads, layers = examined.seen.table(), examined.seen.tokens()
    if heads.empty:
        raise LocaterError("none of the model's attention was seen while it ran: there is nothing to judge")
    layers = heads[["module", "layer"]].drop_duplicates().merge(layers.drop(columns=["layer"]), on="module", how="left")
    layers["output"] = [examined.output.get(name, math.nan) for name in layers["module"]]
    heads, notes = _with_weights(heads, model)
    sequences = layers["sequences"].max()
    few = not sequences >= _FEW
    findings = [*_logits(heads), *_uniform(heads), *_tokens(layers), *_dead(layers)]
    dead = {one.module for one in findings if one.kind == DEAD}
    # a dead module's attention does not matter
    findings = [one for one in findings if one.kind == DEAD or one.module not in dead]
    if log is not None:
        findings += _training(log)
    if few:
        findings = [Finding(**{**vars(one), "sure": False}) for one in findings]
    order = {kind: index for index, kind in enumerate((LOGITS, TRAINING, TOKENS, DEAD, UNIFORM))}
    findings.sort(key=lambda one: (order[one.kind], one.layer))
    return Diagnosis(tuple(findings), heads, layers, tuple(notes))


def _with_weights(heads: pd.DataFrame, model: Any) -> tuple[pd.DataFrame, list[str]]:
    """With scale of W_QK, and law_share: the entropy that the softmax law expects of such weights, over ln T."""
    import warnings

    tokens = max(2, round(math.exp(float((heads["entropy"] / heads["entropy_share"]).median()))))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is not read has no weights to compare
            weights = scan(model, fold_norm=True, tokens=tokens)
    except LocaterError as error:
        return heads.assign(scale=math.nan, law_share=math.nan), [f"The weights were not read: {reason(error)}"]
    weights = weights.assign(law_share=weights["attention_entropy"] / math.log(tokens))
    return heads.merge(weights[["module", "head", "scale", "law_share"]], on=["module", "head"], how="left"), []


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _by_module(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["module"], []).append(row)
    return found


def _heads_of(rows: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    return tuple(int(row["head"]) for row in rows)


def _logits(heads: pd.DataFrame) -> list[Finding]:
    found = []
    limit, usual = Thresholds().logit, float(heads["scale"].median())

    def logit(row: dict[str, Any]) -> float:
        """Infinite where logits, and so their statistics, are not finite."""
        whole = math.isfinite(row["entropy"]) and math.isfinite(row["max_logit"])
        return float(row["max_logit"]) if whole else math.inf

    for name, rows in _by_module(row for row in _rows(heads) if logit(row) > limit).items():
        worst = max(rows, key=logit)
        finite, grown = math.isfinite(logit(worst)), worst["scale"] / usual
        evidence = "logits that are not finite"
        if finite:
            entropy = f"an entropy of {worst['entropy']:.2g} nats"
            evidence = f"a logit of {worst['max_logit']:.4g}, beyond {limit:g}, and {entropy}"
        if grown > _GROWN:
            evidence += f"; its scale is {grown:,.0f} times the median head's"
        times = logit(worst) / limit
        sure = not finite or grown > _GROWN or times > 2
        found.append(Finding(LOGITS, name, int(worst["layer"]), _heads_of(rows), evidence, bool(sure), times))
    return found


def _uniform(heads: pd.DataFrame) -> list[Finding]:
    found = []
    for name, rows in _by_module(row for row in _rows(heads) if row["entropy_share"] > _UNIFORM).items():
        worst = max(rows, key=lambda row: float(row["entropy_share"]))
        evidence = f"an entropy of {100 * worst['entropy_share']:.2f}% of ln(keys)"
        by_law = all(row["law_share"] > _UNIFORM or row["scale"] == 0 for row in rows)
        if by_law:
            evidence += ", which the softmax law expects of such weights"
        times = (1 - _UNIFORM) / max(1e-6, 1 - worst["entropy_share"])
        found.append(Finding(UNIFORM, name, int(worst["layer"]), _heads_of(rows), evidence, by_law, float(times)))
    return found


def _tokens(layers: pd.DataFrame) -> list[Finding]:
    found = []
    for row in (row for row in _rows(layers) if row["rank_residual"] < _ALIKE):
        evidence = f"a rank residual of {row['rank_residual']:.2g} and a mean cosine of {row['mean_cosine']:.3f}"
        times = _ALIKE / max(1e-9, row["rank_residual"])
        found.append(
            Finding(TOKENS, row["module"], int(row["layer"]), (), evidence, row["mean_cosine"] > _COSINE, times)
        )
    return found


def _dead(layers: pd.DataFrame) -> list[Finding]:
    usual = float(layers["output"].median())
    found = []
    for row in (row for row in _rows(layers) if row["output"] <= _DEAD * usual):
        share = row["output"] / usual if usual > 0 else 0.0
        evidence = f"it puts out {share:.2g} of what the median module does"
        found.append(Finding(DEAD, row["module"], int(row["layer"]), (), evidence, share < _DEAD / 10, 1.0))
    return found


def _training(log: pd.DataFrame) -> list[Finding]:
    alarms = alarms_of(log)
    by_module = {alarm.module: alarm for alarm in reversed(alarms)}  # the first of each
    layers = {row["module"]: int(row["layer"]) for row in _rows(log) if isinstance(row.get("layer"), int)}
    return [
        Finding(
            TRAINING, alarm.module, layers.get(alarm.module, -1), () if alarm.head is None else (alarm.head,),
            f"at step {alarm.step}, {alarm.kind}: {alarm.reason}", True, 1.0,
        )
        for alarm in sorted(by_module.values(), key=lambda alarm: alarm.step)
    ]  # fmt: skip
