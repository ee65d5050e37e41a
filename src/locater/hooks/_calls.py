"""What an attention call computes, read off its arguments: queries, keys, and which keys are masked.

Legend: B batch, H query heads, G key heads, Tq queries, Tk keys, K head width.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from locater.errors import LocaterError
from locater.hooks._visibility import Visibility, additive, visible

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # the arguments that may be positional
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
_COMPARED = 1 << 23  # entries of a mask at a time


@dataclass(frozen=True)
class Call:
    """One attention call. Keys are masked by `bias` alone where it is given, else by the other three."""

    q: Tensor  # (B, H, Tq, K), with its graph, as k
    k: Tensor  # (B, G, Tk, K)
    scale: float | None = None
    softcap: float | None = None
    causal: bool = False
    window: int | None = None
    key_mask: Tensor | None = None  # (B, Tk)
    bias: Tensor | None = None  # (B or 1, H or 1, Tq or 1, Tk), boolean or added, without its graph
    real: Tensor | None = None  # (B, Tq): False where the query is padding
    tokens: slice | None = None  # the sequence's part of the forward's tokens, where several are packed into one
    members: int = 1  # models of a stack; each has as many sequences, and they follow one another
    sinks: Tensor | None = None  # (H,), with their graph: logits without a key

    @property
    def visibility(self) -> Visibility:
        return Visibility(self.sizes, self.q.device, self.causal, self.window, self.key_mask, self.bias)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, Tq, Tk."""
        (b, h, tq, _), tk = self.q.shape, self.k.shape[2]
        return b, h, tq, tk

    def options(self) -> dict[str, Any]:
        """What makes logits of q and k: keywords of `measure.attention_statistics`."""
        names = ("causal", "scale", "key_mask", "window", "softcap", "bias", "sinks")
        return {name: getattr(self, name) for name in names}

    def softmax_terms(self) -> Tensor:
        """How many keys each query's softmax is over, a sink counted as one: expands to (B, H, Tq)."""
        return self.visibility.unmasked_keys() + (self.sinks is not None)

    def detached(self) -> Call:
        sinks = None if self.sinks is None else self.sinks.detach()
        return replace(self, q=self.q.detach(), k=self.k.detach(), sinks=sinks)

    def without_empty(self) -> Call | None:
        """Without the sequences that are nothing but padding; of several members all stay, for each to have as many.

        None where nothing is left, or nothing was there: torch's modules take batches of no sequences.
        """
        if 0 in self.sizes:
            return None
        if self.real is None or self.members > 1:
            return self
        kept = self.real.any(1)
        if kept.all():
            return self
        if not kept.any():
            return None
        given = {name: getattr(self, name) for name in ("q", "k", "key_mask", "bias", "real")}
        whole = {name: x for name, x in given.items() if x is not None and len(x) == len(kept)}  # a bias may be shared
        return replace(self, **{name: x[kept] for name, x in whole.items()})

    def with_padding(self, mask: Tensor | None) -> Call:
        """With the queries left out that are False, or 0, at the end of `mask` (B, Tq or more)."""
        b, _, tq, _ = self.sizes
        if mask is None or mask.ndim != 2 or len(mask) != b or mask.shape[1] < tq:
            return self
        tokens = mask[:, mask.shape[1] - tq :].to(self.q.device).bool()
        return replace(self, real=tokens if self.real is None else tokens & self.real)


# ---------------------------------------------------------------------- the calls of libraries


def of_interface(implementation: str, arguments: Mapping[str, Any], *, cross: bool) -> list[Call]:
    """A call of one of Hugging Face's attention functions; several where sequences are packed into one."""
    module, q, k = arguments["module"], arguments["query"], arguments["key"]
    mask, added = arguments.get("attention_mask"), arguments.get("position_bias")
    if type(arguments.get("cache")).__name__ == "PagedAttentionCache" or arguments.get("block_table") is not None:
        raise LocaterError(f"{type(module).__name__} ran with a paged cache, whose keys it is not given; use another")
    call = Call(q, k, arguments.get("scaling"), arguments.get("softcap"), sinks=_sinks(implementation, arguments))
    window, causal = arguments.get("sliding_window"), arguments.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if implementation == "flex_attention":  # its mask says all
        return [_with_mask(call, _of_blocks(mask, call), added=added, cross=cross, window=window)]
    if "flash" in implementation:
        return _flash(replace(call, causal=bool(causal) and q.shape[2] > 1, window=window), arguments)
    if implementation != "eager" and mask is None and causal and q.shape[2] > 1:
        return [_top_left_causal(call, added)]
    return [_with_mask(call, mask, added=added, cross=cross, window=window)]


