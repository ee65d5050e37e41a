"""Attention modules that are worked on together, because they are of one shape and trained alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from torch import Tensor

from locater.control._parameters import is_sharded, projections
from locater.models import Attention, Norm, Projection, Rope

RateOf: TypeAlias = Callable[[Tensor], int | None]
"""Which of some learning rates a parameter has; None: it is not trained."""

Rates: TypeAlias = tuple[int | None, int | None]
Ids: TypeAlias = set[int]

# modules up to this size are stacked, and as much again of what is made of them: small ones wait for launches
_STACK_BYTES = {"cuda": 512 << 20}
_CPU_STACK_BYTES = 64 << 20


@dataclass(eq=False)
class Group:
    """Modules of one shape, and which rates W_Q, W_K and their biases have; None where they stay as they are."""

    members: list[Attention]
    rates: Rates
    biases: Rates
    computed: Ids = field(default_factory=set)  # the trained parameters that weights are computed from
    with_biases: ClassVar[bool] = True  # whether biases are changed, too

    @property
    def trained(self) -> tuple[bool, bool]:
        return self.rates[0] is not None, self.rates[1] is not None

    def stacks(self) -> Iterator[list[Attention]]:
        """As many members at a time as are worth stacking; sharded ones are gathered one by one."""
        tensor, size = self.members[0].key.tensor, 1
        if not is_sharded(tensor):
            each = sum(4 * one.weight.numel() for one in projections(self.members[0]))
            size = max(1, _STACK_BYTES.get(tensor.device.type, _CPU_STACK_BYTES) // (2 * each))
        return (self.members[start : start + size] for start in range(0, len(self.members), size))


G = TypeVar("G", bound=Group)


class Groups(Generic[G]):
    """The groups of some modules; found again only when a parameter has changed."""

    def __init__(self, attentions: Sequence[Attention], kind: type[G]) -> None:
        self._attentions, self._kind = attentions, kind
        parts = [one for attention in attentions for one in projections(attention)]
        biases = [bias for one in parts if (bias := one.bias_tensor) is not None and kind.with_biases]
        self.tensors = [*(tensor for one in parts for tensor in one.tensors), *biases]
        self._known: dict[Hashable, tuple[list[Any], list[G]]] = {}

    def __call__(self, rate_of: RateOf, key: Hashable) -> list[G]:
        """`key` stands for `rate_of`, which may be made anew each time."""
        state = [(t.requires_grad, t.dtype, t.device, rate_of(t)) for t in self.tensors]
        known = self._known.get(key)
        if known is None or known[0] != state:
            if len(self._known) > 8:  # somebody hands over a new function each time
                self._known.clear()
            known = self._known[key] = (state, list(self._find(rate_of)))
        return known[1]

    def forget(self) -> None:
        """What `rate_of` belongs to, an optimizer, may be no more needed."""
        self._known.clear()

    def _find(self, rate_of: RateOf) -> Iterator[G]:
        def rate(tensor: Tensor | None) -> int | None:
            return rate_of(tensor) if tensor is not None and tensor.requires_grad else None

        def weight_rate(one: Projection) -> int | None:
            return next((found for tensor in one.tensors if (found := rate(tensor)) is not None), None)

        found: dict[Hashable, G] = {}
        uses: defaultdict[int, int] = defaultdict(int)
        for attention in self._attentions:
            parts = projections(attention)
            query, key = parts[0], parts[-1]
            rates = weight_rate(query), weight_rate(key)
            if rates == (None, None):
                continue
            biases = rate(query.bias_tensor), rate(key.bias_tensor)
            stored = {id(t) for one in parts for t in (*one.tensors, one.bias_tensor) if t is not None}
            # a parameter that several modules share is written by one module of a group at a time
            nth_use = 1 + max(uses[one] for one in stored)
            uses.update(dict.fromkeys(stored, nth_use))
            kind = (
                *((one.shape, one.tensor.dtype, one.tensor.device, one.bias_tensor is None) for one in parts),
                *(one.computed for one in parts), attention.one_input,
                rates, biases, attention.scale, _kind(attention.input_norm), _layout(attention.rope), nth_use,
            )  # fmt: skip
            group = found.setdefault(kind, self._kind([], rates, biases))
            group.members.append(attention)
            group.computed.update(id(t) for one in parts if one.computed for t in one.tensors if rate(t) is not None)
        yield from found.values()


def _kind(norm: Norm | None) -> tuple[bool, ...]:
    return () if norm is None else (norm.centred, norm.stored is None, norm.bias is None)


def _layout(rope: Rope | None) -> tuple[int, bool] | None:
    return None if rope is None else (rope.pairs, rope.interleaved)
