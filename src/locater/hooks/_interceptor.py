"""Intercepting the attention calls of a model's modules, whatever computes them.

Hugging Face's modules look their function up in a table, whose entry is patched; so is the forward of
nn.MultiheadAttention. For modules that call softmax or scaled_dot_product_attention themselves, a torch function mode
is active while their forward runs.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from locater.errors import LocaterError
from locater.hooks import _calls
from locater.hooks._calls import Call
from locater.hooks._compiling import untraced
from locater.hooks._patching import patch
from locater.hooks._sites import AttentionSite

_OF_QUERIES = re.compile(r"(q|query|queries|x|tgt|target|latents?|hidden_states?)(_states|_embeds|_embeddings)?")


@dataclass(frozen=True)
class Intercepted:
    """One attention call of a module, or several that were packed into one. Its tensors have their graph."""

    module: nn.Module
    calls: list[Call]
    states: Tensor | None = None  # hidden states that entered: those of the queries (B, Tq, D), where they show
    logits: Tensor | None = None  # (B, H, Tq, Tk), where the module itself hands them to softmax
    product: tuple[Tensor, Tensor] | None = None  # q (…, Tq, K) and k (…, Tk, K) that those are made of, if known


@dataclass(frozen=True)
class Interceptor:
    wants: Callable[[nn.Module], bool]
    """Asked once a call whether to intercept it: reading one may wait for the device."""

    handle: Callable[[Intercepted, Tensor], Tensor]
    """Given the call and its result, which are outputs, or probabilities where there are `logits`; returns the result
    to use."""

    changes: bool = True
    """If not, results stay, whatever `handle` returns; and torch.compile does not trace it, but calls it."""


def intercept(sites: Iterable[AttentionSite], interceptor: Interceptor, undo: ExitStack) -> None:
    """Hands every attention call of the sites to the interceptor, until undone."""
    for site in sites:
        module = site.module
        if site.way == "torch":
            hooks = _ForwardHooks(module, interceptor, site.cross)
            begin, end = (f if interceptor.changes else untraced(f) for f in (hooks.begin, hooks.end))
            undo.callback(hooks.end)
            undo.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(end, always_call=True).remove)
        for implementation, *where in site.functions():
            hook = functools.partial(_on_call, interceptor, site.cross, implementation)
            if interceptor.changes:
                patch(*where).change(module, hook, undo)
            else:
                patch(*where).observe(module, torch.no_grad()(hook), undo)


def in_backward() -> bool:
    """Gradient checkpointing runs forwards again in backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def hidden_states(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """What enters a module, of its forward's arguments: the first, and others that by name queries are made of."""
    first = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
    named = {**dict(zip(_parameters(type(module).forward), args, strict=False)), **kwargs}
    others = (x for name, x in named.items() if _OF_QUERIES.fullmatch(name) and x is not first)
    return [x for x in (first, *others) if isinstance(x, Tensor) and x.is_floating_point()]


@functools.lru_cache(maxsize=1024)
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a forward's arguments, without self."""
    return tuple(inspect.signature(forward).parameters)[1:]


def of_queries(entered: Sequence[Tensor], call: Call) -> Tensor | None:
    """Of what entered a module, the states (B, Tq, D) that the queries are made of; else the first."""
    b, _, tq, _ = call.sizes
    several = [states for states in entered if states.ndim == 3]
    swapped = [states.transpose(*dims) for dims in ((0, 1), (1, 2)) for states in several]  # (Tq, B, D), (B, D, Tq)
    return next((states for states in (*several, *swapped) if states.shape[:2] == (b, tq)), next(iter(entered), None))


def _on_call(
    interceptor: Interceptor,
    cross: bool,
    implementation: str,
    module: nn.Module,
    arguments: Callable[[], Mapping[str, Any]],
    result: Any,
) -> Any:
    if not interceptor.wants(module):
        return result
    if implementation == "multihead":
        assert isinstance(module, nn.MultiheadAttention)
        call, states = _calls.of_multihead(module, arguments())
        intercepted = Intercepted(module, [call], states)
    else:
        intercepted = Intercepted(module, _calls.of_interface(implementation, arguments(), cross=cross))
    return (interceptor.handle(intercepted, result[0]), *result[1:])


# ---------------------------------------------------------------------- modules that call torch's functions

_ATTENTION = ("softmax", "scaled_dot_product_attention")
_PRODUCTS = ("matmul", "bmm", "baddbmm")


class _ForwardHooks:
    """Hooks around a module's forward: a mode that intercepts torch's functions begins and ends with it."""

    def __init__(self, module: nn.Module, interceptor: Interceptor, cross: bool) -> None:
        self._key = id(module)
        self.interceptor, self.cross = interceptor, cross

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.end()  # an interrupt may have ended a forward before its last hook
        if id(module) == self._key and self.interceptor.wants(module):
            mode = _FunctionMode(self, module, hidden_states(module, args, kwargs))
            mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *_: Any) -> None:
        """In this thread: every thread has a stack of modes of its own."""
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, _FunctionMode) and mode.hooks is self:
                mode.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> _ForwardHooks:
        """A copy of the module has the same hooks, which do not act for it."""
        return self


