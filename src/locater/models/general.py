"""The general reader: a twin's attention explained by parts.

The twin shows q, k and the logits of every softmax, and the layers that q and k come out of (`flow`). What lies between
is found, not assumed: which outputs belong to which head, a norm, a rotation by position, a factor, a softcap, a bias
of position. What is found is proven on the logits, and put down as a rule (`rules`).

Legend: B batch, T tokens, G key heads, R query heads for each, H = G·R, K head width.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from locater.models.flow import Compared, Projected
from locater.models.layers import Heads, Layout, NormRule, Side, Unread, setting
from locater.models.logits import CLOSE, angles, by_token
from locater.models.registry import LiveTensors, Site
from locater.models.remainder import finished, gains, module_of, tables
from locater.models.rules import Factor, GainRule, RopeRule, Rule, SineRule
from locater.names import kind_of

__all__ = ["explain"]

_HEADS = (
    "num_heads", "n_heads", "num_attention_heads", "n_head", "heads", "nhead", "num_attn_heads", "attention_heads",
    "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_EPS = re.compile(r"norm.*eps|eps.*norm")
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class _Seen:
    """One side of a comparison: y (B, T, outputs) of the layer, and z (B, heads, T, K) as it is compared."""

    source: Projected
    y: Tensor
    z: Tensor
    parameters: tuple[str, ...]


@torch.no_grad()
def explain(seen: Compared, root: nn.Module, site: Site, known: Sequence[Rule] = ()) -> Rule:
    """The rule of a module whose attention was seen, proven on what was seen; `known` are those of other modules."""
    try:
        return _explain(seen, root, site, known, False)
    except Unread:
        with contextlib.suppress(Unread):
            return _explain(seen, root, site, known, True)
        raise


def _explain(seen: Compared, root: nn.Module, site: Site, known: Sequence[Rule], time_first: bool) -> Rule:
    of_query, of_key = _sides(seen, time_first)
    groups, shared = _groups(of_key.z)
    of_key = replace(of_key, z=of_key.z[:, ::shared])
    heads = Heads(groups, shared, of_query.z.shape[-1])
    sines = list(_sines(seen, of_query, heads, site))
    content = sines[0].content if sines else None
    if content is not None:
        of_query = _without(of_query, content, site.named(content))
    query, gain, *turned_q = _queries(of_query, heads, root, site)
    key, *turned_k = _side(of_key, heads, 1, root)
    rope = _rope([turned_q, turned_k], root, heads.width)
    kind = kind_of(site.name, bool(site.config.get("is_encoder_decoder")))
    if kind != "cross" and of_query.source.states.shape != of_key.source.states.shape:
        kind = "cross"
    made = sorted((of_query.source.after | of_key.source.after) - {of_query.source.weight, of_key.source.weight})
    inner = next((name for name in made if name.startswith(f"{site.name}." if site.name else "")), "")
    rule = Rule(
        site.name, query, key, heads, _counts(site, heads), Factor(0.0), rope, query_gain=gain,
        input_norm=_input_norm(of_query.source, of_key.source, root), kind=kind, inner=inner,
        parts=tuple((name, type(part)) for name, part in module_of(site).named_modules()),
    )  # fmt: skip
    rules = [replace(rule, position_keys=one) for one in sines or (None, *tables(seen, site, heads))]
    return _first(rules, lambda one: finished(one, seen, site, known, time_first))


def _without(seen: _Seen, name: str, bias: Tensor) -> _Seen:
    """Before a bias was added: torch's attention multiplies queries by a factor, which shows in how they vary."""
    factor = (seen.z - seen.z.mean(2, keepdim=True)).norm() / (seen.y - seen.y.mean(1, keepdim=True)).norm()
    z = seen.z - factor * bias.view(seen.z.shape[1], 1, -1)
    return replace(seen, z=z, parameters=tuple(one for one in seen.parameters if one != name))


def _first(candidates: Iterable[_Given], made: Callable[[_Given], _Made]) -> _Made:
    """What is made of the first candidate of which anything is; what the first lacks, if nothing is."""
    why = Unread("it has no parts")
    for number, one in enumerate(candidates):
        try:
            return made(one)
        except Unread as error:
            why = error if number == 0 else why
    raise why


