"""Being there when a model's attention is computed: told of each call, and allowed to change its result.

The one door from this room to how `locater.measure` finds attention (`_sites`) and reads its calls (`_calls`).
Observing leaves all as it was and needs no graph; here a listener may return another result, and the queries and keys
it is told of are the model's own, with their graph.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from locater.measure import _calls, _sites
from locater.measure._calls import Call, visible
from locater.measure._sites import Place, places

__all__ = [
    "Call",
    "Entry",
    "Heard",
    "Listener",
    "Place",
    "entry_of",
    "hands_on",
    "implementation_of",
    "in_backward",
    "interface_place",
    "listen",
    "visible",
]


@dataclass(frozen=True)
class Heard:
    """One attention call of a module, or several that were packed into one."""

    module: nn.Module
    calls: list[Call]
    logits: Tensor | None = None  # (B, H, Tq, Tk), where the module itself hands them to softmax
    product: tuple[Tensor, Tensor] | None = None  # q (…, Tq, K) and k (…, Tk, K) that those are made of, if seen


@dataclass(frozen=True)
class Listener:
    """Asked with the module whether it wants to hear of a call now: reading one may wait for the device.

    Told of it with its result (outputs, or probabilities where `logits` are), it gives the result.
    """

    wants: Callable[[nn.Module], bool]
    tell: Callable[[Heard, Tensor], Tensor]

    def __deepcopy__(self, memo: dict[int, Any]) -> Listener:
        """A copy of the model has copies of its hooks, and nobody who listens."""
        return Listener(_never, self.tell)


def _never(module: nn.Module) -> bool:
    del module
    return False


def listen(model: nn.Module, listener: Listener, undo: ExitStack) -> list[Place]:
    """Lets `listener` hear every attention call of `model`; LocaterError where it cannot be heard."""
    found = places(model)
    open_ears: list[_Ears] = []
    undo.callback(_close, open_ears)
    for place in found:
        if place.way == "interface":
            for implementation, owner, name, function in place.tables():
                told = functools.partial(_told_by_interface, listener, place.cross, implementation)
                entry_of(owner, name, function).add(place.module, told, undo)
        elif place.way == "multihead":
            hook = _MultiheadHook(listener)
            undo.callback(place.module.register_forward_hook(hook, with_kwargs=True).remove)
        else:
            ears = _Overhearing(listener, place.cross, open_ears)
            undo.callback(place.module.register_forward_pre_hook(ears.begin, with_kwargs=True).remove)
            # first, for an observer that came before takes the last mode for its own
            undo.callback(place.module.register_forward_hook(ears.end, always_call=True, prepend=True).remove)
    return found


def in_backward() -> bool:
    """Gradient checkpointing runs forwards again in backward."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass(frozen=True)
class _Attached:
    """Stands for a tensor where `_calls`, which reads for observers, detaches it: here the graph is kept."""

    tensor: Tensor

    def detach(self) -> Tensor:
        return self.tensor


