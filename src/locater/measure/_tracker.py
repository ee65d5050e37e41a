"""The hooks of an observation: which attention calls of a model are measured, and which recorder gets them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.hooks import (
    HOW,
    AttentionSite,
    Call,
    Intercepted,
    Interceptor,
    RecordLayer,
    Stacked,
    has_compiled,
    hidden_states,
    in_backward,
    intercept,
    of_multihead,
    of_queries,
    of_stack,
    patch,
    untraced,
)


class Recorder(Protocol):
    @property
    def site(self) -> AttentionSite: ...

    def add(self, calls: Sequence[Call], states: Tensor | None) -> None:
        """Takes an intercepted call, several where sequences were packed, and the hidden states that entered."""


class _EveryNth:
    """True at the first call, and at every n-th from there."""

    def __init__(self, n: int) -> None:
        self._n, self._count = n, 0

    def __call__(self) -> bool:
        self._count += 1
        return (self._count - 1) % self._n == 0


@dataclass
class _Site:
    """One attention site, and what is known of its call in progress."""

    recorder: Recorder
    is_due: _EveryNth  # for calls outside of the model's forwards
    recorded: bool = False  # whether any call ever was
    called: bool = False  # since the last call of the encoder layer around it
    awaited: bool = False  # a call to measure has begun, and was not intercepted yet
    entered: Sequence[Tensor] = ()  # hidden states that did

    def record(self, calls: Sequence[Call], states: Tensor | None = None) -> None:
        """A call, or several that were packed into one, with the states that the queries are made of if known."""
        if states is None and calls:
            states = of_queries(self.entered, calls[0])
        self.entered, self.awaited, self.recorded = (), False, True
        self.recorder.add(calls, states)


class _Forward:
    """The model's forward in progress."""

    def __init__(self, every: int) -> None:
        self.is_due = _EveryNth(every)
        self._depth = 0  # a model may call itself
        self.is_measured = False
        self.decoder_mask: Tensor | None = None  # (B, Tq) that it was given
        self.finished = False  # whether one ever came to its end

    def __bool__(self) -> bool:
        return self._depth > 0

    def begin(self, kwargs: Mapping[str, Any]) -> None:
        if not self and not in_backward():
            self.is_measured = self.is_due()
            self.decoder_mask = kwargs.get("decoder_attention_mask")
        self._depth += 1

    def end(self, result: Any) -> None:
        self._depth = max(0, self._depth - 1)
        self.finished |= result is not None  # None is what a forward that failed gives


