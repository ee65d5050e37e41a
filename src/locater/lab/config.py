"""What a run is: a model, a way to train it, and members that differ in a few numbers only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from locater.control.rules.locater import READINGS, paper_strengths
from locater.errors import LocaterError
from locater.lab.intervention import Intervention

__all__ = [
    "FREE_IN_ARENA",
    "FREE_TO_COMPARE",
    "FREE_TO_RESUME",
    "KAPPA_1",
    "METHOD_NAMES",
    "PAPER_KAPPAS",
    "READINGS",
    "Config",
    "Member",
    "ModelConfig",
    "check_whole",
    "fingerprint",
    "members_for",
    "parsed",
]


def check_whole(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LocaterError(f"{name} must be a whole number of at least {least}, got {_shown(value)}")
    if value >= 2**63:
        raise LocaterError(f"{name} must be below 2^63, got {_shown(value)}")


def _shown(value: Any) -> str:
    """For a message; Python writes out no whole number of more than 4,300 digits."""
    return f"{value!r:.80}" if not isinstance(value, int) or abs(value) < 10**80 else "one of over 80 digits"


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise LocaterError(f"{name} must be true or false, got {value!r:.80}")


def _number(name: str, value: Any, most: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most or value == math.inf:
        upto = "a finite number that is not negative" if most == math.inf else f"a number from 0 to {most:g}"
        raise LocaterError(f"{name} must be {upto}, got {value!r:.80}")
    return value


def _one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise LocaterError(f"{name} must be one of {', '.join(choices)}, got {value!r:.80}")


METHOD_NAMES = (
    "none", "qk-norm", "softcap", "z-loss", "sigma-reparam", "sigma-reparam-qk", "qk-clip", "qk-decay",
    "locater-auto",
)  # fmt: skip
"""Ways to keep attention from collapsing that a model can be trained with; `lab.methods` has them."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder as fairseq 0.12.2's `transformer_lm` builds it."""

    width: int = 128  # D
    ffn: int = 128  # width inside the feed-forward layers
    layers: int = 1  # L
    heads: int = 1  # H; each is D/H wide
    tokens: int = 64  # T, the block length
    norm: str = "post"  # where LayerNorm stands: post, pre, or none
    positions: str = "sines"  # added to the embeddings, or rotary: queries and keys are rotated
    joint_qk: bool = False  # train W_QK (D × D a head, no biases) instead of W_Q and W_K
    tied: bool = False  # one table for the embedding and the output projection
    dropout: float = 0.1  # on the embeddings and on both residual branches
    method: str = "none"  # against collapse, see METHOD_NAMES; LocAteR through the optimizer is a member's strengths

    def __post_init__(self) -> None:
        for name in ("width", "ffn", "layers", "heads", "tokens"):
            check_whole(name, getattr(self, name))
        _one_of("norm", self.norm, ("post", "pre", "none"))
        _one_of("positions", self.positions, ("sines", "rotary"))
        _one_of("method", self.method, METHOD_NAMES)
        if self.joint_qk and self.method != "none":
            raise LocaterError(f"{self.method} acts on queries and keys apart: leave joint_qk out")
        if self.width % 2:
            raise LocaterError(f"width must be even, for the sines and cosines of the positions, got {self.width}")
        if self.width < 4:
            raise LocaterError(f"width must be at least 4, got {self.width}")
        if self.width % self.heads:
            raise LocaterError(f"width must be a multiple of heads, got {self.width} and {self.heads}")
        if self.positions == "rotary" and self.joint_qk:
            raise LocaterError("rotary positions rotate queries and keys: leave joint_qk out")
        if self.positions == "rotary" and self.head_width % 2:
            raise LocaterError(f"rotary positions rotate pairs: heads must have an even width, got {self.head_width}")
        for name in ("joint_qk", "tied"):
            _flag(name, getattr(self, name))
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise LocaterError(f"dropout must lie in [0, 1), got {self.dropout!r:.80}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads


# Settings in which two runs may differ: for one to go on with the other's checkpoints, to be compared in a figure or a
# claim, and to stand in an arena's table. Where `data` is free, the text itself is compared.
FREE_TO_RESUME = ("steps", "checkpoint_every", "data")
FREE_TO_COMPARE = ("steps", "record_every", "record_early", "checkpoint_every", "deterministic")
FREE_IN_ARENA = ("method", "checkpoint_every", "data")


@dataclass(frozen=True)
class Config:
    """Everything the members of one run share."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: str | None = None  # a folder, wikitext-2, enwik8, or None: the embedded corpus
    unit: str = "words"  # that a token is, or bytes
    vocabulary: int | None = None  # keep that many most frequent words, the rest is `<unk>`; None keeps all
    batch: int = 64  # B, blocks of T tokens an update
    steps: int = 50_000
    warmup: int = 0  # steps in which the learning rate rises to what it is
    final_rate: float = 1.0  # the learning rate at the last step, of what it is after the warm-up; a cosine in between
    release: float = 0.0  # the last part of training, over which the factor on penalties and methods falls from 1 to 0
    clip: float | None = None  # of a member's gradient norm, the penalty's gradient not counted
    precision: str = "fp32"  # fp32, bf16, fp16 with a loss scale of each member's own, or on a CPU fp64
    record_every: int = 500  # steps between records in the metrics
    record_early: bool = True  # and at 1, 2, 4, 8, … before the first of them
    checkpoint_every: int = 2_000  # steps between checkpoints; 0 writes none
    probe_blocks: int = 256  # of the validation text, on which entropy, ρ and rank are measured
    valid_blocks: int | None = None  # of the validation text, for the perplexity; None is all of it
    details: bool = True  # whether records hold ρ, and the last one the eigenvalues
    deterministic: bool = False  # refuse operations whose result may differ from run to run

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "record_every", "probe_blocks"):
            check_whole(name, getattr(self, name))
        for name in ("checkpoint_every", "warmup"):
            check_whole(name, getattr(self, name), least=0)
        _number("final_rate", self.final_rate, most=1)
        _number("release", self.release, most=1)
        if self.clip is not None and not _number("clip", self.clip):
            raise LocaterError("clip must be above 0, or none")
        _one_of("unit", self.unit, ("words", "bytes"))
        for name in ("vocabulary", "valid_blocks"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        _one_of("precision", self.precision, ("fp32", "bf16", "fp16", "fp64"))
        if self.precision == "fp16" and self.model.method == "z-loss":
            raise LocaterError("z-loss knows nothing of fp16's loss scale: train it in bf16 or fp32")
        for name in ("record_early", "details", "deterministic"):
            _flag(name, getattr(self, name))

    @property
    def tokens_per_batch(self) -> int:
        return self.batch * self.model.tokens

    def records_at(self, step: int) -> bool:
        """Whether the metrics hold a record of this step."""
        early = self.record_early and step < self.record_every and step & (step - 1) == 0
        return step % self.record_every == 0 or step == self.steps or early

    def checkpoints_at(self, step: int) -> bool:
        return bool(self.checkpoint_every) and step > 0 and (step % self.checkpoint_every == 0 or step == self.steps)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def without(self, names: Sequence[str]) -> dict[str, Any]:
        """As JSON, less the settings of these names, its own or its model's."""
        own, model = ({k: v for k, v in asdict(part).items() if k not in names} for part in (self, self.model))
        return own | {"model": model}

    def same_but(self, names: Sequence[str], other: Config) -> bool:
        return self.without(names) == other.without(names)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Config:
        return cls(**{**value, "model": ModelConfig(**value["model"])})

    def changed(self, **values: Any) -> Config:
        """This configuration with fields of its own or of its model replaced."""
        of_model = {f.name for f in fields(ModelConfig)}
        own = {f.name for f in fields(Config)} - {"model"}
        unknown = values.keys() - of_model - own
        if unknown:
            raise LocaterError(f"unknown setting {sorted(unknown)[0]!r}; there are {', '.join(sorted(own | of_model))}")
        model = replace(self.model, **{name: value for name, value in values.items() if name in of_model})
        return replace(self, model=model, **{name: value for name, value in values.items() if name in own})


@dataclass(frozen=True)
class Member:
    """One model of a run. Strengths are the coefficients beside a loss that is averaged per token."""

    name: str
    seed: int = 0
    learning_rate: float = 2.5e-5
    decay: float = 0.01  # decoupled: AdamW's
    scale_strength: float = 0.0  # on tr(W_QKᵀW_QK)
    mean_strength: float = 0.0  # on (tr W_QK − target)²
    target: float = 1.0
    strength: float = 0.0  # of the model's method, if it has one
    kappa_2: float | None = None  # which line of the paper's figures it is; None is no LocAteR
    reading: str = "figures"  # of the paper's objective, see READINGS
    intervention: Intervention | None = None  # what is held or changed in its training

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or any(c in self.name for c in "\n\r\t/\\"):
            raise LocaterError(
                f"a member's name must be one word that can be part of a file's name, got {self.name!r:.80}"
            )
        check_whole("seed", self.seed, least=0)
        for name in ("learning_rate", "decay", "scale_strength", "mean_strength", "strength"):
            _number(name, getattr(self, name))
        if isinstance(self.target, bool) or not isinstance(self.target, int | float) or not math.isfinite(self.target):
            raise LocaterError(f"target must be a finite number, got {self.target!r:.80}")
        if self.kappa_2 is not None:
            _number("kappa_2", self.kappa_2)
        _one_of("reading", self.reading, tuple(READINGS))
        if self.intervention is not None:
            if not isinstance(self.intervention, Intervention):
                raise LocaterError(f"intervention must be an Intervention or None, got {self.intervention!r:.80}")
            self.intervention.check_strengths(self.scale_strength, self.mean_strength)

    def to_json(self) -> dict[str, Any]:
        value = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "intervention"}
        return value if self.intervention is None else value | {"intervention": self.intervention.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Member:
        if value.get("intervention") is None:
            return cls(**value)
        return cls(**{**value, "intervention": Intervention(**value["intervention"])})


KAPPA_1 = 100.0
PAPER_KAPPAS = (0.0, 1e-3, 1e-2, 1e-1, 1.0)  # κ₂ of the paper's figures, which have κ₁ = 100 throughout


def members_for(
    config: Config,
    kappas: Sequence[float | None],
    *,
    seeds: Sequence[int] = (0,),
    learning_rate: float,
    decay: float = 0.01,
    kappa_1: float = KAPPA_1,
    reading: str = "figures",
) -> list[Member]:
    """A member for each κ₂ (None: no LocAteR) and seed, under one reading of the paper's objective."""
    _one_of("reading", reading, tuple(READINGS))
    made = []
    for kappa in kappas:
        if kappa is not None and not (isinstance(kappa, (int, float)) and 0 <= kappa < math.inf):
            raise LocaterError(f"κ₂ must be a finite number that is not negative, got {kappa!r}")
        pair = (0.0, 0.0) if kappa is None else paper_strengths(kappa_1, kappa, config.tokens_per_batch, reading)
        label = "none" if kappa is None else f"k{kappa:g}"
        prefix = "" if reading == "figures" else f"{reading}-"
        made += [
            Member(f"{prefix}{label}-s{seed}", seed, learning_rate, decay, *pair, kappa_2=kappa, reading=reading)
            for seed in seeds
        ]
    return made


def parsed(name: str, word: str) -> Any:
    """The value of a setting, from the word that was typed."""
    kinds = {f.name: str(f.type) for f in (*fields(ModelConfig), *fields(Config)) if f.name != "model"}
    kind = kinds.get(name, "str")
    if "None" in kind and word.lower() == "none":
        return None
    try:
        if "bool" in kind:
            return {"true": True, "yes": True, "false": False, "no": False}[word.lower()]
        return int(word) if "int" in kind else float(word) if "float" in kind else word
    except (KeyError, ValueError) as error:
        wanted = "true or false" if "bool" in kind else "a whole number" if "int" in kind else "a number"
        raise LocaterError(f"{name} takes {wanted}, got {word!r:.80}") from error


def fingerprint(value: Any) -> str:
    """Equal for equal values, short enough to print."""
    import hashlib

    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
