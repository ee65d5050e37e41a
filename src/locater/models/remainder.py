"""What lies between q·k and softmax: a factor, a softcap, what positions add.

Candidates come by the names of settings and by the parameters that were met on the way; the proof decides.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from locater.models.flow import Compared
from locater.models.layers import Heads, Unread, setting
from locater.models.logits import Logits
from locater.models.registry import Site
from locater.models.rules import BiasRule, Factor, GainRule, GridRule, Rule, TableRule

__all__ = ["finished", "gains", "module_of", "names_of", "tables"]

_FACTOR = re.compile(r"scal|mult|temp|norm_factor|sqrt|query_pre_attn")
_STRENGTH, _LENGTH = "^attn_scale$|scaling_beta$", "^floor_scale$|^original_max_position_embeddings$"


def module_of(site: Site) -> nn.Module:
    assert site.module is not None
    return site.module


def names_of(site: Site, pattern: str) -> list[str]:
    """Of attributes of the module and its parts, and of settings."""
    parts = [("", module_of(site)), *((f"{n}.", part) for n, part in module_of(site).named_children())]
    own = [prefix + name for prefix, part in parts for name in vars(part)]
    own += [f"{name}.{inner}" for name, value in site.config.items() if isinstance(value, Mapping) for inner in value]
    return [name for name in dict.fromkeys([*own, *site.config]) if re.search(pattern, name.rpartition(".")[2])]


def gains(site: Site) -> Iterator[GainRule]:
    """By what settings have such names."""
    for strength, length in itertools.product(names_of(site, _STRENGTH), names_of(site, _LENGTH)):
        if all(_is_number(setting(site, name)) for name in (strength, length)):
            yield from (GainRule(strength, length, shift) for shift in (0, 1))


def tables(seen: Compared, site: Site, heads: Heads) -> Iterator[TableRule | GridRule]:
    """Tables that queries are compared with: of offsets; or two, of the rows and columns of an image."""
    names = [name for name in seen.parameters if site.named(name).shape[1:] == (heads.width,)]
    for name, left, sign in itertools.product(names, (*names_of(site, "^left_max"), None), (1, -1)):
        yield TableRule(name, left, sign)
    yield from (
        GridRule(*pair) for pair in itertools.permutations(names, 2) if all(len(site.named(n)) % 2 for n in pair)
    )


def finished(rule: Rule, seen: Compared, site: Site, known: Sequence[Rule], time_first: bool) -> Rule:
    """With the factor, the softcap and the bias that make the logits; Unread if none do."""
    best, about = math.inf, math.nan
    caps = [name for name in names_of(site, "softcap|softclamp") if _is_number(setting(site, name))]
    plain = Logits.of(seen, rule.read(site), time_first)
    fixed: Tensor | float = 0.0  # what no factor multiplies
    if rule.position_keys is not None and not rule.position_keys.scaled:
        whole, plain = plain, Logits.of(seen, replace(rule, position_keys=None).read(site), time_first)
        fixed = whole.rebuilt.double() - plain.rebuilt.double()
    for cap in caps if seen.capped else (None,):
        real = plain.real.double() - fixed
        if cap is not None:
            size = float(setting(site, cap))
            if bool((real[plain.visible].abs() >= size).any()):
                continue
            real = size * (real / size).atanh()
        factor = _factor(plain.rebuilt.double(), real, plain.visible)
        named = next((one for one in _factors(site) if _is(one.value(site, rule.heads.width), factor)), None)
        about = factor
        if named is None:
            continue
        made = replace(rule, factor=named, softcap=cap)
        indices = [one.bias.index for one in known if one.bias is not None and one.bias.index is not None]
        for bias in _biases(site, made, seen, real - factor * plain.rebuilt, plain.visible, indices):
            logits = Logits.of(seen, replace(made, bias=bias).read(site), time_first)
            if logits.agree:
                return replace(made, bias=bias)
            best = min(best, logits.difference / logits.range)
    off = "" if best == math.inf else f"; what is rebuilt from its parts is off by {best:.2g} of the range"
    raise Unread(f"logits are not q·k times a factor, or not one that has a name (about {about:.3g}){off}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is(value: float | None, wanted: float) -> bool:
    return value is not None and abs(value - wanted) <= 1e-3 * abs(wanted)


def _factor(rebuilt: Tensor, real: Tensor, visible: Tensor) -> float:
    """By least squares, from what differs between two sequences where there are two: a bias of position does not."""
    if len(real) > 1:
        both = visible[0] & visible[1]
        a, b = (rebuilt[0] - rebuilt[1])[both], (real[0] - real[1])[both]
        if bool(a.abs().max() > 1e-3 * rebuilt.abs().max()):
            return float((a * b).sum() / a.square().sum())
    a, b = rebuilt[visible], real[visible]
    return float((a * b).sum() / a.square().sum())


def _factors(site: Site) -> Iterator[Factor]:
    own = [name for name in vars(module_of(site)) if _FACTOR.search(name)]
    yield from (Factor(0.0, name) for name in own)  # as it is now: it may be changed after the model was built
    yield from (Factor(-0.5), Factor(0.0), Factor(-1.0), Factor(-0.5, by_layer=True))
    for name in names_of(site, _FACTOR.pattern):
        for width_power in (0.0, -0.5, -1.0):
            yield from (Factor(width_power, name, power) for power in (1.0, -1.0, -0.5, 2.0))


def _biases(
    site: Site, rule: Rule, seen: Compared, rest: Tensor, visible: Tensor, indices: Sequence[Tensor]
) -> Iterator[BiasRule | None]:
    """None, and those that the parameters met on the way to softmax allow; `rest` is what q·k leaves of the logits.

    `indices`: of the tables of other modules, as a shifted window may never show some of its pairs.
    """
    yield None
    heads = rule.heads.groups * rule.heads.shared
    for name in seen.parameters:
        table = site.named(name)
        if table.ndim != 2 or table.shape[1] != heads:
            continue
        distances: list[str | int] = [*names_of(site, "max_distance"), 128]  # T5's, where no setting says it
        for distance in distances:
            yield from (BiasRule("buckets", name, bidirectional=both, distance=distance) for both in (True, False))
        count = visible.sum(0)  # of windows some may have parts that are masked
        if bool(count.all()):
            mean = rest.masked_fill(~visible, 0).sum(0) / count  # (H, Tq, Tk)
            index = torch.cdist(mean.permute(1, 2, 0).flatten(0, 1), table.double()).argmin(-1)
            if len(index.unique()) == len(table):  # else a longer sequence may have rows that are not seen here
                yield BiasRule("table", name, index=index.view(rest.shape[2:]))
        alike = (index for index in indices if index.shape == rest.shape[2:] and int(index.max()) < len(table))
        yield from (BiasRule("table", name, index=index) for index in alike)
    if not seen.parameters and (rule.rope is None or rule.rope.on_a_line):
        for scale in (1.0, rule.heads.width**-0.5):
            yield from (BiasRule("alibi", scale=scale, rounded=rounded) for rounded in (False, True))
