"""What a forward really compares: every softmax over q·k, with the projections that q and k come from.

Seen at the level of torch's own operators, whatever module, function or backend the model is written with: each
product with a parameter begins a path; a product of two such paths that ends in a softmax is attention.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Compared", "Projected", "compared"]

_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot"}
_SOFTMAX = {"_softmax", "_safe_softmax"}


@dataclass(frozen=True, eq=False)
class Projected:
    """A product of activations with a parameter."""

    weight: str  # the parameter's name
    states: Tensor  # (…, D)
    out: Tensor  # (…, outputs), its bias added
    transposed: bool  # the parameter is stored as (D, outputs)
    start: int = 0  # of the parameter's outputs, where only some are used
    bias: str | None = None
    norm: tuple[str, ...] = ()  # parameters that made the states, since the last product
    order: int = 0  # the later, the larger
    after: frozenset[str] = frozenset()  # weights of the layers whose outputs the states are made of
    given: bool = False  # no parameter made the states: positions, or what the model is called with


@dataclass(frozen=True, eq=False)
class Product:
    """q·k of heads, or of queries and what stands for positions."""

    q: Tensor  # (N, Tq, K)
    k: Tensor  # (N, Tk, K)
    out: Tensor
    paths: tuple[Path, Path]
    module: str  # innermost of those whose forward runs
    states: Tensor | None  # what entered it

    @property
    def of_positions(self) -> bool:
        """Whether what queries are compared with is made of no parameters before its layer."""
        return all(source.given for source in self.paths[1].sources)


@dataclass(frozen=True)
class Path:
    """Where a tensor comes from, since the last product with a parameter."""

    sources: frozenset[Projected] = frozenset()
    parameters: tuple[str, ...] = ()  # met on the way, in order
    products: tuple[Product, ...] = ()  # logits
    capped: bool = False  # by tanh, since the product
    clamped: bool = False  # since the projection

    def __or__(self, other: Path) -> Path:
        if self is other:
            return self
        known = tuple(name for name in self.parameters if name not in other.parameters)
        products = self.products + tuple(one for one in other.products if one not in self.products)
        flags = self.capped or other.capped, self.clamped or other.clamped
        return Path(self.sources | other.sources, known + other.parameters, products, *flags)


@dataclass(frozen=True, eq=False)
class Compared:
    """One softmax over q·k."""

    product: Product
    logits: Tensor  # as softmax is given them
    parameters: tuple[str, ...]  # met between the product and softmax
    capped: bool = False  # by tanh between them
    others: tuple[Product, ...] = ()  # that were added to it

    @property
    def query(self) -> Path:
        return self.product.paths[0]

    @property
    def key(self) -> Path:
        return self.product.paths[1]


class _Flow(TorchDispatchMode):
    def __init__(self, parameters: Mapping[int | None, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters = parameters  # by the address of their storage
        self.paths: Any = WeakIdKeyDictionary()
        self.found: list[Compared] = []
        self.ran: set[str] = set()
        self.order = itertools.count()
        self.modules: list[tuple[str, Tensor | None]] = []

    def begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point())
        self.modules.append((name, next(given, None)))
        self.ran.add(name)

    def end(self, *_: Any) -> None:
        self.modules.pop()

    def parameter(self, x: Tensor) -> str | None:
        return self.parameters.get(_address(x))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if name in _SOFTMAX:
            self._softmax(given[0])
        path = self._path(name, given, made)
        if path is not None:
            written = [base for x in made if name.endswith("_") and (base := x._base) is not None]
            for x in written:  # a part of it
                self.paths[x] = self.paths.get(x, path) | path
            for x in made:
                if self.parameter(x) is None:
                    self.paths[x] = path
        return out

    def _softmax(self, x: Tensor) -> None:
        path = self.paths.get(x)
        if path is None or not path.products:
            return
        product = next((one for one in path.products if not one.of_positions), path.products[0])
        if x.shape[-1] >= product.k.shape[-2]:
            others = tuple(one for one in path.products if one is not product)
            self.found.append(Compared(_by_head(product, x), x.clone(), path.parameters, path.capped, others))

    def _path(self, name: str, given: list[Tensor], made: list[Tensor]) -> Path | None:
        if not made or not (made[0].is_floating_point() or made[0].is_complex()):
            return None
        if name in _PRODUCTS:
            return self._product(given, made[0])
        if name == "convolution" and (weight := self.parameter(given[1])) is not None:
            return Path(frozenset([Projected(weight, given[0], made[0], False)]))
        path: Path | None = None
        for x in sorted(given, key=lambda x: self.parameter(x) is not None):  # parameters met here come last
            if not (x.is_floating_point() or x.is_complex()):
                continue
            stored = self.parameter(x)
            one = Path(parameters=(stored,)) if stored is not None else self.paths.get(x)
            if one is not None:
                path = one if path is None else path | one
        if path is not None and path.products and name in _SOFTMAX:
            return Path()
        if path is not None and path.products and name == "tanh":
            path = replace(path, capped=True)
        if path is not None and path.sources and name in ("clamp", "clamp_", "hardtanh", "hardtanh_"):
            path = replace(path, clamped=True)
        return path

    def _product(self, given: list[Tensor], out: Tensor) -> Path | None:
        *added, a, b = given
        stored_a, stored_b = self.parameter(a), self.parameter(b)
        if stored_b is not None or stored_a is not None:
            swapped = stored_b is None
            weight, states = (a, b) if swapped else (b, a)
            owner = stored_a if swapped else stored_b
            assert owner is not None
            before = self.paths.get(states)
            bias = next((n for x in added if (n := self.parameter(x)) is not None), None)
            start = int(weight.storage_offset()) // (weight.shape[0] if weight.ndim == 2 else 1)
            transposed = weight.ndim == 2 and weight.is_contiguous() and not swapped and weight.shape[1] > 1
            norm = () if before is None else before.parameters
            after = frozenset() if before is None else frozenset(source.weight for source in before.sources)
            rest = bias, norm, next(self.order), after, before is None
            made = Projected(owner, states, out, transposed, start, *rest)
            return Path(frozenset([made]))
        paths = self.paths.get(a), self.paths.get(b)
        if None in paths or any(path.products for path in paths):
            return None
        if not all(path.sources for path in paths):  # queries with a table of positions
            return Path(parameters=next((path.parameters for path in paths if not path.sources), ()))
        product = Product(a, b.mT, out, paths, *(self.modules[-1] if self.modules else ("", None)))
        return Path(products=(product,))


def _by_head(product: Product, logits: Tensor) -> Product:
    """Where heads share one key, einsum takes the queries of all heads as rows of one product."""
    rows, tokens = product.q.shape[1], logits.shape[-2]
    if logits.ndim != 4 or rows == tokens or rows % tokens:
        return product
    q = product.q.unflatten(1, (-1, tokens)).flatten(0, 1)
    return replace(product, q=q, k=product.k.repeat_interleave(rows // tokens, 0))


def _address(x: Tensor) -> int | None:
    """Of its storage; None for a tensor that wraps others."""
    try:
        return x.untyped_storage().data_ptr()
    except RuntimeError:
        return None


class _ByProducts(TorchFunctionMode):
    """Attention in one call of torch's is computed by products and a softmax, whatever kernel a module asks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if getattr(func, "__name__", "") != "scaled_dot_product_attention":
            return func(*args, **(kwargs or {}))
        with sdpa_kernel(SDPBackend.MATH):
            return func(*args, **(kwargs or {}))


@torch.no_grad()
def compared(model: nn.Module, run: Callable[[], Any]) -> tuple[list[Compared], set[str]]:
    """Every softmax over q·k of one run of a model, in order; and the names of the modules that ran."""
    parameters = {_address(p): name for name, p in reversed(list(model.named_parameters()))}
    parameters.pop(None, None)
    flow = _Flow(parameters)
    with ExitStack() as undo:
        for name, module in model.named_modules():
            begin = functools.partial(flow.begin, name)
            undo.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(flow.end, always_call=True).remove)
        undo.enter_context(_ByProducts())
        undo.enter_context(flow)
        run()
    return flow.found, flow.ran
