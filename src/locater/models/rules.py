"""How one attention module is read, found in a twin and valid for a model of any size of its class.

A rule names parameters and settings; numbers of heads are counted in the model that is read. Heads are as wide in the
model as in its twin.

Legend: G key heads, R query heads for each, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from locater.models.attention import Attention
from locater.models.layers import Heads, NormRule, Side, Unread, setting
from locater.models.positions import (
    Alibi,
    GridKeys,
    PositionBias,
    PositionKeys,
    QueryGain,
    RelativeBias,
    RelativeKeys,
    SineKeys,
    TableBias,
    TableKeys,
)
from locater.models.registry import Site, Tensors
from locater.models.rope import Rope
from locater.names import plain_name

__all__ = ["BiasRule", "Factor", "GainRule", "GridRule", "RopeRule", "Rule", "SineRule", "TableRule"]


@dataclass(frozen=True)
class RopeRule:
    interleaved: bool
    pairs: int
    source: str | None = None  # the buffer that has the frequencies
    frequencies: Tensor | None = None  # in the twin
    on_a_line: bool = True

    def read(self, site: Site) -> Rope:
        owner, _, name = (self.source or "").rpartition(".")
        module: Any = site.part(owner) if self.source else None
        if module is not None and getattr(module, name, None) is None:
            raise Unread(f"{site.name}: {owner} is a {type(module).__name__}, which has no {name}")
        if module is not None and getattr(module, name).is_meta:  # of a skeleton: buffers are not stored
            module = type(module)(module.config) if hasattr(module, "config") else None
        if module is None:
            known = torch.zeros(self.pairs) if self.frequencies is None else self.frequencies
            return Rope(known.double(), self.interleaved, on_a_line=self.on_a_line)
        prefix = name.removesuffix("inv_freq")
        gain = getattr(module, f"{prefix}attention_scaling", 1.0)
        rest = getattr(module, f"{prefix}original_inv_freq", None)
        rest = getattr(module, name) if rest is None else rest
        frequencies = rest[: self.pairs].double().cpu()
        return Rope(frequencies, self.interleaved, gain, _stretched(module, prefix.rstrip("_") or None, frequencies))


def _stretched(module: Any, layer_type: str | None, rest: Tensor) -> Callable[[int], Tensor] | None:
    """Frequencies by the length of a text, where they change with it."""
    kind = getattr(module, "rope_type", None)
    kind = kind.get(layer_type) if isinstance(kind, dict) else kind
    if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = module.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    original = parameters.get("original_max_position_embeddings") or module.original_max_seq_len
    limit = original if kind == "longrope" else module.original_max_seq_len
    more = {} if layer_type is None else {"layer_type": layer_type}

    def at(length: int) -> Tensor:
        if length <= limit:
            return rest
        size = original + 1 if kind == "longrope" else length
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=size, **more)
        return frequencies[: len(rest)].double()

    return at


@dataclass(frozen=True)
class Factor:
    """K^width_power · setting^power."""

    width_power: float
    setting: str | None = None
    power: float = 1.0
    by_layer: bool = False  # divided by the layer's number, from 1

    def value(self, site: Site, width: int) -> float | None:
        found = width**self.width_power / (site.layer + 1 if self.by_layer else 1)
        if self.setting is None:
            return float(found)
        given = setting(site, self.setting)
        if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
            return None
        return float(found * given**self.power)


@dataclass(frozen=True)
class BiasRule:
    """Of position: ALiBi's slopes, T5's buckets, or a table of places in a window."""

    kind: str
    table: str = ""
    scale: float = 1.0
    bidirectional: bool = False
    distance: str | int = ""  # where buckets end, or the setting that says it
    index: Tensor | None = None
    rounded: bool = False

    def read(self, site: Site, heads: int) -> PositionBias:
        if self.kind == "alibi":
            return Alibi.of(heads, rounded=self.rounded)
        table = site.named(self.table)
        if self.kind == "buckets":
            distance = setting(site, self.distance) if isinstance(self.distance, str) else self.distance
            return RelativeBias(table, self.bidirectional, int(distance))
        assert self.index is not None
        if len(table) != int(self.index.max()) + 1:
            raise Unread(
                f"{site.name}: {self.table} has {len(table)} rows, and that of its twin {int(self.index.max()) + 1}"
            )
        return TableBias(table, self.index)


@dataclass(frozen=True)
class GainRule:
    """Queries that grow with their position: the settings that say how."""

    strength: str
    length: str
    shift: int

    def read(self, site: Site) -> QueryGain:
        strength, length = setting(site, self.strength), setting(site, self.length)
        if not all(isinstance(x, int | float) for x in (strength, length)) or length <= 0:
            raise Unread(f"{site.name}: {self.strength} and {self.length} are {strength!r:.40} and {length!r:.40}")
        return QueryGain(float(strength), float(length), self.shift)


@dataclass(frozen=True)
class SineRule:
    """Keys for offsets that a layer makes of sines, and the names of the two biases of queries."""

    keys: Side
    content: str | None
    position: str | None
    interleaved: bool
    sign: int
    scaled: ClassVar[bool] = RelativeKeys.scaled

    def read(self, site: Site, heads: Heads) -> PositionKeys:
        shape = heads.groups, heads.shared, heads.width
        content, position = (None if n is None else site.named(n).view(shape) for n in (self.content, self.position))
        keys = self.keys.projection(site, heads, heads.shared)
        return RelativeKeys(SineKeys(keys, self.interleaved, self.sign), content, position)


@dataclass(frozen=True)
class TableRule:
    """Keys for offsets in a table: its name, and the setting that says where offset 0 is; in the middle without."""

    table: str
    left: str | None
    sign: int
    scaled: ClassVar[bool] = RelativeKeys.scaled

    def read(self, site: Site, heads: Heads) -> PositionKeys:
        del heads  # they share them
        table = site.named(self.table)
        left = len(table) // 2 if self.left is None else int(setting(site, self.left))
        return RelativeKeys(TableKeys(table, left, self.sign))


@dataclass(frozen=True)
class GridRule:
    """Keys for rows and columns of an image: the names of their tables."""

    rows: str
    columns: str
    scaled: ClassVar[bool] = GridKeys.scaled

    def read(self, site: Site, heads: Heads) -> PositionKeys:
        del heads  # they share them
        return GridKeys(site.named(self.rows), site.named(self.columns))


class _Once:
    """Loads every tensor once: a checkpoint's come from a disk or a server."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._known = tensors, dict[str, Tensor | None]()

    def get(self, name: str) -> Tensor | None:
        if name not in self._known:
            self._known[name] = self._tensors.get(name)
        return self._known[name]


