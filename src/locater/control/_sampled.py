"""Logits of a model's heads on a sample of the states that enter its attention as it trains.

Legend: G key heads, R query heads for each, B sequences of a sample, n tokens of each, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from locater.control._parameters import gathered, gathered_attention, is_sharded, projections
from locater.control.rules.decoupled import SEQUENCES, TOKENS, sampled_positions
from locater.hooks import make_hooks_noticed
from locater.models import Attention, Norm, Projection, Rope

__all__ = ["Sample", "SampledStates", "alike", "logits_of", "stackable"]

_FEW = 8  # a sample of fewer real tokens is not used
_INVERTED = ("MptAttention",)  # in its masks True is masked


class Sample(NamedTuple):
    """States that entered an attention module."""

    states: Tensor  # (B, n, D)
    positions: Tensor  # (n,), in their sequences
    tokens: int  # of a whole sequence


class SampledStates:
    """Samples of what entered each attention module in its last training forward, padding left out where it is known.

    For a module whose keys are made of other states than its queries, or that no states have entered, the sample is a
    placeholder: independent normal tokens, through the norm before the module.
    """

    def __init__(self, model: nn.Module, known: Sequence[Attention]) -> None:
        self._modules = {attention.module: model.get_submodule(attention.module) for attention in known}
        self._samples = {attention.module: _Sampler() for attention in known if not attention.kind.endswith("cross")}
        self._users = 0  # optimizers

    def attach(self, undo: ExitStack) -> None:
        """Hooks the modules, once for all optimizers."""
        self._users += 1
        undo.callback(self._release)
        if self._users == 1:
            make_hooks_noticed()
            self._hooks = [
                self._modules[name].register_forward_pre_hook(sample, with_kwargs=True)
                for name, sample in self._samples.items()
            ]

    def _release(self) -> None:
        self._users -= 1
        if self._users == 0:
            for hook in self._hooks:
                hook.remove()
            for sample in self._samples.values():
                sample.last = None

    def entered(self) -> bool:
        """Whether any were seen."""
        return any(sample.last is not None for sample in self._samples.values())

    def kinds(self) -> list[Any]:
        """Of every sample its shape and device, and which others have the same positions. While this stays the same,
        what `source` returned stays valid."""
        known = [sample.last for sample in self._samples.values()]
        lengths = [None if one is None else one.tokens for one in known]
        return [
            None if one is None else (one.states.shape, one.states.device, lengths.index(one.tokens)) for one in known
        ]

    def norms(self) -> list[int]:
        """Which QK-norms are applied. While they stay the same, so does what `measured` returns."""
        return [id(module._modules.get("locater_qk_norm")) for module in self._modules.values()]

    def is_missing(self, attention: Attention) -> bool:
        """Whether the module's sample is a placeholder until states enter it."""
        sample = self._samples.get(attention.module)
        return sample is not None and self._seen(attention) is None

    def _seen(self, attention: Attention) -> _Sampler | None:
        sample, device = self._samples.get(attention.module), projections(attention)[0].tensor.device
        return sample if sample is not None and sample.last and sample.last.states.device == device else None

    def source(self, attention: Attention) -> Callable[[], Sample]:
        """A function that returns the module's last sample."""
        seen = self._seen(attention)
        return seen.kept if seen is not None else lambda: _independent(attention)

    def of(self, attention: Attention) -> Sample:
        return self.source(attention)()

    def measured(self, attention: Attention) -> Attention:
        """The module with nothing but q·k: rotary positions, its norms and applied QK-norms, no softcap, no bias."""
        norms = getattr(self._modules[attention.module], "locater_qk_norm", None)
        own: dict[str, Any] = {}
        for part in ("query", "key"):
            if norms is not None and hasattr(norms, part):
                own[f"{part}_norm"] = Norm(getattr(norms, part), norms.eps)
        on_a_line = attention.rope is None or attention.rope.on_a_line
        return replace(
            attention, softcap=None, position_bias=None, position_keys=None, rope=attention.rope if on_a_line else None,
            **own,
        )  # fmt: skip