class _FunctionMode(TorchFunctionMode):
    """Intercepts the first softmax over (B, H, Tq, Tk), or scaled_dot_product_attention, and the product before it."""

    def __init__(self, hooks: _ForwardHooks, module: nn.Module, entered: Sequence[Tensor]) -> None:
        super().__init__()
        self.hooks, self._module, self._entered = hooks, module, entered
        self._changes = hooks.interceptor.changes
        self._handle = self._intercept if self._changes else untraced(self._intercept)
        self._product: tuple[Tensor, Tensor] | None = None
        self._done = False
        self._part: Call | None = None  # what was intercepted, if it may be a part of the attention

    def close(self) -> None:
        """Leaves the stack of modes from wherever it stands: modes above it may be closed later."""
        self._done = True
        above = []
        while (top := _get_current_function_mode()) is not None and top is not self:
            above.append(_pop_mode())
        if top is self:
            _pop_mode()
        for mode in reversed(above):
            _push_mode(mode)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _ATTENTION:
            handled = self._handle(name, args, kwargs, result)
            return handled if self._changes else result
        if self._changes and self._product is None and name in _PRODUCTS:
            self._product = _operands(args, kwargs)
        return result

    def _intercept(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Tensor:
        if self._done:
            self._refuse_second(name, args, kwargs)
            return result
        logits, product = None, None
        if name == "softmax":
            found = _calls.of_softmax(self._module, args, kwargs, self._entered, cross=self.hooks.cross)
            if found is None:
                return result
            (call, logits), product = found, self._product
            self._part = call if not self.hooks.cross and _calls.is_part(call, self._entered) else None
        else:
            call = _calls.of_sdpa(self._module, args, kwargs, self._entered)
        self._done = True
        intercepted = Intercepted(self._module, [call], of_queries(self._entered, call), logits, product)
        return self.hooks.interceptor.handle(intercepted, result)

    def _refuse_second(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Attention that is put together of several softmaxes, as Nyström's and BigBird's is, is none of them."""
        x = (args[0] if args else kwargs.get("input")) if name == "softmax" else None
        if self._part is not None and x is not None and x.ndim > 3 and len(x) == self._part.sizes[0]:
            raise LocaterError(
                f"{type(self._module).__name__} cannot be observed: it puts its attention together of several softmaxes"
            )


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """q and k of a batched product q kᵀ."""
    given = [*args, *(kwargs[key] for key in ("batch1", "batch2", "mat2", "other") if key in kwargs)]
    tensors = [x for x in given if isinstance(x, Tensor)]
    if len(tensors) < 2 or min(tensors[-1].ndim, tensors[-2].ndim) < 3:  # a linear layer's weight has two
        return None
    return tensors[-2], tensors[-1].mT
