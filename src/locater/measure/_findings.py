"""What the doctor finds: the sicknesses, when each is one, and what helps against it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from locater.io import nulled
from locater.measure._examination import block_of
from locater.measure.alarms import Thresholds, alarms_of

if TYPE_CHECKING:
    import pandas as pd

LIMIT = Thresholds().logit
_UNIFORM = 0.995  # of ln(keys): the most even head of SmolLM2 has 0.92, of MiniLM 0.97
_ALIKE, _COSINE = 0.05, 0.99  # rank residual and mean cosine; the healthy ones' are 0.41 and 0.83 at worst
# Spread over tokens of what attention puts out, over that of what enters. MiniLM, SmolLM2 and small trained models of
# eight classes have 0.14 or more; models as transformers initialises them 1e-4 or more (GPT-2 of 48 layers × 32, whose
# W_O starts at 0.02/√(2·48), and 512 tokens). Beside the median module's: a third or more in all of them.
_DEAD, _DEAD_BESIDE, _ROUNDING = 1e-5, 1e-3, 1e-6  # the last for words alone
_GROWN = 16.0  # times the median scale of the model's heads
# Sharp heads under a smaller logit: the largest scale of a healthy one is 20 times the median (MiniLM's 0.2)
_FAR, _SHARP = 64.0, 0.25  # the latter of ln(keys); of these the lowest largest logit is 3, in MiniLM and SmolLM2
_SATURATED = 1 - 1e-7  # of a softcap: float32 knows no more of tanh

NOT_FINITE, LOGITS, UNIFORM, TOKENS, DEAD, TRAINING, TEXT = (
    "numbers that are not finite", "blown-up logits", "uniform attention", "tokens alike", "dead attention",
    "alarms in training", "no variety",
)  # fmt: skip
ORDER = (NOT_FINITE, LOGITS, TRAINING, TEXT, TOKENS, DEAD, UNIFORM)  # the worst kind first

Row = dict[str, Any]


@dataclass(frozen=True)
class Treatment:
    """What helps against one kind of sickness, at what cost."""

    advice: str
    code: str
    cost: str


TREATMENTS = {
    NOT_FINITE: Treatment(
        "look which of its weights are not finite, and go back to the last checkpoint where all are",
        'print({n: bool(p.isfinite().all()) for n, p in model.get_submodule("MODULE").named_parameters()})',
        "nothing",
    ),
    LOGITS: Treatment(
        "go back to a checkpoint from before, and train on with LocAteR beside the optimizer",
        "from locater.control import DecoupledLocAteR; DecoupledLocAteR(model).attach(optimizer)",
        "a millisecond or a few an update, nothing at inference",
    ),
    UNIFORM: Treatment(
        "look whether W_Q and W_K of these heads are trained, and let no decay act on them",
        "from locater.control import QKDecay; QKDecay(0.0).apply(model, optimizer)",
        "nothing",
    ),
    TOKENS: Treatment(
        "lower the learning rate from the last good checkpoint, or bound every layer's weights",
        'from locater.control import SigmaReparam; SigmaReparam("all").apply(model, optimizer)',
        "half as much time again for an update, nothing at inference",
    ),
    DEAD: Treatment(
        "look which of its weights are zero; a layer that adds nothing can be removed, or started anew",
        'print({n: float(p.detach().norm()) for n, p in model.get_submodule("MODULE").named_parameters()})',
        "nothing",
    ),
    TRAINING: Treatment(
        "go back to a checkpoint from before the first alarm, and train on with LocAteR beside the optimizer",
        "from locater.control import DecoupledLocAteR; DecoupledLocAteR(model).attach(optimizer)",
        "a millisecond or a few an update, nothing at inference",
    ),
    TEXT: Treatment("give another text", "from locater import doctor; doctor(model, batches)", "nothing"),
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
    place: str = ""  # in words, where the layer's number alone does not say it

    @property
    def treatment(self) -> Treatment:
        found = TREATMENTS[self.kind]
        module = block_of(self.module) if self.kind == DEAD else self.module  # with a W_O that is outside
        return Treatment(found.advice, found.code.replace("MODULE", module), found.cost)

    @property
    def where(self) -> str:
        place = self.place or (f"layer {self.layer}" if self.layer >= 0 else self.module)
        if not self.heads:
            return place
        some = ", ".join(map(str, self.heads[:6])) + (" …" if len(self.heads) > 6 else "")
        return f"{place}, {'head' if len(self.heads) == 1 else 'heads'} {some}"

    def to_json(self) -> dict[str, Any]:
        return {**nulled(asdict(self)), **asdict(self.treatment)}


def places(layers: pd.DataFrame) -> dict[str, str]:
    """By module: what to call it, its layer's number if that is enough."""
    found = {}
    for row in _rows(layers):
        same = layers[layers["layer"] == row["layer"]]
        of_kind = {"self": "self-attention ", "cross": "cross-attention "}.get(row["kind"], f"{row['kind']} ")
        number = f"layer {int(row['layer'])}"
        alone, alone_of_kind = len(same) == 1, (same["kind"] == row["kind"]).sum() == 1
        found[row["module"]] = number if alone else of_kind + number if alone_of_kind else row["module"]
    return found