@dataclass(eq=False)
class _Sampler:
    """A forward pre-hook that keeps a sample; it may be compiled with the model.

    A training forward is one that records gradients. The mode does not tell: transformers loads models in evaluation
    mode, some loops and Lightning leave them there, and generation between two steps may find them in training mode.
    """

    last: Sample | None = field(default=None, repr=False)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        x = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
        if not isinstance(x, Tensor) or x.ndim < 2 or not x.is_floating_point() or _is_transformed(x):
            return
        if isinstance(module, nn.MultiheadAttention) and x is not (args[1] if len(args) > 1 else kwargs.get("key", x)):
            return  # keys are made of other states
        x = x.detach()
        if x.ndim == 2:
            x = x[None]
        elif not getattr(module, "batch_first", True):  # nn.MultiheadAttention: (T, B, D)
            x = x.transpose(0, 1)
        x = x.flatten(1, -2)
        real = _longest_document(kwargs, x.shape[:2], _real(module, args, kwargs, x.shape[:2]))
        if real is None:
            positions = _positions(x.shape[1], x.device)
            self.last = Sample(x[:SEQUENCES].index_select(1, positions), positions, x.shape[1])
        else:
            self.last = _without_padding(x, real)

    def kept(self) -> Sample:
        assert self.last is not None
        return self.last

    def __deepcopy__(self, memo: dict[int, Any]) -> _Sampler:
        """A copy of the model keeps samples of its own."""
        return _Sampler()

    def __reduce__(self) -> tuple[type[_Sampler], tuple[()]]:
        """A model that is saved whole takes no sample along."""
        return _Sampler, ()


_KNOWN: dict[tuple[int, torch.device], Tensor] = {}


def _positions(tokens: int, device: torch.device) -> Tensor:
    """Cached, except in compiled code and for tensors without values yet (fake ones, or during graph capture)."""
    if torch.compiler.is_compiling():
        return sampled_positions(tokens, device)
    found = _KNOWN.get((tokens, device))
    if found is None:
        found = sampled_positions(tokens, device)
        if type(found) is Tensor and not (found.is_cuda and torch.cuda.is_current_stream_capturing()):
            _KNOWN[tokens, device] = found
    return found