def _sides(seen: Compared, time_first: bool) -> tuple[_Seen, _Seen]:
    made = []
    for path, x in ((seen.query, seen.product.q), (seen.key, seen.product.k)):
        if path.clamped:
            raise Unread("queries or keys are clamped, which W_QK does not know of")
        if len(path.sources) != 1:
            names = ", ".join(sorted(source.weight for source in path.sources))
            raise Unread(f"queries or keys come out of several layers: {names}")
        (source,) = path.sources
        (n, tokens, _), rows = x.shape, source.out.numel() // source.out.shape[-1]
        batch = rows // tokens
        if source.out.ndim > 3 or batch < 1 or rows % tokens or n % batch:
            raise Unread(f"{source.weight} makes {tuple(source.out.shape)}, which are no {tokens} tokens of {n} heads")
        y = by_token(source.out, batch, tokens, time_first)
        made.append(_Seen(source, y, x.reshape(batch, n // batch, tokens, -1), path.parameters))
    if made[0].z.shape[:2] != made[1].z.shape[:2]:
        raise Unread("queries and keys are of different numbers of sequences")
    return made[0], made[1]


def _groups(k: Tensor) -> tuple[int, int]:
    """Key heads, and how many query heads see each."""
    if not k.numel() or not bool(torch.isfinite(k).all()):
        raise Unread("what it compares in its twin is nothing, or not finite")
    same = [bool((k[:, h] == k[:, 0]).all()) for h in range(k.shape[1])]
    shared = next((h for h, one in enumerate(same) if not one), len(same))
    if k.shape[1] % shared or not (k.unflatten(1, (-1, shared)) == k[:, ::shared, None]).all():
        raise Unread("query heads share keys in turn, or in another order than one after the other")
    return k.shape[1] // shared, shared


# ---------------------------------------------------------------------- from a layer's outputs to a head's


def _side(seen: _Seen, heads: Heads, each: int, root: nn.Module) -> tuple[Side, Tensor, Tensor]:
    """Queries or keys; and the outputs (B, heads, T, K) that are what is compared, but for a rotation."""
    source, y, width = seen.source, seen.y, heads.width
    stored = dict(root.named_parameters(remove_duplicate=False))
    bias, sibling = source.bias, source.weight.removesuffix("weight") + "bias"
    if bias is None and sibling in seen.parameters and stored[sibling].numel() == y.shape[-1]:
        bias, y = sibling, y + stored[sibling]
    total = stored[source.weight].shape[1 if source.transposed else 0]
    if y.shape[-1] % width or total % width or source.start % width:
        raise Unread(f"{source.weight} has {total} outputs, which are no heads of {width}")
    blocks = y.unflatten(-1, (-1, width)).transpose(1, 2)  # (B, blocks, T, K)
    sizes = width, seen.z.shape[1] * width
    others = [name for name in seen.parameters if name not in (source.weight, bias)]
    gains = [name for name in others if stored[name].numel() in sizes]  # others may be tables of positions
    reason = f"no outputs of {source.weight} are as long as what is compared"
    eps = [v for k, v in getattr(getattr(root, "config", None), "__dict__", {}).items() if _EPS.search(k)]
    for norm in _norm_rules(gains, stored, width, next((v for v in eps if isinstance(v, float)), 1e-6)):
        u, z = _normed(norm, blocks, seen.z, root, (heads.groups, each, width))
        where = None if u is None else _match(u, z)
        if u is None or where is None:
            continue
        layout = _layout([one + source.start // width for one in where], heads, each)
        if layout is not None:
            return Side(source.weight, bias, source.transposed, layout, total // width, norm), u[:, where], z
        reason = f"the heads of {source.weight} lie at {where}, an order that is not known"
    raise Unread(reason + (f"; {', '.join(others[:3])} lie between" if others else ""))


def _queries(seen: _Seen, heads: Heads, root: nn.Module, site: Site) -> tuple[Side, GainRule | None, Tensor, Tensor]:
    """As `_side`; also the gain by position that they have."""

    def side(gain: GainRule | None) -> tuple[Side, GainRule | None, Tensor, Tensor]:
        factor = 1.0 if gain is None else gain.read(site)(torch.arange(seen.z.shape[2]))[:, None].to(seen.z)
        query, *turned = _side(replace(seen, z=seen.z / factor), heads, heads.shared, root)
        return query, gain, turned[0], turned[1]

    return _first([None, *gains(site)], side)


def _sines(seen: Compared, of_query: _Seen, heads: Heads, site: Site) -> Iterator[SineRule]:
    """What else may be compared with the queries: keys of offsets, with the two biases that come with them."""
    if not seen.others:
        return
    (other, *more), count = seen.others, heads.groups * heads.shared
    source, *sources = other.paths[1].sources
    if more or sources or not other.of_positions:
        raise Unread("what softmax is given is the sum of several products")

    def bias(names: Iterable[str]) -> str | None:
        known = of_query.source.bias, of_query.source.weight.removesuffix("weight") + "bias"
        return next((n for n in names if n not in known and site.named(n).numel() == count * heads.width), None)

    names = bias(of_query.parameters), bias(other.paths[0].parameters)
    keys = Side(source.weight, source.bias, source.transposed, Layout("together", (0, 0)), count)
    for interleaved, sign in itertools.product((True, False), (1, -1)):
        yield SineRule(keys, *names, interleaved, sign)


def _norm_rules(names: list[str], stored: Mapping[str, Tensor], width: int, eps: float) -> Iterator[NormRule | None]:
    """What may lie between a layer and the comparison, given the parameters met there."""
    if not names:
        yield from (None, NormRule(eps=eps), NormRule(), NormRule(centred=True, eps=1e-5))
        return
    gain, bias = names[0], names[1] if len(names) == 2 else None
    for after in (False, True):
        for joint in (True, False) if stored[gain].numel() > width else (False,):
            for centred in (True,) if bias else (False, True):
                yield from (NormRule(gain, bias, centred, base, joint, after) for base in (0.0, 1.0))


def _normed(
    rule: NormRule | None, blocks: Tensor, z: Tensor, root: nn.Module, heads: tuple[int, int, int]
) -> tuple[Tensor | None, Tensor]:
    """The outputs (B, blocks, T, K) so that one of them, rotated, is what is compared; and that."""
    if rule is None:
        return blocks, z
    norm = rule.read(Site("", {}, LiveTensors(root), root, root), heads)
    own = norm.gain is not None and norm.gain.ndim > 1  # every head has a gain of its own, or all have one norm
    if rule.after_rope:
        if norm.gain is None or norm.centred or rule.joint:
            return None, z
        return replace(norm, stored=None)(blocks), z / (norm.gain.flatten(0, 1) if own else norm.gain)
    if not own:
        return norm(blocks), z
    whole = blocks.shape[1] == heads[0] * heads[1]
    return norm(blocks.unflatten(1, heads[:2])).flatten(1, 2) if whole else None, z


def _match(u: Tensor, z: Tensor) -> list[int] | None:
    """For every head the outputs that have its length at every token, up to one factor."""
    ours, theirs = (x.double().square().sum(-1) for x in (u, z))  # (B, ·, T)
    ratio = theirs[:, :, None] / ours[:, None].clamp(min=1e-30)  # (B, heads, blocks, T)
    ratio = ratio.movedim(0, 2).flatten(2)
    mean = ratio.mean(-1)
    fits = (ratio - mean[..., None]).abs().amax(-1) <= 10 * CLOSE * mean
    if not bool(fits.any(-1).all()):
        return None
    if bool((fits.sum(-1) > 1).any()):  # a norm makes all as long as each other: then a first token, unrotated, tells
        a, b = (functional.normalize(x[:, :, 0].double(), dim=-1) for x in (u, z))
        fits = torch.where(fits, torch.einsum("bnk,bhk->hn", a, b), -torch.inf)
    found: list[int] = fits.double().argmax(-1).tolist()
    return found


def _layout(where: list[int], heads: Heads, each: int) -> Layout | None:
    groups, shared, _ = heads

    def in_shared(count: int) -> tuple[int, int]:
        return (count, 0) if shared == 1 else (count % shared, count // shared)

    rows, first = torch.tensor(where).view(groups, each), where[0]
    step = int(rows[1, 0] - rows[0, 0]) if groups > 1 else each
    if not bool((rows[:, 0] == first + step * torch.arange(groups)).all()):
        return None
    if bool((rows == rows[:, :1] + torch.arange(each)).all()):
        if step == each and first % groups == 0:
            return Layout("together", in_shared(first // groups))
        return Layout("by group", in_shared(first), in_shared(step)) if first + each <= step else None
    apart = where[1] - first
    if apart > first >= 0 and where == list(range(first, first + apart * len(where), apart)):
        return Layout("by head", (first, 0), (apart, 0))
    return None


# ---------------------------------------------------------------------- rotation by position


def _rope(turned: list[list[Tensor]], root: nn.Module, width: int) -> RopeRule | None:
    """The rotation that makes z of u, for queries and for keys, up to a factor."""
    scaled = [(u * (z.norm() / u.norm()), z) for u, z in turned]
    if all(_equal(u, z) or _equal(-u, z) for u, z in scaled):
        return None
    moved = [((u - z).abs() > CLOSE * z.abs().max()).flatten(0, 2).any(0) for u, z in scaled]
    rotary = 2 * math.ceil((int((moved[0] | moved[1]).nonzero().max()) + 1) / 2)
    sources = {
        name: x.detach().double()
        for name, x in root.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq") and x.ndim == 1
    }
    known = {2 * len(f) for f in sources.values() if rotary <= 2 * len(f) <= width}  # slow pairs hardly move in a twin
    for size in dict.fromkeys([*sorted(known, reverse=True), rotary]):
        for interleaved in (False, True):
            found = [angles(u, z, size, interleaved) for u, z in scaled]
            both = [angle for angle in found if angle is not None]
            if len(both) == 2:
                return _rope_rule(both, size // 2, interleaved, sources, root)
    raise Unread("queries and keys are changed by position in a way that is no rotation of pairs")


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= CLOSE * b.abs().max())


def _rope_rule(
    found: list[Tensor], pairs: int, interleaved: bool, sources: dict[str, Tensor], root: nn.Module
) -> RopeRule:
    def fits(frequencies: Tensor) -> bool:
        left = [one - one[:1] - torch.arange(len(one))[:, None] * frequencies for one in found]
        return all(bool((torch.polar(torch.ones_like(x), x) - 1).abs().max() < 2e-3) for x in left)

    for name, frequencies in sources.items():
        if len(frequencies) >= pairs and fits(frequencies[:pairs]):
            return RopeRule(interleaved, pairs, name, frequencies[:pairs])
    for base in (10000.0, *_bases(root)):
        frequencies = base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        for sign in (1, -1):
            if fits(sign * frequencies):
                return RopeRule(interleaved, pairs, None, sign * frequencies)
    return RopeRule(interleaved, pairs, on_a_line=False)


def _bases(root: nn.Module) -> list[float]:
    """Numbers that the model's modules and configurations call a base or a theta."""
    found = []
    for module in root.modules():
        for values in (vars(module), getattr(getattr(module, "config", None), "__dict__", {})):
            found += [float(v) for k, v in values.items() if re.search("theta|base", k) and isinstance(v, int | float)]
    return list(dict.fromkeys(v for v in found if v > 1))


# ---------------------------------------------------------------------- settings


def _counts(site: Site, heads: Heads) -> tuple[str | None, str | None]:
    def named(names: tuple[str, ...], value: int) -> str | None:
        return next((name for name in names if setting(site, name) == value), None)

    return named(_HEADS, heads.groups * heads.shared), named((*_KEY_HEADS, *_HEADS), heads.groups)


def _input_norm(source: Projected, other: Projected, root: nn.Module) -> NormRule | None:
    """The norm whose output enters both layers: by what it makes, a mean square of 1 before its gain."""
    if source.states.data_ptr() != other.states.data_ptr():
        return None
    x = source.states.reshape(-1, source.states.shape[-1]).double()
    stored = dict(root.named_parameters(remove_duplicate=False))
    for count in (1, 2):
        names = source.norm[-count:]
        if len(names) < count or any(stored[name].numel() != x.shape[-1] for name in names):
            continue
        gain, bias = stored[names[0]].double(), stored[names[1]].double() if count == 2 else 0.0
        for base in (0.0, 1.0):
            plain = (x - bias) / (base + gain)
            if bool(((plain.square().mean(-1) - 1).abs() < 1e-2).all()):
                centred = bool((plain.mean(-1).abs() < 1e-3).all())
                return NormRule(names[0], names[1] if count == 2 else None, centred, base)
    return None
