"""Finding the attention modules of a model, live or on disk.

A family is a function that takes apart one attention module, given a `Site`: a place that has tensors by
name, a configuration and a layer number. The same function reads a live module and a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from locater.errors import LocaterError
from locater.models.attention import Attention, Projection

__all__ = ["Family", "Site", "attentions", "family", "known_checkpoints", "register"]


class Tensors(Protocol):
    """Tensors by their full dotted name."""

    def get(self, name: str) -> Tensor | None: ...


@dataclass(frozen=True)
class Site:
    """One attention module: where its tensors are, and what is known about it."""

    name: str  # dotted, "model.layers.3.self_attn"
    config: Mapping[str, Any]
    tensors: Tensors
    module: nn.Module | None = None  # where the model is live

    @property
    def layer(self) -> int:
        """The last number in the name; 0 where there is none."""
        numbers = re.findall(r"(?:^|\.)([0-9]{1,9})(?=\.|$)", self.name)
        return int(numbers[-1]) if numbers else 0

    def optional(self, name: str) -> Tensor | None:
        """A tensor of the module; "../norm.weight" is its parent's, "../../" its grandparent's."""
        base = self.name.split(".") if self.name else []
        while name.startswith("../"):
            name, base = name[3:], base[:-1]
        return self.tensors.get(".".join([*base, name]))

    def tensor(self, name: str) -> Tensor:
        found = self.optional(name)
        if found is None:
            raise LocaterError(f"{self.name} has no tensor {name}")
        return found

    def attention(
        self, query: Projection | None, key: Projection, *, scale: float, kind: str = "self", **parts: Any
    ) -> Attention:
        """What a family returns: the module here, made of these parts."""
        return Attention(self.name, parts.pop("layer", self.layer), kind, query, key, scale, **parts)

    def setting(self, *names: str, default: Any = ...) -> Any:
        """The first of these that the configuration has and that is not None."""
        for name in names:
            value = self.config.get(name)
            if value is not None:
                return value
        if default is not ...:
            return default
        raise LocaterError(f"the configuration of {self.name} has none of {', '.join(names)}")


Reader: TypeAlias = Callable[[Site], Attention]


@dataclass(frozen=True)
class Family:
    """How to recognise a kind of attention module, and how to take it apart."""

    read: Reader
    modules: tuple[str, ...]  # class names of live modules
    checkpoints: tuple[str, ...]  # model_type of config.json, or GGUF's architecture
    paths: tuple[str, ...]  # patterns of the module's dotted name in a checkpoint

    def owns(self, kind: type) -> bool:
        """A class of the library the family is about, not a namesake of the user's own."""
        ours = (self.read.__module__ or "").startswith("locater.")  # None in an interactive session
        return not ours or kind.__module__.split(".")[0] in ("torch", "transformers", "transformers_modules")


_FAMILIES: list[Family] = []


def register(
    *modules: str, checkpoints: tuple[str, ...] = (), paths: tuple[str, ...] = ()
) -> Callable[[Reader], Reader]:
    """Registers a function that takes apart attention modules of these classes; the latest registration wins."""

    def add(read: Reader) -> Reader:
        _FAMILIES.insert(0, Family(read, modules, checkpoints, paths))
        return read

    return add


def family(*, module: nn.Module | None = None, checkpoint: str | None = None) -> Family | None:
    """The family of a live module, by the names of its class and its bases, or of a checkpoint, by its model_type."""
    from locater.models import families  # noqa: F401  registers the built-in ones

    if module is not None:
        for base in type(module).__mro__:
            for candidate in _FAMILIES:
                if base.__name__ in candidate.modules and candidate.owns(base):
                    return candidate
        return None
    return next((candidate for candidate in _FAMILIES if checkpoint in candidate.checkpoints), None)


def known_checkpoints() -> list[str]:
    """Every model_type that some family reads."""
    from locater.models import families  # noqa: F401  registers the built-in ones

    return sorted({name for candidate in _FAMILIES for name in candidate.checkpoints})


class _LiveTensors:
    def __init__(self, model: nn.Module) -> None:
        # parameters under every name they have: tied ones have several
        self._tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name)


def attentions(model: nn.Module) -> list[Attention]:
    """Every attention module of a live model, in the order of its modules."""
    if not isinstance(model, nn.Module):
        raise LocaterError(f"expected a torch module, got {type(model).__name__}")
    found = list(_read_live(model))
    if not found:
        looked_at = sorted({type(module).__name__ for module in model.modules()})
        raise LocaterError(
            f"no attention module that locater knows in {type(model).__name__}; it looked at "
            f"{', '.join(looked_at[:20])}{' …' if len(looked_at) > 20 else ''}: register the family "
            "with locater.models.register"
        )
    return found


def _read_live(model: nn.Module) -> Iterator[Attention]:
    from locater.models.families import generic

    tensors = _LiveTensors(model)
    configs: dict[str, Mapping[str, Any]] = {}
    taken: list[str] = []
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is not None:
            configs[name] = _as_mapping(config)
        if any(name.startswith(f"{prefix}.") for prefix in taken if prefix):
            continue  # inside a module that has been read
        known = family(module=module)
        read = known.read if known is not None else generic.read if generic.looks_like_attention(module) else None
        if read is None:
            continue
        taken.append(name)
        yield read(Site(name, _nearest(configs, name), tensors, module))


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        mapping: Mapping[str, Any] = config.to_dict()
        return mapping
    return vars(config) if hasattr(config, "__dict__") else {}


def _nearest(configs: Mapping[str, Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The configuration of the module or of its closest ancestor that has one."""
    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        config = configs.get(".".join(parts[:depth]))
        if config is not None:
            return config
    return {}
