"""What the doctor finds: the sicknesses, when each is one, and what helps against it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from locater.io import nulled
from locater.measure._examination import Fault, block_of
from locater.measure.alarms import Alarm, Thresholds, alarms_of

if TYPE_CHECKING:
    import pandas as pd

# Healthy is what MiniLM and SmolLM2 do at 64 to 512 tokens of fifteen texts: prose in four languages, code, tables
LIMIT = 2 * Thresholds().logit  # 194: the largest logit of a healthy head is 103, MiniLM's 0.2 at 512 tokens
_SHARP = 0.25  # of ln(keys)
_FAR = 64.0  # times the upper quartile of the heads' scales: healthy heads have up to 32, SmolLM2's 0.7
_BY_LAW = 0.01  # of ln(keys): what the softmax law expects of a healthy head's weights is 0.056 or more
_SATURATED = 1 - 1e-7  # of a softcap: float32 knows no more of tanh
_UNIFORM = 0.995  # of ln(keys): the most even healthy head has 0.988
_ALIKE, _COSINE = 0.05, 0.99  # rank residual and mean cosine; the healthy ones' are 0.20 and 0.96 at worst
_REPEATED = 0.9  # share of a text's commonest token: 0.57 in Chinese, of which MiniLM knows few letters
# Spread over tokens of what attention puts out, over that of what enters. MiniLM, SmolLM2 and small trained models of
# eight classes have 0.14 or more; models as transformers initialises them 1e-4 or more (GPT-2 of 48 layers × 32, whose
# W_O starts at 0.02/√(2·48), and 512 tokens). Beside the median module's: 0.11 or more in all of them.
_DEAD, _DEAD_BESIDE, _ROUNDING = 1e-5, 1e-3, 1e-6  # the last for words alone

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
        "print({n: bool(p.isfinite().all()) for n, p in [*model.named_parameters(), *model.named_buffers()] "
        'if "MODULE" in f".{n}"})',
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
        "lower the learning rate from the last good checkpoint on, before a scheduler is made",
        'for group in optimizer.param_groups: group["lr"] /= 3',
        "slower learning",
    ),
    DEAD: Treatment(
        "look which of its weights are zero; a layer that adds nothing can be removed, or started anew",
        'print({n: float(p.detach().norm()) for n, p in model.named_parameters() if "MODULE" in f".{n}"})',
        "nothing",
    ),
    TRAINING: Treatment(
        "go back to a checkpoint from before the first alarm, and train on with LocAteR beside the optimizer",
        "from locater.control import DecoupledLocAteR; DecoupledLocAteR(model).attach(optimizer)",
        "a millisecond or a few an update, nothing at inference",
    ),
    TEXT: Treatment(
        "give another text, and look whether the tokenizer knows what it is written in",
        "from locater import doctor; doctor(model, batches)",
        "nothing",
    ),
}
# where all weights are finite
_OVERFLOW = Treatment("run it in bfloat16 or float32", "import torch; model.to(torch.bfloat16)", "rounding")
_TOO_LARGE = Treatment(
    "look which of its weights are too large, and go back to the last checkpoint where none are",
    'print({n: float(p.detach().abs().max()) for n, p in model.named_parameters() if "MODULE" in f".{n}"})',
    "nothing",
)
# where LocAteR beside the optimizer does not bound the logits
_PENALTY = Treatment(
    "go back to a checkpoint from before, and train on with a penalty on the logits",
    "from locater.control import ZLoss; ZLoss().apply(model, optimizer)",
    "71% more time for an update of a small Llama, nothing at inference",
)
_UNTRAINED = Treatment(
    "look whether W_Q and W_K of these heads, or gains of norms, are near 0", TREATMENTS[DEAD].code, "nothing"
)


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
    head: int | None = None  # of several heads the one that the evidence is of
    overflows: str = ""  # the type of number, where what is not finite does not come of the weights
    bounded: bool = True  # whether LocAteR beside the optimizer bounds the module's logits

    @property
    def treatment(self) -> Treatment:
        found = TREATMENTS[self.kind]
        if self.overflows == "float16":
            found = _OVERFLOW
        elif self.overflows and self.kind == NOT_FINITE:
            found = _TOO_LARGE
        elif not self.bounded:
            found = {LOGITS: _PENALTY, TRAINING: _PENALTY, UNIFORM: _UNTRAINED}.get(self.kind, found)
        module = block_of(self.module) if self.kind == DEAD else self.module  # with a W_O that is outside
        # by the end of its name: with a head around it, the same model has names with more before them
        return Treatment(found.advice, found.code.replace("MODULE", f".{module}." if module else "."), found.cost)

    @property
    def where(self) -> str:
        return _where(self._place, self.heads)

    @property
    def evidence_of(self) -> str:
        """Where the evidence is from."""
        return self.where if self.head is None else _where(self._place, (self.head,))

    @property
    def _place(self) -> str:
        return self.place or (f"layer {self.layer}" if self.layer >= 0 else self.module)

    def to_json(self) -> dict[str, Any]:
        return {**nulled(asdict(self)), **asdict(self.treatment)}


def _where(place: str, heads: Sequence[int]) -> str:
    if not heads:
        return place
    some = ", ".join(map(str, heads[:6])) + (" …" if len(heads) > 6 else "")
    return f"{place}, {'head' if len(heads) == 1 else 'heads'} {some}"


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


def not_finite(heads: pd.DataFrame, fault: Fault | None) -> list[Finding]:
    """Where numbers first are not finite, by the first module that put such out; all after it follows.

    Heads are named where they begin in the logits.
    """
    first = None if fault is None else fault.module
    own = [row for row in _rows(heads) if first is None or f"{first}.".startswith(f"{row['module']}.")]
    layer = -1 if first is None or not own else int(own[0]["layer"])
    wrong = _by_module(row for row in own if not _is_finite(row) and row["queries"])
    why, overflows = _why(fault)
    follows = "all that is not finite after it follows from it"
    for name, rows in wrong.items():
        if fault is not None and name == first and not fault.given:
            continue  # it has begun before the logits
        begins = "" if first in (None, name) else f", from {first} on"
        evidence = f"logits that are not finite{begins}{why}; {follows}"
        where = (name, int(rows[0]["layer"]), _heads_of(rows))
        return [Finding(LOGITS, *where, evidence, True, math.inf, overflows=overflows)]
    if first is None:
        return []
    evidence = f"it is the first that puts out such numbers{why}; {follows}"
    return [Finding(NOT_FINITE, first, layer, (), evidence, True, math.inf, first or "the model", overflows=overflows)]


def _why(fault: Fault | None) -> tuple[str, str]:
    """What else than the weights it comes of, in words, and the type of number that overflows."""
    if fault is None or not fault.weights:
        return "", ""
    if fault.given:
        return f", and its weights are all finite: what it computes overflows {fault.dtype}", fault.dtype
    before = "the batch, or what is computed just before it"
    return f", and its weights are all finite: what it is given is not finite, {before} in {fault.dtype}", fault.dtype


def logits(heads: pd.DataFrame) -> list[Finding]:
    """Sharp heads whose logits are beyond the limit, or must be far apart by their weights."""
    usual = float(heads["scale"].quantile(0.75))  # the median head may be idle
    rows = [row | {"logit": _uncapped(row), "grown": _grown(row, usual)} for row in _rows(heads) if _is_finite(row)]
    found = []
    for name, wrong in _by_module(row for row in rows if _beyond(row) > 1).items():
        worst = max(wrong, key=_beyond)
        sure = abs(worst["logit"]) > LIMIT / 2 and (worst["grown"] > _FAR or _is_sharp_by_law(worst))
        where, evidence = (name, int(worst["layer"]), _heads_of(wrong)), _logit_evidence(worst)
        found.append(Finding(LOGITS, *where, evidence, sure, _beyond(worst), head=int(worst["head"])))
    return found


def _beyond(row: Row) -> float:
    """How many times a head is beyond what is healthy; under 1 if it is not."""
    # What softmax sees is how far logits are apart: one number added to all changes nothing, unless a softcap follows
    sharp = row["entropy_share"] < _SHARP
    size = abs(float(row["logit"])) / LIMIT if sharp or _has_cap(row) else 0.0
    return max(size, float(row["grown"]) / _FAR if sharp else 0.0)


def _has_cap(row: Row) -> bool:
    return row["softcap"] is not None and row["softcap"] > 0


def _is_sharp_by_law(row: Row) -> bool:
    return bool(row["law_share"] < _BY_LAW and not row["qk_norm"])


def _uncapped(row: Row) -> float:
    """The largest logit before the softcap c · tanh(s / c), at least."""
    cap, logit = row["softcap"], float(row["max_logit"])
    if not _has_cap(row):
        return logit
    return float(cap) * math.atanh(max(-_SATURATED, min(_SATURATED, logit / cap)))


def _grown(row: Row, usual: float) -> float:
    """The scale over the upper quartile of all heads'; 0 where it says nothing of logits."""
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
    if row["entropy_share"] < _SHARP and _is_sharp_by_law(row):
        told += ", as the softmax law expects of such weights"
    far = f"; its scale is {row['grown']:,.0f} times the upper quartile of all heads"
    return told + (far if row["grown"] > _FAR else "")


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
        where = (name, int(worst["layer"]), _heads_of(rows))
        found.append(Finding(UNIFORM, *where, evidence, by_law, float(times), head=int(worst["head"])))
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


