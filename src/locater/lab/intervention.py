"""What is held or changed in the training of one member, to ask what causes an effect; engine/interventions does it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from locater.errors import LocaterError

if TYPE_CHECKING:
    from locater.lab.config import Member, ModelConfig

__all__ = ["Intervention", "check_interventions", "largest_entropy"]

_HELD = ("entropy", "entropy_of", "trace", "scale")


@dataclass(frozen=True)
class Intervention:
    """One quantity held, in every head of some layers; or where and when LocAteR acts; or noise in its place."""

    entropy: float | None = None  # nats: mean over the batch's queries, by a temperature on the head's logits
    entropy_of: str | None = None  # the same, at the entropy which that member's head has on the same batch
    trace: float | None = None  # tr W_QK, by the smallest change of W_Q and W_K after every update
    scale: float | None = None  # tr(W_QKᵀW_QK), by one factor on W_Q and W_K after every update
    noise_of: str | None = None  # adds to the gradient noise as large, head by head, as that member's LocAteR
    noise_fixed: bool = False  # in one direction for all of training, and not in a new one at every update
    layers: tuple[int, ...] | None = None  # in which something is held and LocAteR acts; None is all
    until: float = 1.0  # the first part of training, in which LocAteR acts

    def __post_init__(self) -> None:
        for name in ("entropy", "trace", "scale"):
            _check_number(name, getattr(self, name), above_0=name != "trace")
        for name in ("entropy_of", "noise_of"):
            if not isinstance(getattr(self, name), str | None) or getattr(self, name) == "":
                raise LocaterError(f"{name} takes the name of a member, got {getattr(self, name)!r:.80}")
        if not isinstance(self.noise_fixed, bool):
            raise LocaterError(f"noise_fixed must be true or false, got {self.noise_fixed!r:.80}")
        _check_number("until", self.until, above_0=True)
        if self.until > 1:
            raise LocaterError(f"until is a part of training, above 0 and at most 1, got {self.until!r:.80}")
        self._check_layers()
        held = [name for name in _HELD if getattr(self, name) is not None]
        if len(held) > 1:
            raise LocaterError(f"an intervention holds one quantity, the others are free; got {' and '.join(held)}")
        if self.noise_fixed and self.noise_of is None:
            raise LocaterError("noise_fixed says how noise is drawn, but noise_of names no member to draw it for")
        if self.noise_of is not None and (
            held not in ([], ["entropy_of"]) or self.layers is not None or self.until < 1
        ):
            raise LocaterError(
                "noise_of takes layers and times from the member it names, and goes with entropy_of alone: leave "
                "everything else out"
            )
        if not self.to_json():
            raise LocaterError("an intervention that holds and changes nothing is none: leave it out")

    def _check_layers(self) -> None:
        if self.layers is None:
            return
        if not isinstance(self.layers, list | tuple) or not self.layers:
            raise LocaterError(f"layers must be a list of layers' numbers, got {self.layers!r:.80}")
        object.__setattr__(self, "layers", tuple(self.layers))  # JSON has lists
        wrong = [layer for layer in self.layers if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0]
        if wrong or len(set(self.layers)) < len(self.layers):
            raise LocaterError(f"layers must be different whole numbers from 0 up, got {list(self.layers)!r:.80}")

    @property
    def leaders(self) -> list[str]:
        """The members whose entropy or pull this one needs at every update."""
        return [name for name in (self.entropy_of, self.noise_of) if name is not None]

    @property
    def holds_entropy(self) -> bool:
        return self.entropy is not None or self.entropy_of is not None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value != getattr(Intervention, name)}

    def check_strengths(self, scale_strength: float, mean_strength: float) -> None:
        """Whether it contradicts the member's strengths of LocAteR."""
        pulled = scale_strength or mean_strength
        if self.noise_of is not None and pulled:
            raise LocaterError("noise takes LocAteR's place: a member with noise_of has no strengths of its own")
        if self.until < 1 and not pulled:
            raise LocaterError(f"until {self.until:g} ends LocAteR, but the member has no strengths")
        if self.layers is not None and not (pulled or any(getattr(self, name) is not None for name in _HELD)):
            raise LocaterError("layers says where LocAteR acts or something is held, but the member has neither")
        for held, strength in (("trace", mean_strength), ("scale", scale_strength)):
            if (level := getattr(self, held)) is not None and strength:
                raise LocaterError(f"the {held} is held at {level:g} and pulled by LocAteR: choose one of them")


def _check_number(name: str, value: Any, *, above_0: bool) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (above_0 and value <= 0):
        kind = "a finite number above 0" if above_0 else "a finite number"
        raise LocaterError(f"{name} must be {kind}, got {value!r:.80}")


def largest_entropy(tokens: int) -> float:
    """ln(T!)/T: the mean over the queries of a causal block if each looks at all its keys alike."""
    return math.lgamma(tokens + 1) / tokens


def check_interventions(model: ModelConfig, members: Sequence[Member]) -> None:
    """That members which train together can have their interventions, in this model and beside each other."""
    by_name = {member.name: member for member in members}
    for member in members:
        own = member.intervention
        if own is None:
            continue
        if model.method != "none" or model.joint_qk:
            what = "trains W_QK itself" if model.joint_qk else f"has the method {model.method}"
            raise LocaterError(f"{member.name} has an intervention, and its model {what}: leave one of them out")
        missing = [layer for layer in own.layers or () if layer >= model.layers]
        if missing:
            raise LocaterError(f"{member.name} acts on layer {missing[0]}, but layers are 0 to {model.layers - 1}")
        most = largest_entropy(model.tokens)
        if own.entropy is not None and own.entropy >= most:
            raise LocaterError(
                f"{member.name} holds an entropy of {own.entropy:g} nats, but the mean over the queries of "
                f"{model.tokens} tokens lies between 0 and {most:.4g}"
            )
        for leader in own.leaders:
            _check_leader(member, leader, by_name)


def _check_leader(member: Member, name: str, by_name: dict[str, Member]) -> None:
    if name not in by_name:
        raise LocaterError(f"{member.name} follows {name}, which does not train beside it: both must be in one group")
    leader = by_name[name]
    if leader.seed != member.seed:
        raise LocaterError(
            f"{member.name} has seed {member.seed} and follows {name} with seed {leader.seed}: "
            "their batches differ, so give both the same seed"
        )
    of_leader, own = leader.intervention, member.intervention
    if leader is member or (of_leader is not None and of_leader.leaders):
        raise LocaterError(f"{member.name} follows {name}, which follows another member itself")
    if own is not None and own.noise_of == name and not (leader.scale_strength or leader.mean_strength):
        raise LocaterError(f"{member.name} has noise as large as the LocAteR of {name}, which has none")
    if own is not None and own.entropy_of == name and of_leader is not None and of_leader.holds_entropy:
        raise LocaterError(f"{member.name} follows the entropy of {name}, which is held: hold it at that level itself")