def _sinks(implementation: str, arguments: Mapping[str, Any]) -> Tensor | None:
    """As the function uses them; transformers' scaled_dot_product_attention has no place for any."""
    sinks: Tensor | None = arguments.get("s_aux")
    if sinks is None or "sdpa" in implementation:
        return None
    sinks = sinks.to_local() if hasattr(sinks, "to_local") else sinks  # of this rank's heads
    return sinks.to(arguments["query"].dtype) if "flash" in implementation else sinks


def of_sdpa(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], entered: Sequence[Tensor] = ()
) -> Call:
    """A call of torch's scaled_dot_product_attention, by a module that was given what `entered`."""
    arguments = dict(zip(_SDPA, args, strict=False)) | dict(kwargs)
    q, k, mask = arguments["query"], arguments["key"], arguments.get("attn_mask")
    if q.ndim not in (2, 3, 4):
        raise LocaterError(
            f"{type(module).__name__} hands queries of shape {tuple(q.shape)} to scaled_dot_product_attention; which "
            "of the sizes is that of the heads is not known, and (batch, heads, tokens, width) would do"
        )
    if q.ndim == 2:
        q, k = q[None], k[None]
    if q.ndim == 3:
        batch = _batch(q, module, entered) or len(q)  # by itself it may as well be (B, Tq, K) of a single head
        q, k = (x.unflatten(0, (batch, -1)) for x in (q, k))
        mask = mask.unflatten(0, (batch, -1)) if mask is not None and mask.ndim == 3 and len(mask) > 1 else mask
    call = Call(q, k, arguments.get("scale"))
    return _top_left_causal(call, None) if arguments.get("is_causal") else _with_mask(call, mask)


def of_softmax(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], entered: Sequence[Tensor], *, cross: bool
) -> tuple[Call, Tensor] | None:
    """A call of torch's softmax, and the logits (B, H, Tq, Tk) with their graph, if that is what they can be.

    What `entered` the module gives B and Tq, and B and H of (B·H, Tq, Tk); a softmax over something else is none.
    """
    x: Tensor = args[0] if args else kwargs["input"]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim not in (-1, x.ndim - 1) or x.ndim not in (3, 4):
        return None
    if x.ndim == 3:
        batch = _batch(x, module, entered)
        if batch is None:
            return None
        x = x.unflatten(0, (batch, -1))
    if entered and entered[0].ndim == 3:  # an image may be cut into windows first
        (b, _, tq, tk), sequences = x.shape, _sequences(entered)
        if (b, tq) not in sequences and (b, tk) not in sequences:
            return None
    return of_logits(x, cross=cross), x


def is_part(call: Call, entered: Sequence[Tensor]) -> bool:
    """Whether logits may be a part of the attention's: of some of the tokens that entered with others."""
    b, _, tq, tk = call.sizes
    return tq > tk or bool(entered and entered[0].ndim == 3 and (b, tq) not in _sequences(entered))


def _sequences(entered: Sequence[Tensor]) -> list[tuple[int, int]]:
    """What B and Tq may be, by what entered: (B, Tq, D), (Tq, B, D), (B, D, Tq), (Tq, D), or images of Tq pixels."""
    one, several, images = ([states.shape for states in entered if states.ndim == n] for n in (2, 3, 4))
    found = [(b, tq) for b, tq, _ in several] + [(b, tq) for tq, b, _ in several] + [(b, tq) for b, _, tq in several]
    found += [(1, tq) for tq, _ in one]
    return found + [(b, x * y) for b, x, y, _ in images] + [(b, x * y) for b, _, x, y in images]