def _without_padding(x: Tensor, real: Tensor) -> Sample:
    """The two longest sequences, or the longest twice where the second is less than half as long, at positions of the
    longest. States are NaN where it has fewer than eight real tokens."""
    lengths, rows = (each[:SEQUENCES] for each in real.sum(1).sort(descending=True, stable=True))
    other = 2 * lengths >= lengths[:1]
    rows, lengths = torch.where(other, rows, rows[:1]), torch.where(other, lengths, lengths[:1])
    tokens, longest = x.shape[1], lengths[:1]
    positions = sampled_positions(tokens, x.device, longest)
    order = (~real[rows]).to(torch.int8).argsort(dim=1, stable=True)  # real tokens first, as they come
    index = order.gather(1, positions * lengths[:, None] // longest.clamp(min=1))
    states = x[rows].gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
    return Sample(states.masked_fill(longest < min(_FEW, tokens), math.nan), positions, tokens)


def _real(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: Sequence[int]) -> Tensor | None:
    """Which tokens (B, T) are not padding, from the masks that transformers and nn.MultiheadAttention pass to a module;
    None without such a mask."""
    batch, tokens = shape
    padding = kwargs.get("key_padding_mask")
    if isinstance(padding, Tensor) and tuple(padding.shape) == (batch, tokens):
        return _or_all(~padding if padding.dtype == torch.bool else padding == 0)
    named = [kwargs[name] for name in ("attention_mask", "mask") if name in kwargs]
    mask = (*named, *args[1:2], None)[0]
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[2] in (1, tokens) and mask.shape[3] == tokens:
        # a token that is not padding sees itself, also under causal masks and windows
        mask = mask[:, 0, 0] if mask.shape[2] == 1 else mask[:, 0].diagonal(dim1=-2, dim2=-1)
        mask = mask > -1e3 if mask.is_floating_point() else mask.to(torch.bool)
        return _or_all((~mask if type(module).__name__ in _INVERTED else mask).expand(batch, tokens))
    if named and tuple(mask.shape) == (batch, tokens) and not mask.is_floating_point():
        return _or_all(mask.to(torch.bool))
    return None


def _longest_document(kwargs: Mapping[str, Any], shape: Sequence[int], real: Tensor | None) -> Tensor | None:
    """Which tokens (B, T) are in their row's longest document, where several are packed in a row; the sample is of that
    one. A document begins where positions do not continue. Positions shared by all rows say nothing of documents."""
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or tuple(positions.shape) != tuple(shape) or positions.is_floating_point():
        return real
    begins = positions.diff(dim=1, prepend=positions[:, :1]) != 1
    counted = torch.ones_like(begins) if real is None else real
    total = counted.cumsum(1)
    size = total - torch.where(begins, total - counted.long(), 0).cummax(1).values  # of a document, up to each token
    document = begins.cumsum(1)
    return counted & (document == document.gather(1, size.argmax(1, keepdim=True)))


def _is_transformed(x: Tensor) -> bool:
    """Whether it is a wrapper of torch.func (vmap, grad), which is not valid after the transform."""
    return not torch.compiler.is_compiling() and bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def _or_all(real: Tensor) -> Tensor:
    """A row that is masked entirely is taken to be all real."""
    return real | ~real.any(1, keepdim=True)


def _independent(attention: Attention) -> Sample:
    weight, norm = projections(attention)[0].tensor, attention.input_norm
    dtype, positions = torch.promote_types(weight.dtype, torch.float32), _positions(TOKENS, weight.device)
    x = _normal(projections(attention)[0].shape[-1], weight.device, dtype)
    if norm is not None and attention.one_input and not _two_widths(attention):
        x = norm.mapped(lambda one: gathered(one.detach()).to(dtype))(x)
    return Sample(x, positions, TOKENS)


def _two_widths(attention: Attention) -> bool:
    """Whether keys are made of states of another width than queries are."""
    query, key = projections(attention)
    return query.shape[-1] != key.shape[-1]


@cache
def _normal(width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    made = torch.Generator().manual_seed(0)
    return torch.randn(SEQUENCES, TOKENS, width, generator=made, dtype=dtype).to(device)


def stackable(attention: Attention) -> bool:
    """Whether its logits are those of plain queries and keys, which several modules can compute in one product."""
    norms = [norm for norm in (attention.query_norm, attention.key_norm) if norm is not None]
    plain_norms = not any(
        norm.joint or norm.after_rope or norm.bias is not None or (norm.stored is not None and norm.stored.ndim != 1)
        for norm in norms
    )
    parts = projections(attention)
    plain = attention.query_gain is None and attention.one_input and not _two_widths(attention) and plain_norms
    gains = [norm.stored for norm in norms if norm.stored is not None]
    whole = not any(is_sharded(x) for part in parts for x in (*part.tensors, *gains))
    return plain and whole and not any(part.computed and not part.others for part in parts)


def alike(one: Attention, other: Attention) -> bool:
    """Whether two `stackable` modules of one shape differ in nothing but the values of their weights and gains."""
    norms = _same_norm(one.query_norm, other.query_norm) and _same_norm(one.key_norm, other.key_norm)
    same_parts = [_trained_tensors(part) for part in projections(one)] == [
        _trained_tensors(part) for part in projections(other)
    ]
    return norms and same_parts and _same_rope(one.rope, other.rope)


def _trained_tensors(part: Projection) -> list[Any]:
    tensors = [*part.tensors, part.bias_tensor]
    return [x if x is None else (x.requires_grad, x.shape, x.dtype) for x in tensors]


def _same_norm(a: Norm | None, b: Norm | None) -> bool:
    if a is None or b is None:
        return a is b
    shapes = [one.stored if one.stored is None else (one.stored.shape, one.stored.dtype) for one in (a, b)]
    return shapes[0] == shapes[1] and replace(a, stored=None) == replace(b, stored=None)


def _same_rope(a: Rope | None, b: Rope | None) -> bool:
    if a is None or b is None:
        return a is b
    plain = a.stretched is None and b.stretched is None and a.interleaved == b.interleaved and a.gain == b.gain
    return plain and (a is b or torch.equal(a.frequencies, b.frequencies))


@torch.no_grad()
def logits_of(attention: Attention, sample: Sample) -> Tensor:
    """Logits (1, G, R, B, n, n) of a module of any kind; sharded weights are gathered."""
    attention = gathered_attention(attention)
    dtype = torch.promote_types(attention.key.tensor.dtype, torch.float32)
    if dtype != attention.key.tensor.dtype:
        query, key = (one and one.mapped(lambda x: x.to(dtype)) for one in (attention.query, attention.key))
        assert key is not None
        attention = replace(attention, query=query, key=key)
    states, positions, tokens = sample
    if attention.rope is not None and attention.rope.stretched is not None:
        frequencies = attention.rope.stretched(tokens)  # of the whole sequence, not of the sample's length
        attention = replace(attention, rope=replace(attention.rope, frequencies=frequencies, stretched=None))
    keys = _normal(projections(attention)[1].shape[-1], states.device, dtype) if _two_widths(attention) else None
    logits = attention.logits(states.to(dtype), keys, positions=(positions, positions))  # (B, G·R, n, n)
    by_key: Tensor = logits.unflatten(1, projections(attention)[0].shape[:2])
    return by_key.movedim(0, 2)[None]