def _rows(table: pd.DataFrame) -> list[Row]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _by_module(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["module"], []).append(row)
    return found


def _heads_of(rows: Sequence[Row]) -> tuple[int, ...]:
    return tuple(int(row["head"]) for row in rows)


# ---------------------------------------------------------------------- of logits


def _is_finite(row: Row) -> bool:
    return math.isfinite(row["entropy"]) and math.isfinite(row["max_logit"])


def not_finite(heads: pd.DataFrame, first: str | None) -> list[Finding]:
    """Where numbers first are not finite, by the `first` module that put such out; all after it follows.

    Heads are named where they begin in the logits.
    """
    own = [row for row in _rows(heads) if first is None or f"{first}.".startswith(f"{row['module']}.")]
    layer = -1 if first is None or not own else int(own[0]["layer"])
    wrong = _by_module(row for row in own if not _is_finite(row) and row["queries"])
    follows = "all that is not finite after it follows from it"
    for name, rows in wrong.items():
        begins = "" if first in (None, name) else f", from {first} on"
        evidence = f"logits that are not finite{begins}; {follows}"
        return [Finding(LOGITS, name, int(rows[0]["layer"]), _heads_of(rows), evidence, True, math.inf)]
    if first is None:
        return []
    evidence = f"it is the first that puts out such numbers; {follows}"
    return [Finding(NOT_FINITE, first, layer, (), evidence, True, math.inf, first or "the model")]


def logits(heads: pd.DataFrame) -> list[Finding]:
    """Logits beyond the limit, before a softcap; or sharp heads whose logits must be far apart all the same."""
    usual = float(heads["scale"].median())
    rows = [row | {"logit": _uncapped(row), "grown": _grown(row, usual)} for row in _rows(heads) if _is_finite(row)]
    found = []
    for name, wrong in _by_module(row for row in rows if _beyond(row) > 1).items():
        worst = max(wrong, key=_beyond)
        size = abs(worst["logit"]) / LIMIT
        sure, evidence = size > 2 or (size > 1 and worst["grown"] > _GROWN), _logit_evidence(worst)
        found.append(Finding(LOGITS, name, int(worst["layer"]), _heads_of(wrong), evidence, sure, _beyond(worst)))
    return found


def _beyond(row: Row) -> float:
    """How many times a head is beyond what is healthy; under 1 if it is not."""
    if row["logit"] > LIMIT:
        return float(row["logit"] / LIMIT)
    if not row["entropy_share"] < _SHARP:
        return 0.0
    # what softmax sees is how far logits are apart; that they are far below zero by itself changes nothing
    return max(-float(row["logit"]) / LIMIT, float(row["grown"]) / _FAR)


