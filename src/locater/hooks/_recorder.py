"""Being there when the attention of a model's modules is computed, whatever computes it.

Hugging Face's modules look their function up in a table, whose entry is replaced by one that calls the original and
tells us; so is the forward of nn.MultiheadAttention. Modules that call softmax or scaled_dot_product_attention
themselves are overheard while they run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
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

from locater.hooks import _calls
from locater.hooks._calls import Call
from locater.hooks._compiling import untraced
from locater.hooks._patching import patch
from locater.hooks._sites import AttentionSite

__all__ = ["Intercepted", "Interceptor", "hidden_states", "in_backward", "intercept"]


@dataclass(frozen=True)
class Intercepted:
    """One attention call of a module, or several that were packed into one. Its tensors have their graph."""

    module: nn.Module
    calls: list[Call]
    states: Tensor | None = None  # (B, Tq, D) that the queries are made of, where they are to be seen
    logits: Tensor | None = None  # (B, H, Tq, Tk), where the module itself hands them to softmax
    product: tuple[Tensor, Tensor] | None = None  # q (…, Tq, K) and k (…, Tk, K) that those are made of, if seen


@dataclass(frozen=True)
class Interceptor:
    """Who hears of attention, and whether it `changes` it."""

    wants: Callable[[nn.Module], bool]
    """Asked once a call whether it is to be told of it: reading one may wait for the device."""

    tell: Callable[[Intercepted, Tensor], Tensor | None]
    """Told of the call and its result: outputs, or probabilities where `logits` are.

    Gives the result that takes its place. None: this softmax was not the attention, and a later one may be.
    """

    changes: bool = True
    """If not, results stay, whatever it gives; and torch.compile leaves it alone, it tells as the code runs."""


def intercept(places: Iterable[AttentionSite], listener: Interceptor, undo: ExitStack) -> None:
    """Lets `listener` hear every attention call of the modules, until undone."""
    for place in places:
        module = place.module
        if place.way == "torch":
            hooks = _Overhearing(module, listener, place.cross)
            begin, end = (f if listener.changes else untraced(f) for f in (hooks.begin, hooks.end))
            undo.callback(hooks.close)
            undo.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(end, always_call=True).remove)
        for implementation, *where in place.functions():
            hear = functools.partial(_told, listener, place.cross, implementation)
            if listener.changes:
                patch(*where).change(module, hear, undo)
            else:
                patch(*where).observe(module, torch.no_grad()(hear), undo)


def in_backward() -> bool:
    """Gradient checkpointing runs forwards again in backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What enters a module, of its forward's arguments."""
    first = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
    return first if isinstance(first, Tensor) and first.is_floating_point() else None


def _told(
    listener: Interceptor,
    cross: bool,
    implementation: str,
    module: nn.Module,
    arguments: Callable[[], Mapping[str, Any]],
    result: Any,
) -> Any:
    if not listener.wants(module):
        return result
    if implementation == "multihead":
        assert isinstance(module, nn.MultiheadAttention)
        call, states = _calls.of_multihead(module, arguments())
        intercepted = Intercepted(module, [call], states)
    else:
        intercepted = Intercepted(module, _calls.of_interface(implementation, arguments(), cross=cross))
    return (listener.tell(intercepted, result[0]), *result[1:])


# ---------------------------------------------------------------------- modules that compute by themselves

_ATTENTION = ("softmax", "scaled_dot_product_attention")
_PRODUCTS = ("matmul", "bmm", "baddbmm")


class _Overhearing:
    """The hooks around a module's forward, between which torch's functions are overheard."""

    def __init__(self, module: nn.Module, listener: Interceptor, cross: bool) -> None:
        self._key = id(module)
        self._listener, self._cross = listener, cross

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.close()  # an interrupt may have ended a forward before its last hook
        if id(module) == self._key and self._listener.wants(module):
            ears = _Ears(self, module, self._listener, self._cross, hidden_states(args, kwargs))
            ears.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends what was begun in this thread: every thread has a stack of modes of its own."""
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, _Ears) and mode.hooks is self:
                mode.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Overhearing:
        """A copy of the module has the same hooks, which do not act for it."""
        return self


class _Ears(TorchFunctionMode):
    """Hears the first softmax over (B, H, Tq, Tk), or scaled_dot_product_attention, and the product before it."""

    def __init__(
        self, hooks: _Overhearing, module: nn.Module, listener: Interceptor, cross: bool, states: Tensor | None
    ) -> None:
        super().__init__()
        self.hooks = hooks
        self._module, self._listener, self._cross, self._states = module, listener, cross, states
        self._hear = self._heard if listener.changes else untraced(self._heard)
        self._product: tuple[Tensor, Tensor] | None = None
        self._done = False

    def close(self) -> None:
        """Leaves the stack of modes, wherever it is: who came later may leave after us."""
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
            told = self._hear(name, args, kwargs, result)
            return told if self._listener.changes else result
        if self._listener.changes and self._product is None and name in _PRODUCTS:
            self._product = _operands(args, kwargs)
        return result

    def _heard(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Tensor:
        if self._done:
            return result
        states, logits = self._states, None
        if name == "softmax":
            batch = len(states) if states is not None and states.ndim == 3 else None
            found = _calls.of_softmax(args, kwargs, batch=batch, cross=self._cross)
            if found is None:
                return result
            call, logits = found
        else:
            call = _calls.of_sdpa(self._module, args, kwargs)
        product = None if logits is None else self._product
        told = self._listener.tell(Intercepted(self._module, [call], states, logits, product), result)
        self._done = told is not None
        return result if told is None else told


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """q and k of a batched product q kᵀ."""
    given = [*args, *(kwargs[key] for key in ("batch1", "batch2", "mat2", "other") if key in kwargs)]
    tensors = [x for x in given if isinstance(x, Tensor)]
    if len(tensors) < 2 or min(tensors[-1].ndim, tensors[-2].ndim) < 3:  # a linear layer's weight has two
        return None
    return tensors[-2], tensors[-1].mT
