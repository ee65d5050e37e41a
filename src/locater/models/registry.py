"""Finding the attention modules of a model, live or on disk.

A family is a function that takes apart one attention module, given a `Site`: a place that has tensors by
name, a configuration and a layer number. The same function reads a live module and a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from locater.errors import LocaterError, reason
from locater.models.attention import Attention
from locater.models.parts import Projection
from locater.models.unread import warn_unread
from locater.names import numbers_in, plain_name

__all__ = [
    "TEN_LINES",
    "Family",
    "LiveTensors",
    "Reading",
    "Site",
    "attentions",
    "family",
    "inside",
    "is_pretrained",
    "nearest_config",
    "reading",
    "register",
]


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
    model: nn.Module | None = None  # the model around it, whose parts have names
    prefix: str = ""  # of that model's name

    @property
    def numbers(self) -> list[int]:
        """Those in the name."""
        return numbers_in(self.name)

    @property
    def layer(self) -> int:
        """The last number in the name; 0 where there is none."""
        return (self.numbers or [0])[-1]

    def optional(self, name: str) -> Tensor | None:
        """A tensor of the module; "../norm.weight" is its parent's, "../../" its grandparent's."""
        base = self.name.split(".") if self.name else []
        while name.startswith("../"):
            name, base = name[3:], base[:-1]
        return self.tensors.get(".".join([*base, name]))

    def tensor(self, name: str) -> Tensor:
        found = self.optional(name)
        if found is None:
            raise self._lacks(f"{self.name}.{name}".removeprefix("."), name)
        return found

    def named(self, name: str) -> Tensor:
        """A tensor by its name in the model around."""
        found = self.tensors.get(self.prefix + name)
        if found is None:
            raise self._lacks(self.prefix + name, self.prefix + name)
        return found

    def _lacks(self, name: str, told: str) -> LocaterError:
        module, _, attribute = name.rpartition(".")
        computed = (f"{module}.parametrizations.{attribute}.original{part}" for part in ("", "0"))
        if any(self.tensors.get(one) is not None for one in computed):
            return LocaterError(
                f"{self.name}: {told} is computed by a parametrisation, as σReparam's; remove that first"
            )
        return LocaterError(f"{self.name} has no tensor {told}")

    def part(self, name: str) -> nn.Module | None:
        """A module by its name in the model around."""
        if self.model is None:
            return None
        try:
            return self.model.get_submodule(name)
        except AttributeError:  # layers may be wrapped one by one
            return next((part for own, part in self.model.named_modules() if plain_name(own) == name), None)

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

    @property
    def built_in(self) -> bool:
        return (self.read.__module__ or "").startswith("locater.")  # None in an interactive session

    def owns(self, kind: type) -> bool:
        """A class of the library the family is about, not a namesake of the user's own."""
        return not self.built_in or kind.__module__.split(".")[0] in ("torch", "transformers", "transformers_modules")


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


class LiveTensors:
    """Of a live model, under every name they have: tied parameters have several."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._tensors |= {plain_name(name): tensor for name, tensor in self._tensors.items()}

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name)


@dataclass(frozen=True)
class Reading:
    """The attention modules of a model in its order, each read when it is asked for; and those that are not read."""

    sites: list[tuple[Reader, Site]]
    unread: dict[str, str]  # module to reason

    def __iter__(self) -> Iterator[Attention]:
        for read, site in self.sites:
            try:
                yield read(site)
            except LocaterError:
                raise
            except Exception as error:  # readers take the configuration at its word
                what = f"the configuration does not describe {site.name}"
                raise LocaterError(f"{what}: {type(error).__name__} {reason(error)}") from error


def attentions(model: nn.Module) -> list[Attention]:
    """Every attention module of a live model that is read, in the order of its modules; a warning names the others."""
    found = reading(model)
    warn_unread(found.unread, stacklevel=2)
    return list(found)


def reading(model: nn.Module, tensors: Tensors | None = None, *, any_at_all: bool = True) -> Reading:
    """How the attention modules of a model are read, from its parameters or from other tensors of the same names.

    `any_at_all`: a model of which none is read is an error.
    """
    if not isinstance(model, nn.Module):
        raise LocaterError(f"expected a torch module, got {type(model).__name__}")
    from locater.models import proof

    stored = LiveTensors(model) if tensors is None else tensors
    sites: list[tuple[Reader, Site]] = []
    unread: dict[str, str] = {}
    roots: dict[str, nn.Module] = {}  # Hugging Face models, the outermost, by their name
    proofs: dict[str, proof.Proven] = {}  # of them
    own: proof.Proven | None = None  # of the rest
    taken: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{prefix}.") for prefix in taken if prefix):
            continue  # inside a module that has been read
        if is_pretrained(module) and not any(inside(name, other) for other in roots):
            roots[name], proofs[name] = module, proof.proven(module)
        root = next((other for other in roots if inside(name, other)), None)
        prefix = f"{root}." if root else ""
        known = family(module=module)
        found: Reader | str | None = None
        if known is not None:
            found = known.read
        elif root is not None:
            found = proofs[root].of(plain_name(name.removeprefix(prefix)))
        else:
            own = own or proof.proven_copy(model)
            found = own.of(name)
        if found is not None and not isinstance(found, str):
            around = model if root is None else roots[root]
            site = Site(name, nearest_config(model, name), stored, module, around, prefix)
            taken.append(name)
            if (why := proof.replaced(found, site)) is None:
                sites.append((found, site))
            found = why
        if isinstance(found, str):
            unread[name] = found
    if not sites and any_at_all:
        raise LocaterError(_nothing_read(model, unread))
    read_inside = {name for name in unread if any(inside(site.name, name) for _, site in sites)}
    return Reading(sites, {name: why for name, why in unread.items() if name not in read_inside})


def inside(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")


def _nothing_read(model: nn.Module, unread: Mapping[str, str]) -> str:
    if unread:
        name, why = next(iter(unread.items()))
        return f"{name or type(model).__name__} is not read: {why}; {TEN_LINES}"
    looked_at = sorted({type(module).__name__ for module in model.modules()})
    return (
        f"no attention module that locater knows in {type(model).__name__}; it looked at "
        f"{', '.join(looked_at[:20])}{' …' if len(looked_at) > 20 else ''}; {TEN_LINES}"
    )


TEN_LINES = "register the family with locater.models.register (docs/howto/new-family.md)"


def is_pretrained(module: nn.Module) -> bool:
    """Whether it is a model of Hugging Face's, which its class builds from a configuration."""
    return hasattr(type(module), "main_input_name") and hasattr(getattr(module, "config", None), "to_json_string")


def as_mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        mapping: Mapping[str, Any] = config.to_dict()
        return mapping
    return vars(config) if hasattr(config, "__dict__") else {}


def nearest_config(model: nn.Module, name: str) -> Mapping[str, Any]:
    """The configuration of the module or of its closest ancestor that has one."""
    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        config = getattr(model.get_submodule(".".join(parts[:depth])), "config", None)
        if config is not None:
            return as_mapping(config)
    return {}
