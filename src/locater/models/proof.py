"""Proof by logits: what is rebuilt from the parts of a model's attention against what the model really compares.

A class that no hand-written family vouches for is read by the rules of its twin (`general`), once for a class, a
configuration, an attention backend and the forwards of its parts. `proof_table` shows the proof of any model.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from locater.errors import LocaterError, reason
from locater.models import copies
from locater.models import twin as twins
from locater.models.attention import Attention
from locater.models.families import generic, mla
from locater.models.flow import Compared, compared
from locater.models.general import explain
from locater.models.layers import Unread
from locater.models.logits import Logits
from locater.models.registry import LiveTensors, Reader, Site, family, inside, is_pretrained, nearest_config
from locater.models.rules import Rule
from locater.models.unread import NO_SOFTMAX
from locater.names import layer_positions, numbers_in

__all__ = [
    "Proven", "by_module", "may_be_attention", "proven", "proven_copy", "rebuilt", "replaced", "run_twin", "twin",
]  # fmt: skip

_LARGEST = 600_000_000  # parameters of a twin
_ATTENTION = re.compile("attention|attn", re.IGNORECASE)


@dataclass(frozen=True)
class Proven:
    """How the attention modules of a model are read, by name; why others are not."""

    rules: dict[str, Reader]
    unread: dict[str, str]

    def of(self, name: str) -> Reader | str | None:
        """How a module is read, or why it is not; None for a module around or inside one, or without attention."""
        return self.rules.get(name) or self.unread.get(name)


def replaced(read: Reader, site: Site) -> str | None:
    """What of the module is not as it was proven, where something is not."""
    rule = getattr(read, "__self__", None)
    try:
        if isinstance(rule, Rule):
            rule.check(site)
    except Unread as error:
        return str(error)
    return None


def may_be_attention(module: nn.Module) -> bool:
    named = _ATTENTION.search(type(module).__name__) or generic.looks_like_attention(module)
    return bool(named) and any(True for _ in module.parameters())


# ---------------------------------------------------------------------- Hugging Face's models, by their twins

_TWINS: dict[Hashable, Proven] = {}


def proven(model: Any) -> Proven:
    """Of a model, live or on the meta device; its own forward is not run."""
    try:
        settings = model.config.to_json_string()
    except TypeError:  # a setting that is no JSON
        settings = repr(model.config.to_dict())
    kinds = frozenset((kind, kind.forward) for kind in {type(part) for part in model.modules()})  # some are patched
    key = type(model), settings, model.config._attn_implementation, kinds
    if key not in _TWINS:
        _TWINS[key] = _prove_twin(type(model), model.config)
    return _TWINS[key]


def _prove_twin(kind: type, config: Any) -> Proven:
    """By the twin that reaches most; what no twin's forward reaches is called by itself."""
    best: tuple[Proven, dict[str, Any]] | None = None
    why = ""
    for options in ({}, {"groups": 4}, {"together": True}, {"groups": 0}):
        try:
            found = _explained(twin(kind, config, **options))
        except LocaterError as error:
            why = why or str(error)
            continue
        if best is None or len(found.rules) > len(best[0].rules):
            best = found, options
        if _NOT_REACHED not in found.unread.values():
            break
    if best is None:
        return Proven({}, {"": why})
    if any(_few_slopes(read) for read in best[0].rules.values()):
        with contextlib.suppress(LocaterError):
            return _explained(twin(kind, config, groups=12))
    if _NOT_REACHED in best[0].unread.values():
        return _explained(twin(kind, config, **best[1]), alone=True)
    return best[0]


def _few_slopes(read: Any) -> bool:
    """Whether it has ALiBi's slopes, all of them powers of two: rounding does not show in those."""
    rule = getattr(read, "__self__", None)
    return isinstance(rule, Rule) and rule.bias is not None and rule.bias.kind == "alibi"


def twin(kind: Any, config: Any, **options: Any) -> Any:
    """A small model of this class with every parameter random, which computes its attention by torch's operators."""
    try:
        return _twin(kind, config, options)
    except LocaterError:
        raise
    except Exception as error:  # a configuration that is not consistent fails in any way
        raise LocaterError(f"no small twin of {kind.__name__} can be built: {reason(error)}") from error