def _batch(x: Tensor, module: nn.Module, entered: Sequence[Tensor]) -> int | None:
    """B of x (B·H, Tq, ·), by what entered."""
    heads = {n for name in _HEADS if isinstance(n := getattr(module, name, None), int)}
    for batch, tokens in _sequences(entered):
        if batch and x.shape[1] == tokens and len(x) % batch == 0 and (not heads or len(x) // batch in heads):
            return batch
    return None


def of_logits(logits: Tensor, *, cross: bool) -> Call:
    """Logits (B, H, Tq, Tk) that a model has computed itself."""
    logits = logits.detach()
    # masks of the lowest number may have been scaled with the logits
    logits = logits.masked_fill(logits < max(-1e30, torch.finfo(logits.dtype).min / 2), -torch.inf)
    b, h, tq, tk = logits.shape
    q, k = logits.new_zeros(b, h, tq, 1), logits.new_zeros(b, 1, tk, 1)
    return Call(q, k, 1.0, bias=logits, real=_real_queries(visible(logits), b, cross=cross))


def of_stack(q: Tensor, k: Tensor, scale: float, real: Tensor) -> Call:
    """Causal attention of the members of a stack: q and k (E, B, H, T, ·), real (E, B, T)."""
    q, k, together = (x.flatten(0, 1) for x in (q, k, real))
    return Call(q, k, scale, causal=True, real=together, members=len(real))


def of_multihead(module: nn.MultiheadAttention, arguments: Mapping[str, Any]) -> tuple[Call, Tensor]:
    """A call of torch's own module, and the states (B, Tq, D) its queries are made of."""
    query, key = arguments["query"], arguments["key"]
    cross = query is not key
    padding, mask = arguments.get("key_padding_mask"), arguments.get("attn_mask")
    if query.is_nested:
        lengths = torch.tensor([len(one) for one in key.unbind()], device=key.device)
        query, key = (torch.nested.to_padded_tensor(one, 0.0) for one in (query, key))
        padding = torch.arange(key.shape[1], device=key.device) >= lengths[:, None]
    elif query.ndim == 2:
        query, key, padding = query[None], key[None], None if padding is None else padding[None]
    elif not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    joint, h = module.in_proj_weight, module.num_heads
    weights = (module.q_proj_weight, module.k_proj_weight) if joint is None else joint.chunk(3)[:2]
    biases = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
    q, k = (
        functional.linear(x, w, b).unflatten(-1, (h, -1)).transpose(1, 2)
        for x, w, b in zip((query, key), weights, biases, strict=True)
    )
    if mask is not None and mask.ndim == 3:
        mask = mask.view(-1, h, *mask.shape[1:])
    given = [one for one in (mask, None if padding is None else padding[:, None, None]) if one is not None]
    added = [additive(~one if one.dtype == torch.bool else one, q.dtype) for one in given]  # True masks, here alone
    sinks = q.new_zeros(h) if module.add_zero_attn else None  # a key of zeros, which nothing masks
    return _with_mask(Call(q, k, sinks=sinks), sum(added[1:], added[0]) if added else None, cross=cross), query


# ---------------------------------------------------------------------- masks


def _of_blocks(mask: Any, call: Call) -> Tensor | None:
    """FlexAttention's mask, a function of positions, as booleans (B or 1, H or 1, Tq, Tk); a tensor stays one."""
    if mask is None or isinstance(mask, Tensor):
        return mask
    from torch.nn.attention.flex_attention import create_mask

    (b, h, *_), (_, _, tq, tk) = mask.shape, call.sizes
    return create_mask(mask.mask_mod, b, h, tq, tk, device=str(call.q.device))


def _top_left_causal(call: Call, added: Tensor | None) -> Call:
    """torch's causal flag: query i attends to keys 0 to i, whatever the lengths."""
    _, _, tq, tk = call.sizes
    call = replace(call, k=call.k[:, :, :tq])
    if added is None and tq <= tk:
        return replace(call, causal=True)
    lower = torch.ones(tq, min(tq, tk), dtype=torch.bool, device=call.q.device).tril()
    return _with_mask(call, lower, added=None if added is None else added[..., :tq])


def _flash(call: Call, arguments: Mapping[str, Any]) -> list[Call]:
    """Flash attention's: padding as (B, Tk), causal aligned to the last key, sequences packed into one or not."""
    mask: Tensor | None = arguments.get("attention_mask")
    if mask is not None:
        call = replace(call, k=call.k[:, :, : mask.shape[1]])
        _, _, tq, tk = call.sizes
        keys = mask[:, mask.shape[1] - tk :].bool()
        return [replace(call, key_mask=keys, real=keys[:, tk - tq :] if tq <= tk else None)]
    starts, positions = arguments.get("cu_seq_lens_q"), arguments.get("position_ids")
    key_starts = arguments.get("cu_seq_lens_k")
    if starts is None and positions is not None and len(call.q) == 1 and call.q.shape[2] > 1:
        zeros = (positions.flatten() == positions.min()).nonzero()[:, 0].tolist()
        starts = [*zeros, positions.numel()] if len(zeros) > 1 else None
        key_starts = starts
    if starts is None or key_starts is None:
        return [call]
    # flattened: a sequence after the other
    q, k = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (call.q, call.k))
    bounds, key_bounds = (x.tolist() if isinstance(x, Tensor) else x for x in (starts, key_starts))
    return [
        replace(call, q=q[:, :, a:b], k=k[:, :, c:d], tokens=slice(a, b))
        for a, b, c, d in zip(bounds, bounds[1:], key_bounds, key_bounds[1:], strict=False)
        if b > a and d > c
    ]