class Tracker:
    """Hands the attention calls of every n-th forward to the recorders, from `attach` on until it is undone."""

    def __init__(self, model: nn.Module | Stacked, every: int, recorders: Iterable[Recorder]) -> None:
        if not isinstance(every, int) or every < 1:
            raise LocaterError(f"every must be a whole number, 1 or more, got {every!r}")
        self._model, self._forward = model, _Forward(every)
        # layers of a stack have no module of their own
        self._sites = {
            one.site.layer if one.site.way == "stack" else id(one.site.module): _Site(one, _EveryNth(every))
            for one in recorders
        }
        self._active: dict[int, _Site] = {}  # the same while attached: compiled code may keep hooks that were removed

    def __deepcopy__(self, memo: dict[int, Any]) -> Tracker:
        """A copy of the model has the same hooks; they do not act for it, as its modules are others."""
        return self

    def attach(self, undo: ExitStack) -> None:
        model, sites = self._model, [site.recorder.site for site in self._sites.values()]
        undo.callback(self._release)
        self._active = self._sites
        if isinstance(model, Stacked):
            undo.callback(model.watch(self._stack_begins))
            return
        # torch's encoder layer leaves its fast path, and with it its exact output, for any hook on or inside it
        if not isinstance(model, nn.TransformerEncoderLayer):
            undo.callback(model.register_forward_pre_hook(untraced(self._begins), with_kwargs=True).remove)
            undo.callback(model.register_forward_hook(untraced(self._ends), always_call=True).remove)
        entered, left = untraced(self._entered), untraced(self._left)
        intercept(sites, Interceptor(self._wants, self._intercepted, changes=False), undo)
        for site in sites:
            if site.way == "interface":
                undo.callback(site.module.register_forward_pre_hook(entered, with_kwargs=True).remove)
            elif site.way == "torch":
                undo.callback(site.module.register_forward_hook(left, always_call=True).remove)
            if site.encoder_layer is not None:
                kind = nn.TransformerEncoderLayer
                around = patch(kind, "forward", vars(kind)["forward"])
                around.observe(site.encoder_layer, self._encoder_layer_called, undo)

    def _release(self) -> None:
        self._active, self._forward.decoder_mask = {}, None
        for site in self._sites.values():
            site.entered = ()

    def warn_if_nothing_intercepted(self) -> None:
        """If the model ran, or may have run in compiled code."""
        sites = list(self._sites.values())
        ways, ran = {site.recorder.site.way for site in sites}, self._forward.finished
        unnoticed = has_compiled() and not ways.isdisjoint(("torch", "multihead"))
        if (ran or unnoticed) and not any(site.recorded for site in sites):
            what = "ran" if ran else "may have run in code that torch.compile has compiled"
            warnings.warn(
                f"nothing of {type(self._model).__name__} was measured: it {what}, and no call of its attention was "
                f"intercepted, in {sites[0].recorder.site.name} and others; if it is compiled, {HOW}",
                stacklevel=4,
            )

    # ------------------------------------------------------------------ forwards of the model

    def _begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args
        if module is self._model:
            self._forward.begin(kwargs)

    def _ends(self, module: nn.Module, args: Any, result: Any) -> None:
        del args
        if module is self._model:
            self._forward.end(result)

    def _stack_begins(self, real: Tensor) -> RecordLayer | None:
        def record(layer: int, states: Tensor, q: Tensor, k: Tensor, scale: float) -> None:
            site = self._active.get(layer)
            if site is not None:
                site.record([of_stack(q.detach(), k.detach(), scale, real)], states.detach().flatten(0, 1))

        return record if self._forward.is_due() else None

    # ------------------------------------------------------------------ attention calls

    def _is_measured(self, site: _Site) -> bool:
        """Whether this call is; to be asked once a call."""
        if in_backward():
            return False
        return self._forward.is_measured if self._forward else site.is_due()

    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        site = self._active.get(id(module))
        if site is not None and (self._forward.is_measured or not self._forward):
            site.entered = [states.detach() for states in hidden_states(module, args, kwargs)]

    def _wants(self, module: nn.Module) -> bool:
        site = self._active.get(id(module))
        if site is None:
            return False
        site.called, site.awaited = True, self._is_measured(site)
        if not site.awaited:
            site.entered = ()
        return site.awaited

    def _intercepted(self, intercepted: Intercepted, result: Tensor) -> Tensor:
        site, states = self._active[id(intercepted.module)], intercepted.states
        calls = [call.detached() for call in intercepted.calls]
        if site.recorder.site.cross and self._forward:  # where the padding of queries does not show in the call
            calls = [call.with_padding(self._forward.decoder_mask) for call in calls]
        site.record(calls, None if states is None else states.detach())
        return result

    def _left(self, module: nn.Module, args: Any, result: Any) -> None:
        del args
        site = self._active.get(id(module))
        if site is None:
            return
        missed, site.awaited, site.entered = site.awaited, False, ()
        if missed and result is not None and site.recorder.site.is_sure:
            raise LocaterError(
                f"{site.recorder.site.name} ({type(module).__name__}) cannot be observed: it ran without a softmax "
                "over (batch, heads, queries, keys) and without scaled_dot_product_attention; choose other layers=…"
            )

    def _encoder_layer_called(self, layer: Any, named: Callable[[], Mapping[str, Any]], result: Any) -> None:
        """The fast path of torch's encoder layer computes all at once and never calls its attention."""
        del result
        site = self._active.get(id(layer.self_attn))
        if site is None:
            return
        called, site.called = site.called, False
        if called or not self._is_measured(site):
            return
        given = named()
        with torch.no_grad():
            src = layer.norm1(given["src"]) if layer.norm_first else given["src"]
            masks = {"attn_mask": given.get("src_mask"), "key_padding_mask": given.get("src_key_padding_mask")}
            call, states = of_multihead(layer.self_attn, {"query": src, "key": src, **masks})
        site.record([call.detached()], states)