def _twin(kind: Any, config: Any, options: Mapping[str, Any]) -> Any:
    small = twins.shrunk(config, **options)
    if small._attn_implementation != "eager":
        small._attn_implementation = None  # torch's own function, where the class takes it
    with twins.quietly():
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(small).parameters())
        if size > _LARGEST:
            raise LocaterError(f"it would have {size / 1e6:,.0f} million parameters")
        with torch.random.fork_rng(devices=[]):
            model = kind(small).float().eval()
    twins.randomise(model)
    return model


def _explained(model: Any, *, alone: bool = False) -> Proven:
    """How the twin's modules are read; `alone`: those that its forward does not reach are called by themselves."""
    seen, ran = run_twin(model)
    found = _of_events(model, seen)
    rules, unread = found.rules, found.unread
    for name, module in model.named_modules():
        if may_be_attention(module) and not any(
            inside(name, other) or inside(other, name) for other in (*rules, *unread)
        ):
            unread[name] = NO_SOFTMAX if name in ran else _NOT_REACHED
    left = [name for name, why in unread.items() if why == _NOT_REACHED]
    for name, read in (_called_alone(model, left) if alone else Proven({}, {})).rules.items():
        rule = getattr(read, "__self__", None)
        if not isinstance(rule, Rule) or rule.rope is None:  # positions would be invented
            rules[name] = read
            unread = {
                other: why for other, why in unread.items() if not inside(other, name) and not inside(name, other)
            }
    return Proven(rules, unread)


def _called_alone(model: Any, names: list[str]) -> Proven:
    seen: list[Compared] = []
    for name in names:
        with twins.quietly():
            for given in twins.alone(model.get_submodule(name)):
                try:
                    seen += compared(model, functools.partial(model.get_submodule(name), **given))[0]
                except Exception:  # the wrong arguments fail in any way
                    continue
                break
    return _of_events(model, seen)


def _of_events(model: nn.Module, seen: list[Compared]) -> Proven:
    rules: dict[str, Reader] = {}
    unread: dict[str, str] = {}
    tensors, modules = LiveTensors(model), by_module(model, seen)
    layers = _layers(modules)
    for name, events in modules.items():
        site = Site(name, nearest_config(model, name), tensors, model.get_submodule(name), model)
        others = [rule for read in rules.values() if isinstance(rule := getattr(read, "__self__", None), Rule)]
        found = _explain(events, site, others, *layers[name])
        if isinstance(found, str):
            unread[name] = found
        else:
            rules[name] = found
    return Proven(rules, unread)


_NOT_REACHED = "the forward of its twin does not reach it"


@torch.no_grad()
def _explain(
    events: list[Compared], site: Site, known_rules: list[Rule], number: int, layers: tuple[int, ...]
) -> Reader | str:
    """How the module is read, by the general reader or, where that does not understand it, a family's; or why not."""
    assert site.model is not None
    known = family(module=site.module)
    try:
        if known is None:
            return replace(explain(events[0], site.model, site, known_rules), number=number, layers=layers).read
        why = "its family does not rebuild its logits"
    except Unread as error:
        why = str(error)
    except Exception as error:  # what somebody's model computes may be anything
        why = f"it is not understood: {type(error).__name__} {reason(error)}"
    for read in mla.candidates() if known is None else (known.read,):
        with contextlib.suppress(Exception):  # a family takes the configuration at its word
            if rebuilt(events[0], read(site)).agree:
                return read
    return why


def rebuilt(seen: Compared, attention: Attention) -> Logits:
    """The logits of parts beside what was seen; the order of tokens and sequences is the one that fits."""
    return min((Logits.of(seen, attention, order) for order in (False, True)), key=lambda logits: logits.difference)


def run_twin(model: Any) -> tuple[list[Compared], set[str]]:
    """What the twin compares, and the modules that ran; models in it that are not reached are called by themselves."""
    seen: list[Compared] = []
    ran: set[str] = set()
    for name, part in model.named_modules():
        if not is_pretrained(part) or (name and any(inside(one.product.module, name) for one in seen)):
            continue
        with twins.quietly():
            for given in twins.inputs(part):
                try:
                    more, names = compared(model, functools.partial(part, **given))
                except Exception:  # the wrong arguments fail in any way
                    continue
                seen, ran = seen + more, ran | names
                break
    return seen, ran


def by_module(model: nn.Module, seen: list[Compared]) -> dict[str, list[Compared]]:
    """By the innermost module that has all layers of queries and keys."""
    found: dict[str, list[Compared]] = {}
    for one in seen:
        query, key = ([_owner(model, source.weight) for source in path.sources] for path in one.product.paths)
        common = _common([*query, *key])
        if not inside(common, one.product.module):  # keys come from another layer's module, or a part computes softmax
            common = _common([*query, one.product.module])
        found.setdefault(common, []).append(one)
    return found