def _with_mask(
    call: Call, mask: Tensor | None, *, added: Tensor | None = None, cross: bool = False, window: int | None = None
) -> Call:
    """The call with a mask, boolean or added, and what the model adds besides (T5's position bias)."""
    if mask is None:
        return call if added is None else replace(call, bias=added.detach())
    b, _, tq, tk = call.sizes
    mask = mask.detach()[..., :tk]
    mask = mask[(None,) * (4 - mask.ndim)]
    attends = visible(mask).expand(-1, -1, tq, -1)
    call = replace(call, real=_real_queries(attends, b, cross=cross))
    if added is not None:
        return replace(call, bias=added.detach() + additive(mask, added.dtype))
    return _without_matrix(call, mask, attends, window) or replace(call, bias=mask.expand_as(attends))


def _without_matrix(call: Call, mask: Tensor, attends: Tensor, window: int | None) -> Call | None:
    """The call with causal, window and key_mask in place of a mask that says no more: they need no T × T."""
    b, _, tq, tk = call.sizes
    if mask.shape[1] != 1 or tq > tk:
        return None
    assert call.real is not None
    counts = call.real[:, None, :, None]  # padded queries may attend to anything
    # some queries at a time: the mask may be the largest tensor there is, and a comparison makes several of its size
    step = max(1, _COMPARED // max(1, b * tk))
    blocks = [slice(start, min(start + step, tq)) for start in range(0, tq, step)]
    if not all(_only_masks(mask if mask.shape[2] == 1 else mask[:, :, rows]) for rows in blocks):
        return None
    attended = [(attends[:, :, rows] & counts[:, :, rows]).any(2) for rows in blocks]
    key_mask = torch.stack(attended).any(0)[:, 0]  # (B, Tk)

    def agrees(plain: Visibility, rows: slice) -> bool:
        wrong = plain.masked(rows, slice(0, tk)) == attends[:, :, rows]
        return not (wrong & counts[:, :, rows]).any()

    for size, causal in itertools.product(dict.fromkeys((None, window)), (True, False)):
        plain = replace(call, causal=causal, window=size, key_mask=key_mask)
        if all(agrees(plain.visibility, rows) for rows in blocks):
            return replace(plain, key_mask=None) if key_mask.all() else plain
    return None


def _only_masks(mask: Tensor) -> bool:
    """Whether it adds nothing to the logits of unmasked keys."""
    return mask.dtype == torch.bool or bool(((mask == 0) | ~visible(mask)).all())


def _real_queries(attends: Tensor, batch: int, *, cross: bool) -> Tensor:
    """(B, Tq): the queries that are no padding, by the keys (B or 1, H or 1, Tq, Tk) that each attends to.

    A token of self-attention attends to itself, and nothing attends to padding. In cross-attention the padding of
    queries does not show; there, and where queries have no keys of their own, those count that attend to any key.
    """
    attends = attends.any(1)
    to_any = attends.any(-1)
    if cross or attends.shape[1] > attends.shape[2]:
        return to_any.expand(batch, -1)
    among = attends[:, :, _own_keys(attends)]  # (B, Tq, Tq): queries' own keys
    to_itself = among.diagonal(dim1=1, dim2=2)
    attended = (among & to_itself[..., None]).any(1)  # by any query that is real
    known = to_itself.any() & (to_itself == attended).all()
    return torch.where(known, to_itself, to_any).expand(batch, -1)


def _own_keys(attends: Tensor) -> Tensor:
    """The key (Tq,) that is each query's own token, by the keys (B, Tq, Tk) that they attend to."""
    _, tq, tk = attends.shape
    key = torch.arange(tk, device=attends.device)
    first = key[:tq]
    if tq == tk:
        return first
    # a cache, perhaps with room left: the last key that is attended to is the last query's own
    cached = (first + torch.where(attends.flatten(0, 1).any(0), key, 0).amax() - (tq - 1)).clamp(min=0)
    # keys of no token, or of another sequence, may come after the tokens' own; only among those is the mask causal then
    after_cached, after_first = (attends[:, :, own].triu(1).any() for own in (cached, first))
    return torch.where(after_cached & ~after_first, first, cached)
