"""Does localised attention cause LocAteR's gain? Conditions to train side by side, and the comparisons to make.

A condition is trained with every seed; those of one seed share start, batches and dropout. Which conditions are
compared is written down here, before anything is trained, and goes into the sweep's files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from locater.errors import LocaterError
from locater.lab.config import KAPPA_1, Config, Member, members_for
from locater.lab.intervention import Intervention

__all__ = ["Comparison", "Condition", "Design", "condition_of", "design"]


@dataclass(frozen=True)
class Condition:
    """A way to train; an intervention names other conditions as members, which stand for the ones of the same seed."""

    name: str
    kappa_2: float | None = None  # of LocAteR; None is none
    target: float = 1.0  # of LocAteR, for the trace
    decay: float = 1.0  # how many times as strong as the others'
    intervention: Intervention | None = None

    def member(self, config: Config, seed: int, *, learning_rate: float, decay: float, kappa_1: float) -> Member:
        rest: dict[str, Any] = {"learning_rate": learning_rate, "decay": decay * self.decay, "kappa_1": kappa_1}
        (made,) = members_for(config, [self.kappa_2], seeds=[seed], **rest)
        own = self.intervention
        if own is not None:
            own = replace(own, entropy_of=_named(own.entropy_of, seed), noise_of=_named(own.noise_of, seed))
        in_figures = own is None and self.target == made.target
        return replace(
            made,
            name=f"{self.name}-s{seed}",
            target=self.target,
            kappa_2=made.kappa_2 if in_figures else None,
            intervention=own,
        )


def _named(condition: str | None, seed: int) -> str | None:
    return None if condition is None else f"{condition}-s{seed}"


def condition_of(member: Member) -> str:
    """The name of the condition a member is of."""
    return member.name.removesuffix(f"-s{member.seed}")


@dataclass(frozen=True)
class Comparison:
    """The perplexity of a condition against that of a reference, paired by seed."""

    name: str  # what is asked
    condition: str
    reference: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Comparison:
        try:
            made = cls(**value)
        except TypeError as error:
            raise LocaterError(f"a comparison has a name, a condition and a reference, got {value!r:.80}") from error
        if not all(isinstance(word, str) for word in asdict(made).values()):
            raise LocaterError(f"a comparison's name, condition and reference must be words, got {value!r:.80}")
        return made


@dataclass(frozen=True)
class Design:
    """Conditions, the first without any change and the second with LocAteR, and the comparisons planned."""

    conditions: tuple[Condition, ...]
    comparisons: tuple[Comparison, ...]

    def __post_init__(self) -> None:
        names = [condition.name for condition in self.conditions]
        if len(set(names)) < len(names):
            raise LocaterError(f"a design names a condition twice: {', '.join(names)}")
        for each in self.comparisons:
            for name in (each.condition, each.reference):
                if name not in names:
                    raise LocaterError(f"{each.name!r} compares {name}, which is no condition of the design")

    def members(
        self, config: Config, seeds: Sequence[int], *, learning_rate: float, decay: float, kappa_1: float = KAPPA_1
    ) -> list[Member]:
        """Those of one seed stand together."""
        settings = {"learning_rate": learning_rate, "decay": decay, "kappa_1": kappa_1}
        return [condition.member(config, seed, **settings) for seed in seeds for condition in self.conditions]

    def to_json(self) -> list[dict[str, str]]:
        return [asdict(comparison) for comparison in self.comparisons]


def design(
    *,
    entropies: Sequence[float],
    traces: Sequence[float],
    scales: Sequence[float],
    layers: int = 1,
    kappa_2: float = 1.0,
    controls: bool = True,
    thorough: bool = True,
    first: float = 0.1,
) -> Design:
    """Everything held at these levels, and every control; with several layers LocAteR on each of them alone, too.

    Without `controls` the levels alone, beside no LocAteR and LocAteR. `thorough`: also LocAteR's pull on the trace
    alone, and noise with the entropy of no LocAteR, since noise changes entropy as well. `first` is the part of
    training that is the "first tenth": more than that of a shorter one.
    """
    of_locater, of_none = Intervention(entropy_of="locater"), Intervention(entropy_of="none")
    held = {
        **{f"entropy-{level:g}": Intervention(entropy=level) for level in entropies},
        **{f"trace-{level:g}": Intervention(trace=level) for level in traces},
        **{f"scale-{level:g}": Intervention(scale=level) for level in scales},
    }
    levels = Design(
        (
            Condition("none"),
            Condition("locater", kappa_2),
            *(Condition(name, intervention=each) for name, each in held.items()),
        ),
        (
            Comparison("LocAteR's gain", "locater", "none"),
            *(Comparison(" held at ".join(name.split("-")), name, "none") for name in held),
        ),
    )
    if not controls:
        return levels
    alone = [f"locater-layer-{layer}" for layer in range(layers)] if layers > 1 else []
    noise = Intervention(noise_of="locater", entropy_of="none")
    more = Condition("trace-pulled", 0.0), Condition("noise-nones-entropy", intervention=noise)
    conditions = (
        *levels.conditions,
        Condition("locaters-entropy", intervention=of_locater),
        Condition("locater-nones-entropy", kappa_2, intervention=of_none),
        Condition("trace-flipped", kappa_2, target=-1.0),
        Condition("noise", intervention=Intervention(noise_of="locater")),
        Condition("noise-one-way", intervention=Intervention(noise_of="locater", noise_fixed=True)),
        Condition("locater-first-tenth", kappa_2, intervention=Intervention(until=first)),
        Condition("decay-times-10", decay=10.0),
        *(Condition(name, kappa_2, intervention=Intervention(layers=(layer,))) for layer, name in enumerate(alone)),
        *(more if thorough else ()),
    )
    asked = (
        Comparison("LocAteR's pull on the trace alone", "trace-pulled", "none"),
        Comparison("what its pull on the scale adds", "locater", "trace-pulled"),
        Comparison("noise with the entropy of no LocAteR", "noise-nones-entropy", "none"),
    )
    comparisons = (
        *levels.comparisons,
        Comparison("LocAteR's entropy by temperature alone", "locaters-entropy", "none"),
        Comparison("what LocAteR adds to its entropy", "locater", "locaters-entropy"),
        Comparison("LocAteR with the entropy of no LocAteR", "locater-nones-entropy", "none"),
        Comparison("what its entropy adds to LocAteR", "locater", "locater-nones-entropy"),
        Comparison("trace pulled to −1", "trace-flipped", "none"),
        Comparison("the sign of the trace", "locater", "trace-flipped"),
        Comparison("noise of LocAteR's size", "noise", "none"),
        Comparison("what LocAteR's direction adds to its size", "locater", "noise"),
        Comparison("a pull of LocAteR's size in one random direction", "noise-one-way", "none"),
        Comparison("LocAteR for the first tenth", "locater-first-tenth", "none"),
        Comparison("LocAteR after the first tenth", "locater", "locater-first-tenth"),
        Comparison("ten times the decay of all weights", "decay-times-10", "none"),
        *(Comparison(f"LocAteR on layer {layer} alone", name, "none") for layer, name in enumerate(alone)),
        *(asked if thorough else ()),
    )
    return Design(conditions, comparisons)