def _owner(model: nn.Module, parameter: str) -> str:
    """The module that uses a parameter: around the layer whose weight it is."""
    module, _, name = parameter.rpartition(".")
    is_layer = name == "weight" and not any(True for _ in model.get_submodule(module).children())
    return module.rpartition(".")[0] if is_layer else module


def _common(names: list[str]) -> str:
    parts = [name.split(".") for name in names]
    count = next((i for i, each in enumerate(zip(*parts, strict=False)) if len(set(each)) > 1), min(map(len, parts)))
    return ".".join(parts[0][:count])


def _layers(modules: Mapping[str, list[Compared]]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Of each module: which of the numbers in its name is the layer's, and the layers that use it, where several do: by
    the order in which modules of such names ran."""
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, number in layer_positions(modules).items():
        alike = [other for other in modules if re.sub(r"\d+", "#", other) == re.sub(r"\d+", "#", name)]
        runs = {source.order: other for other in alike for one in modules[other] for source in one.query.sources}
        uses = tuple(i for i, order in enumerate(sorted(runs)) if runs[order] == name)
        # from the end: the model may be a part of another, whose name has numbers too
        found[name] = number - len(numbers_in(name)), uses if len(uses) > 1 else ()
    return found


# ---------------------------------------------------------------------- other modules, by copies of themselves

_COPIES: weakref.WeakKeyDictionary[nn.Module, tuple[Hashable, Proven]] = weakref.WeakKeyDictionary()


def proven_copy(model: nn.Module) -> Proven:
    """Of a model that no configuration builds, by a copy of it with every parameter random."""
    roots = [name for name, part in model.named_modules() if is_pretrained(part)]
    attention = {
        name: module
        for name, module in model.named_modules()
        if may_be_attention(module) and family(module=module) is None and not any(inside(name, root) for root in roots)
    }
    if not attention:
        return Proven({}, {})
    key = copies.settings(model)
    if model not in _COPIES or _COPIES[model][0] != key:
        _COPIES[model] = key, _prove_copy(model, attention)
    return _COPIES[model][1]


def _prove_copy(model: nn.Module, attention: Mapping[str, nn.Module]) -> Proven:
    rules: dict[str, Reader] = {name: generic.read for name, part in attention.items() if generic.has_joint(part)}
    attention = {name: part for name, part in attention.items() if name not in rules}
    unread: dict[str, str] = {}
    ran: set[str] = set()
    if attention and sum(p.numel() for p in model.parameters()) <= _LARGEST:
        with contextlib.suppress(Exception):  # a model that cannot be copied
            made = copies.copied(model)
            seen, ran = copies.seen_at_work(made, list(attention))
            found = _of_events(made, seen)
            rules, unread = rules | found.rules, found.unread
    for name, module in attention.items():
        if any(inside(name, other) or inside(other, name) for other in (*rules, *unread)):
            continue
        alone = NO_SOFTMAX if name in ran else _read_alone(module, nearest_config(model, name), bool(name))
        if isinstance(alone, str):
            unread[name] = alone
        else:
            rules[name] = alone
    return Proven(rules, unread)


def _read_alone(module: nn.Module, config: Mapping[str, Any], is_part: bool) -> Reader | str:
    """By a copy of the module, called by itself."""
    if is_part and (names := copies.given_more(module)):
        return f"what its model gives it as {names[0]} is not known, as the model cannot be called by guess"
    try:
        made = copies.copied(module)
    except Exception as raised:
        return f"it cannot be copied ({reason(raised)})"
    error = "it takes none"
    for given in twins.alone(made):
        try:
            seen, ran = compared(made, functools.partial(made, **given))
        except Exception as raised:  # arguments that it does not take
            error = reason(raised)
            continue
        events = by_module(made, seen).get("")
        if not events:
            return "it computes no softmax over products of its projections when it is called by itself"
        idle = [name for name, part in made.named_modules() if isinstance(part, nn.Linear) and name not in ran]
        if is_part and idle:
            return f"{idle[0]} takes no part when it is called by itself"
        try:
            rule = explain(events[0], made, Site("", config, LiveTensors(made), made, made))
        except Unread as raised:
            return str(raised)
        return lambda site: rule.read(replace(site, model=site.module, prefix=f"{site.name}." if site.name else ""))
    return f"it cannot be called with states alone ({error}): locater.models.prove(model, batch) shows it at work"