def _attached(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {**arguments, **{name: _Attached(arguments[name]) for name in ("query", "key")}}


# ---------------------------------------------------------------------- Hugging Face's table of functions


class Entry:
    """A function in a table, or in a module's scope, and what is asked of it besides; gone when nothing is."""

    def __init__(self, owner: Any, name: str, original: Callable[..., Any]) -> None:
        self.owner, self.name, self.original = owner, name, original
        self.listeners: weakref.WeakKeyDictionary[nn.Module, list[Callable[..., Any]]] = weakref.WeakKeyDictionary()
        self.users = self.replacements = 0
        self.instead: Callable[..., Any] | None = None  # for calls with a softcap
        self._before = owner.get(name)

        @functools.wraps(original)
        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            compute = original if self.instead is None or kwargs.get("softcap") is None else self.instead
            result = compute(module, *args, **kwargs)
            for listener in self.listeners.get(module, ()):
                result = listener(original, (module, *args), kwargs, result)
            return result

        self.attend = attend
        owner[name] = attend

    def add(self, module: nn.Module, listener: Callable[..., Any], undo: ExitStack) -> None:
        """Lets `listener` hear of the module's calls."""
        listeners = self.listeners.setdefault(module, [])
        listeners.append(listener)
        undo.callback(listeners.remove, listener)
        self._keep(module, undo)

    def replace(self, module: nn.Module, instead: Callable[..., Any], undo: ExitStack) -> None:
        """Calls with a softcap are computed by another function."""
        self.replacements += 1
        self.instead = instead
        self._keep(module, undo, replaced=True)

    def in_place(self) -> bool:
        """Whether calls come by here; somebody may have wrapped it, or put back what was there before."""
        function = self.owner.get(self.name)
        while function is not None and function is not self.attend:
            function = getattr(function, "__wrapped__", None)
        return function is not None

    def _keep(self, module: nn.Module, undo: ExitStack, *, replaced: bool = False) -> None:
        """Keeps the entry in its place until undone, or until the module is no more."""
        self.users += 1
        leave = weakref.finalize(module, self._leave, replaced)
        leave.atexit = False
        undo.callback(leave)

    def _leave(self, replaced: bool) -> None:
        self.users -= 1
        self.replacements -= replaced
        if self.replacements == 0:
            self.instead = None
        if self.users == 0:
            if _ENTRIES.get((id(self.owner), self.name)) is self:
                del _ENTRIES[id(self.owner), self.name]
            if self.owner.get(self.name) is not self.attend:
                return  # somebody replaced it after us: theirs stays, and ours passes calls on
            if self._before is None:
                del self.owner[self.name]
            else:
                self.owner[self.name] = self._before


_ENTRIES: dict[tuple[int, str], Entry] = {}


def entry_of(owner: Any, name: str, original: Callable[..., Any]) -> Entry:
    """The entry of ours that is in place, or a new one."""
    found = _ENTRIES.get((id(owner), name))
    if found is None or not found.in_place():
        found = _ENTRIES[id(owner), name] = Entry(owner, name, original)
    return found


def _named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, those of **kwargs among the others."""
    signature = inspect.signature(function)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(parameter.name, {}))
    return bound


def _told_by_interface(
    listener: Listener,
    cross: bool,
    implementation: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> Any:
    module = args[0]
    if not listener.wants(module):
        return result
    calls = _calls.of_interface(implementation, _attached(_named(function, args, kwargs)), cross=cross)
    return (listener.tell(Heard(module, calls), result[0]), *result[1:])


def interface_place(name: str, module: nn.Module) -> Place | None:
    """The place of a module that looks its function up in the table, whether or not it can be listened to."""
    return Place(name, module, 0, "self", "interface") if _sites._uses_interface(module) else None


def implementation_of(module: nn.Module) -> str:
    return _sites._implementation(module)


def hands_on(module: nn.Module, attribute: str) -> bool:
    """Whether the module's forward reads one of its attributes."""
    function = _sites._forward(module)
    return function is not None and attribute in function.__code__.co_names


# ---------------------------------------------------------------------- torch's own module

_MULTIHEAD = inspect.signature(nn.MultiheadAttention.forward)


class _MultiheadHook:
    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        assert isinstance(module, nn.MultiheadAttention)
        if not self._listener.wants(module):
            return None
        arguments = _MULTIHEAD.bind(module, *args, **kwargs).arguments
        call, _ = _calls.of_multihead(module, arguments)
        if torch.is_grad_enabled() and not arguments["query"].is_nested:
            q, k = _multihead_projections(module, arguments["query"], arguments["key"])
            call = replace(call, q=q, k=k)
        return (self._listener.tell(Heard(module, [call]), result[0]), *result[1:])


def _multihead_projections(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (B, H, T, K) with their graph: the module makes them out of sight."""
    d = module.embed_dim
    same, bias = module.in_proj_weight is not None, module.in_proj_bias
    w_q = module.in_proj_weight[:d] if same else module.q_proj_weight
    w_k = module.in_proj_weight[d : 2 * d] if same else module.k_proj_weight
    b_q, b_k = (None, None) if bias is None else (bias[:d], bias[d : 2 * d])

    def heads(x: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        x = functional.linear(x, weight, offset).unflatten(-1, (module.num_heads, -1))
        x = x[None] if x.ndim == 3 else x if module.batch_first else x.transpose(0, 1)  # (B, T, H, K)
        return x.transpose(1, 2)

    return heads(query, w_q, b_q), heads(key, w_k, b_k)


# ---------------------------------------------------------------------- modules that compute by themselves


class _Overhearing:
    """The hooks around a module's forward, between which torch's functions are overheard."""

    def __init__(self, listener: Listener, cross: bool, open_ears: list[_Ears]) -> None:
        self._listener, self._cross = listener, cross
        self._open = open_ears  # of all modules: they do not run within each other, so there is one or none

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _close(self._open)  # an interrupt may have ended a forward before its last hook
        if not self._listener.wants(module):
            return
        states = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
        batch = len(states) if isinstance(states, Tensor) and states.ndim == 3 else None
        ears = _Ears(module, self._listener, self._cross, batch)
        self._open.append(ears)
        ears.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *_: Any) -> None:
        _close(self._open)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Overhearing:
        return _Overhearing(copy.deepcopy(self._listener, memo), self._cross, [])


def _close(open_ears: list[_Ears]) -> None:
    while open_ears:
        open_ears.pop().close()


class _Ears(TorchFunctionMode):
    """Hears the first softmax over (B, H, Tq, Tk), or scaled_dot_product_attention, and the product before it."""

    def __init__(self, module: nn.Module, listener: Listener, cross: bool, batch: int | None) -> None:
        super().__init__()
        self._module, self._listener, self._cross, self._batch = module, listener, cross, batch
        self._product: tuple[Tensor, Tensor] | None = None
        self._done = False

    def close(self) -> None:
        """Leaves the stack of modes, wherever it is: an observer that came later leaves after us."""
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
        if self._done or name not in ("softmax", "scaled_dot_product_attention", "matmul", "bmm", "baddbmm"):
            return result
        heard = None
        if name == "scaled_dot_product_attention":
            arguments = _SDPA.bind(*args, **kwargs).arguments
            heard = Heard(self._module, [_calls.of_sdpa(_attached(arguments))])
        elif name == "softmax":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            logits = self._logits(args[0] if args else kwargs["input"], dim)
            if logits is not None:
                call = _calls.of_logits(logits, cross=self._cross)
                heard = Heard(self._module, [call], logits, self._product)
        elif self._product is None:
            self._product = _operands(args, kwargs)
        if heard is None:
            return result
        self._done = True
        return self._listener.tell(heard, result)

    def _logits(self, x: Tensor, dim: int | None) -> Tensor | None:
        if dim not in (-1, x.ndim - 1) or x.ndim not in (3, 4):
            return None
        if x.ndim == 3:  # (B·H, Tq, Tk)
            if self._batch is None or len(x) % self._batch:
                return None
            x = x.unflatten(0, (self._batch, -1))
        return x if self._cross or x.shape[2] <= x.shape[3] else None


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """q and k of a batched product q kᵀ."""
    given = [*args, *(kwargs[key] for key in ("batch1", "batch2", "mat2", "other") if key in kwargs)]
    tensors = [x for x in given if isinstance(x, Tensor)]
    if len(tensors) < 2 or min(tensors[-1].ndim, tensors[-2].ndim) < 3:  # a linear layer's weight has two
        return None
    return tensors[-2], tensors[-1].mT


def _sdpa_signature(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None: ...


_SDPA = inspect.signature(_sdpa_signature)