def no_variety(heads: pd.DataFrame, repeated: float) -> list[Finding]:
    """A text that has nothing to choose from: what attention does with it tells little."""
    single = bool(heads["entropy_share"].isna().all() and heads["entropy"].notna().any())
    if not (single or repeated > _REPEATED):
        return []
    what = "every sequence is of one token" if single else f"one token is {100 * repeated:.0f}% of the median sequence"
    evidence = f"{what}, so that how attention chooses cannot be judged"
    return [Finding(TEXT, "", -1, (), evidence, True, math.inf, "the text")]


def training(log: pd.DataFrame) -> list[Finding]:
    alarms = alarms_of(log)
    first: dict[str, Alarm] = {}  # of each module; of one step, in the order the modules run
    for alarm in alarms:
        first.setdefault(alarm.module, alarm)
    layers = {row["module"]: int(row["layer"]) for row in _rows(log) if isinstance(row.get("layer"), int)}
    return [
        Finding(
            TRAINING, alarm.module, layers.get(alarm.module, -1), () if alarm.head is None else (alarm.head,),
            f"at step {alarm.step}, {alarm.kind}: {alarm.reason}", True, 1 / (1 + n),  # the first is the worst
        )
        for n, alarm in enumerate(first.values())
    ]  # fmt: skip
