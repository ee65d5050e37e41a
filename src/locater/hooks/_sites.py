"""Finding the attention modules of a model, and the way to intercept the calls of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from types import FunctionType
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from locater.errors import LocaterError
from locater.hooks._compiling import HOW, compiled_parts
from locater.models.families import generic
from locater.models.registry import family
from locater.names import kind_of, layer_positions, numbers_in, plain_name

TABLE = "ALL_ATTENTION_FUNCTIONS"
FUNCTIONS = {"softmax", "Softmax", "scaled_dot_product_attention"}


RecordLayer = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""Given a layer's number, what enters its attention (E, B, T, D), queries and keys (E, B, H, T, ·), logit scale."""


class Named(Protocol):
    @property
    def name(self) -> str: ...


@runtime_checkable
class Stacked(Protocol):
    """Models of one shape that run as one program and report their causal attention themselves, as the lab's do."""

    @property
    def members(self) -> Sequence[Named]: ...

    @property
    def attention_modules(self) -> Sequence[str]:
        """A name a layer."""

    def watch(self, begin: Callable[[Tensor], RecordLayer | None]) -> Callable[[], None]:
        """Calls `begin` as each forward begins, and what that gives with every layer; returns what ends it.

        `begin` is given where the tokens (E, B, T) are no padding. Meanwhile no update may be replayed from a graph.
        """


@dataclass(frozen=True)
class AttentionSite:
    """An attention module of the model, and how its calls can be intercepted."""

    name: str
    module: Any  # an nn.Module; of a stack, the stack
    layer: int
    kind: str
    # intercepted in Hugging Face's table, in torch's functions, in nn's own module; or reported by a stack
    way: Literal["interface", "torch", "multihead", "stack"]
    encoder_layer: nn.TransformerEncoderLayer | None = None  # around a "multihead", which it may bypass
    is_sure: bool = True  # False: it may have no softmax over keys, as linear and deformable attention have none
    members: tuple[str, ...] = ()  # of a stack of several

    @property
    def cross(self) -> bool:
        return self.kind == "cross"

    def functions(self) -> Iterator[tuple[str, Any, str, Callable[..., Any]]]:
        """Those that compute its attention and can be replaced: implementation, owner, name in it, function."""
        if self.way == "multihead":
            kind = next(base for base in type(self.module).__mro__ if "forward" in vars(base))
            yield "multihead", kind, "forward", vars(kind)["forward"]
        if self.way != "interface":
            return
        function = _forward(self.module)
        assert function is not None
        scope = function.__globals__
        for name in function.__code__.co_names:
            if name.endswith("eager_attention_forward") and name in scope:
                yield "eager", scope, name, scope[name]
        table = scope[TABLE]
        for name in list(table):
            if not name.startswith("paged|"):
                # what is put into an instance shadows the table all instances share
                yield name, table._local_mapping, name, table[name]