def _uncapped(row: Row) -> float:
    """The largest logit before the softcap c · tanh(s / c), at least."""
    cap, logit = row["softcap"], float(row["max_logit"])
    if cap is None or not cap > 0:
        return logit
    return float(cap) * math.atanh(max(-_SATURATED, min(_SATURATED, logit / cap)))


def _grown(row: Row, usual: float) -> float:
    """The scale beside the median head's; 0 where it says nothing of logits."""
    grown = row["scale"] / usual if usual > 0 and not row["qk_norm"] else 0.0
    return float(grown) if grown > 0 else 0.0


def _logit_evidence(row: Row) -> str:
    entropy = f"an entropy of {row['entropy']:.2g} nats"
    before = "" if row["logit"] == row["max_logit"] else f" before the softcap of {row['softcap']:g}"
    told = f"a logit of {row['logit']:.4g}{before}, beyond {LIMIT:g}, and {entropy}"
    if row["logit"] < -LIMIT:
        told = f"no logit above {row['logit']:.4g}{before}, far below zero, and {entropy}"
    elif row["logit"] <= LIMIT:
        told = f"{entropy}, {100 * row['entropy_share']:.2g}% of ln(keys)"
    return told + (f"; its scale is {row['grown']:,.0f} times the median head's" if row["grown"] > _GROWN else "")


# ---------------------------------------------------------------------- of heads and modules


def uniform(heads: pd.DataFrame) -> list[Finding]:
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


def modules_alike(layers: pd.DataFrame) -> list[str]:
    return list(layers["module"][layers["rank_residual"] < _ALIKE])


def tokens(layers: pd.DataFrame) -> list[Finding]:
    """By `layers` in the order they ran: where tokens are alike as they enter the first, all the others follow."""
    alike = modules_alike(layers)
    rows = [row for row in _rows(layers) if row["module"] in alike]
    if rows and rows[0]["module"] == layers["module"].iloc[0]:
        told = " of what enters the first layer, although the text's tokens differ: look at the embeddings first"
        return [_alike(rows[0], told)]
    return [_alike(row) for row in rows]


def _alike(row: Row, told: str = "") -> Finding:
    residual, cosine = row["rank_residual"], row["mean_cosine"]
    evidence = f"a rank residual of {residual:.2g}" + (f" and a mean cosine of {cosine:.3f}" if residual else "")
    sure, times = bool(cosine > _COSINE or residual == 0), _ALIKE / max(1e-9, residual)
    return Finding(TOKENS, row["module"], int(row["layer"]), (), evidence + told, sure, times)


def dead(layers: pd.DataFrame, heads: pd.DataFrame) -> list[Finding]:
    limit = max(_DEAD, _DEAD_BESIDE * float(layers["output"].median()))
    found = []
    for row in (row for row in _rows(layers) if row["output"] <= limit):
        own = heads[heads["module"] == row["module"]]
        if row["sequences"] < 2 and (own["entropy_share"] > _UNIFORM).all():
            continue  # where attention is uniform, the tokens of a sequence get the same
        evidence = f"what it puts out varies over tokens {row['output']:.2g} times as much as what enters"
        if row["output"] < _ROUNDING:
            evidence = "what it puts out is the same for every token"
        sure, times = row["output"] < limit / 10, limit / max(1e-12, row["output"])
        found.append(Finding(DEAD, row["module"], int(row["layer"]), (), evidence, sure, times))
    return found


def no_variety(heads: pd.DataFrame, varied: bool) -> list[Finding]:
    """A text that has nothing to choose from: what attention does with it tells little."""
    single = bool(heads["entropy_share"].isna().all() and heads["entropy"].notna().any())
    if varied and not single:
        return []
    what = "is of one token" if single else "repeats one token"
    evidence = f"every sequence {what}, so that how attention chooses cannot be judged"
    return [Finding(TEXT, "", -1, (), evidence, True, math.inf, "the text")]


def training(log: pd.DataFrame) -> list[Finding]:
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