@dataclass(frozen=True)
class Rule:
    module: str
    query: Side
    key: Side
    heads: Heads  # of the twin
    counts: tuple[str | None, str | None]  # settings that say how many query and key heads there are
    factor: Factor
    rope: RopeRule | None = None
    softcap: str | None = None
    bias: BiasRule | None = None
    query_gain: GainRule | None = None
    position_keys: SineRule | TableRule | GridRule | None = None
    input_norm: NormRule | None = None
    kind: str = "self"
    number: int = -1  # which of the numbers in the module's name is its layer's
    layers: tuple[int, ...] = ()  # that use the module, where several do
    parts: tuple[tuple[str, type], ...] = ()  # the modules inside the twin's
    inner: str = ""  # a layer inside the module that makes what W_Q or W_K acts on

    def read(self, site: Site) -> Attention:
        site = replace(site, tensors=_Once(site.tensors))
        heads = self._heads(site)
        groups, shared, width = heads
        query_norm, key_norm = (
            None if side.norm is None else side.norm.read(site, (groups, each, width))
            for side, each in ((self.query, shared), (self.key, 1))
        )
        factor = self.factor.value(site, width)
        if factor is None:
            raise Unread(f"{site.name}: {self.factor.setting} is no positive number")
        return site.attention(
            self.query.projection(site, heads, shared),
            self.key.projection(site, heads, 1),
            scale=factor,
            kind=self.kind,
            rope=None if self.rope is None else self.rope.read(site),
            query_norm=query_norm,
            key_norm=key_norm,
            softcap=None if self.softcap is None or (cap := setting(site, self.softcap)) is None else float(cap),
            position_bias=None if self.bias is None else self.bias.read(site, groups * shared),
            bias_scale=1.0 if self.bias is None else self.bias.scale,
            query_gain=None if self.query_gain is None else self.query_gain.read(site),
            position_keys=None if self.position_keys is None else self.position_keys.read(site, heads),
            input_norm=None if self.input_norm is None else self.input_norm.read(site),
            layer=min(self.layers_in(site)),
            layers=self.layers,
            inner=self.inner,
        )

    def check(self, site: Site) -> None:
        """A part that somebody has replaced is not the one that was proven; wrapped and adapted ones are."""
        assert site.module is not None
        found = {plain_name(name): part for name, part in site.module.named_modules()}
        for name, kind in self.parts:
            part: Any = getattr(found.get(name), "base_layer", found.get(name))
            patched = "forward" in getattr(part, "__dict__", {}) and not hasattr(part, "_hf_hook")  # accelerate's
            if patched or kind not in type(part).__mro__ or type(part).forward is not kind.forward:  # type: ignore[attr-defined]
                where = f"{site.name}.{name}".rstrip(".")
                own = f"a {type(part).__name__}" if part is not None else "nothing"
                raise Unread(f"{where} is {own} with a forward of its own, not the {kind.__name__} of its class")

    def layers_in(self, site: Site) -> set[int]:
        """The numbers of the layers that use it."""
        return set(self.layers) or {site.numbers[self.number] if site.numbers else 0}

    def _heads(self, site: Site) -> Heads:
        """By the layers' sizes, where those follow from the number of heads; else by the names of settings."""
        groups, shared, width = self.heads
        if all(side.outputs(site) == side.blocks * width for side in (self.query, self.key)):
            return self.heads  # as large as what it was found in
        total, keys = (None if name is None else setting(site, name) for name in self.counts)

        def counted(side: Side, mine: int) -> int | None:
            outputs = side.outputs(site)
            if outputs % width:
                raise Unread(f"{site.name}: {side.weight} has {outputs} outputs, which are no heads of {width}")
            follows = side.blocks == mine or side.layout.kind == "by head" or shared == 1
            return outputs // width * mine // side.blocks if follows else None

        found = counted(self.query, groups * shared)
        if found is not None and isinstance(total, int) and found != total:
            raise Unread(f"{site.name} has {total} heads, and {found} as wide as those of its twin")
        total = found or total
        keys = counted(self.key, groups) or keys or total
        if not isinstance(total, int) or not isinstance(keys, int) or keys < 1 or total % keys:
            raise Unread(f"{site.name}: {total} query heads cannot share {keys} key heads")
        return Heads(keys, total // keys, width)