def attention_sites(model: nn.Module | Stacked, layers: Sequence[int] | None = None) -> list[AttentionSite]:
    """The attention modules of these layers (all), in the model's order; LocaterError if one cannot be observed."""
    if isinstance(model, Stacked):
        names = tuple(member.name for member in model.members)
        stacked = [
            AttentionSite(name, model, layer, "self", "stack", members=names if len(names) > 1 else ())
            for layer, name in enumerate(model.attention_modules)
        ]
        return _of_layers(stacked, layers)
    if not isinstance(model, nn.Module):
        raise LocaterError(f"expected a torch module to observe, got {type(model).__name__}")
    ways: dict[str, tuple[nn.Module, Literal["interface", "torch", "multihead"]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            ways[name] = module, "multihead"
        elif _uses_interface(module):
            by_hand = getattr(module, "reorder_and_upcast_attn", False) and implementation_of(module) == "eager"
            ways[name] = module, "torch" if by_hand else "interface"
        elif _looks_like_attention(module):
            ways[name] = module, "torch"
    # of modules within each other, the innermost computes
    inner = {name: way for name, way in ways.items() if not any(other.startswith(f"{name}.") for other in ways if name)}
    inner = {name: way for name, way in inner.items() if name or len(inner) == 1}
    if not inner:
        raise LocaterError(_nothing_found(model))
    around = {id(layer.self_attn): layer for layer in model.modules() if isinstance(layer, nn.TransformerEncoderLayer)}
    compiled = compiled_parts(model)
    positions = layer_positions(plain_name(name) for name in inner)
    halves = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    found = []
    for name, (module, way) in inner.items():
        name = plain_name(name)
        layer, kind = (numbers_in(name) or [0])[positions[name]], kind_of(name, halves)
        is_sure = way != "torch" or _surely_attention(module)
        found.append(AttentionSite(name, module, layer, kind, way, around.get(id(module)), is_sure))
    chosen = _of_layers(found, layers)
    for site in chosen:
        _check(site, is_compiled=id(site.module) in compiled)
    if not any(site.way != "torch" or _computes_attention(site.module) for site in chosen):
        raise LocaterError(
            f"{_described(chosen[0])} cannot be observed: its code calls neither softmax nor "
            "scaled_dot_product_attention, which are what locater intercepts; with one of those inside it works"
        )
    return chosen


def _of_layers(found: list[AttentionSite], layers: Sequence[int] | None) -> list[AttentionSite]:
    if layers is None:
        return found
    known = {site.layer for site in found}
    try:
        chosen = {index(layer) for layer in layers}
    except TypeError:
        raise LocaterError(f"layers must be a list of some of {sorted(known)}, got {layers!r:.80}") from None
    if not chosen or not chosen <= known:
        raise LocaterError(f"layers must be some of {sorted(known)}, got {sorted(chosen)}")
    return [site for site in found if site.layer in chosen]


def _forward(module: nn.Module) -> FunctionType | None:
    function = inspect.unwrap(type(module).forward)
    return function if isinstance(function, FunctionType) else None


def _uses_interface(module: nn.Module) -> bool:
    function = _forward(module)
    return function is not None and TABLE in function.__code__.co_names and TABLE in function.__globals__


def interface_site(name: str, module: nn.Module) -> AttentionSite | None:
    """The site of a module that looks its function up in the table, whether or not it can be observed."""
    return AttentionSite(name, module, 0, "self", "interface") if _uses_interface(module) else None


def reads_attribute(module: nn.Module, attribute: str) -> bool:
    """Whether the module's forward reads one of its attributes."""
    function = _forward(module)
    return function is not None and attribute in function.__code__.co_names


def _looks_like_attention(module: nn.Module) -> bool:
    if _has_queries_and_keys(module):
        return True
    return bool("Attention" in type(module).__name__ and _called(module) & FUNCTIONS) or _calls_sdpa(module)


def _has_queries_and_keys(module: nn.Module) -> bool:
    return family(module=module) is not None or generic.looks_like_attention(module)


def _surely_attention(module: nn.Module) -> bool:
    """Whether there must be a softmax over keys; a name alone may be that of another kind of attention."""
    return (_has_queries_and_keys(module) and _computes_attention(module)) or _calls_sdpa(module)


def _computes_attention(module: nn.Module) -> bool:
    parts = list(module.modules())
    return any(isinstance(part, nn.Softmax) or _called(part) & FUNCTIONS for part in parts)


def _calls_sdpa(module: nn.Module) -> bool:
    function = _forward(module)
    return function is not None and "scaled_dot_product_attention" in function.__code__.co_names


def _called(module: nn.Module) -> set[str]:
    """Every name in the code of the module's class and its bases, and in that of the functions they call by name."""
    names: set[str] = set()
    for base in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
        for one in vars(base).values():
            function = inspect.unwrap(one) if isinstance(one, FunctionType) else None
            if isinstance(function, FunctionType):
                own = function.__code__.co_names
                called = (function.__globals__.get(name) for name in own)
                names.update(own, *(each.__code__.co_names for each in called if isinstance(each, FunctionType)))
    return names


def implementation_of(module: nn.Module) -> str:
    """The name of the attention function that a Hugging Face module is to use."""
    return str(getattr(getattr(module, "config", None), "_attn_implementation", None) or "eager")


def _check(site: AttentionSite, *, is_compiled: bool) -> None:
    why_not = {"interface": _why_not_interface, "torch": _why_not_torch, "multihead": _why_not_multihead}[site.way]
    reason = why_not(site.module)
    if reason is None and is_compiled and site.way != "interface":
        reason = f"torch.compile has compiled it, and such code runs no hooks; {HOW}"
    if reason is not None:
        raise LocaterError(f"{_described(site)} cannot be observed: {reason}")


def _described(site: AttentionSite) -> str:
    kind = type(site.module).__name__
    return f"{site.name or kind} ({kind})"


def _why_not_interface(module: nn.Module) -> str | None:
    used = implementation_of(module)
    if used in ("eager", "flex_attention") or "sdpa" in used or ("flash" in used and not used.startswith("paged|")):
        return None
    return f'how {used!r} reads its mask is not known; model.set_attn_implementation("sdpa"), or "eager", would do'


def _why_not_multihead(module: nn.Module) -> str | None:
    assert isinstance(module, nn.MultiheadAttention)
    if module.bias_k is not None:
        return "add_bias_kv adds a key that no token has; build it without"
    return None


def _why_not_torch(module: nn.Module) -> str | None:
    function = _forward(module)
    if function is not None and "_flash_attention_forward" in function.__code__.co_names:
        return 'no hook reaches its flash attention; model.set_attn_implementation("sdpa"), or "eager", would do'
    return None


def _nothing_found(model: nn.Module) -> str:
    looked_at = sorted({type(module).__name__ for module in model.modules()})
    return (
        f"no attention to observe in {type(model).__name__}; locater looked at {', '.join(looked_at[:20])}"
        f"{' …' if len(looked_at) > 20 else ''}: it finds modules that use transformers' attention interface, call "
        "scaled_dot_product_attention, are nn.MultiheadAttention, or are registered with locater.models.register"
    )
