"""Watching the attention of a running model, whatever computes it.

    with observe(model) as seen:
        model(**batch)
    seen.table()

The model's own attention function runs as ever; what it was given is measured beside it. Three ways lead there: Hugging
Face models look their function up in a table, and the table's entry is replaced by one that calls the original and
tells us; modules that call softmax or scaled_dot_product_attention themselves are overheard while they run; and
nn.MultiheadAttention's forward tells us its arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from locater.errors import LocaterError
from locater.measure import _calls
from locater.measure._sites import Place, places
from locater.measure._tally import HeadTally, TokenTally
from locater.measure._taps import Listener, tap

if TYPE_CHECKING:
    import pandas

__all__ = ["Observation", "observe"]


@contextmanager
def observe(
    model: nn.Module, every: int = 1, layers: Sequence[int] | None = None, queries: Sequence[int] | None = None
) -> Iterator[Observation]:
    """Statistics of every attention head of `model` while the block runs; outputs and gradients stay bitwise the same.

    `every`: only the first of so many forwards of the model is measured. `layers`: only those, by number. `queries`:
    for which ρ is kept, as rows of a call, negative ones counted from each sequence's last token; that alone unless
    given.

    Works with any backend of Hugging Face's attention interface (sdpa, flash, eager), modules that call softmax or
    scaled_dot_product_attention themselves, and nn.MultiheadAttention; in training, also with gradient checkpointing
    (what backward computes again does not count twice), and in generation with a cache. Calls that are in no forward of
    `model`, such as those of a part of it, are counted module by module. A module that layers share counts for all of
    them under one name. torch.compile is not looked into: compiled code may run without telling.

    A model whose attention cannot be observed raises LocaterError on entering. On leaving, also by an exception, all is
    as it was; the statistics remain.
    """
    seen = Observation(model, every, layers, queries)
    with ExitStack() as undo:
        seen._attach(undo)
        yield seen


Keep: TypeAlias = Callable[[Place, Sequence[_calls.Call], Tensor | None], None]
"""Also told of each measured call, with the hidden states that entered the module."""


class Observation:
    """What `observe` has seen so far; padding left out where the masks of the calls show it."""

    def __init__(
        self,
        model: nn.Module,
        every: int,
        layers: Sequence[int] | None,
        queries: Sequence[int] | None,
        keep: Keep | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise LocaterError(f"every must be a whole number, 1 or more, got {every!r}")
        self._queries = (-1,) if queries is None else tuple(int(query) for query in queries)
        self._model, self._every = model, every
        self._watches = {id(place.module): _Watch(place, keep) for place in places(model, layers)}
        self._forwards = 0
        self._depth = 0  # of forwards of the model in progress
        self._measured = False  # whether the one in progress is
        self._decoder_mask: Tensor | None = None  # (B, Tq) that the one in progress was given

    # ------------------------------------------------------------------ results

    def table(self) -> pandas.DataFrame:
        """A row a head of every module that was called.

        module, layer, head, kind (self, cross, encoder, decoder); means over queries of entropy (nats), of
        entropy_share (entropy / ln of the number of keys seen, queries with one key left out) and of logsumexp;
        max_logit, the largest; queries, how many there were.
        """
        import pandas

        names = ["module", "layer", "head", "kind", "entropy", "entropy_share", "max_logit", "logsumexp", "queries"]
        rows = []
        for watch in self._watches.values():
            if watch.heads.queries is None:
                continue
            place, columns = watch.place, {name: x.tolist() for name, x in watch.heads.columns().items()}
            for head in range(len(columns["entropy"])):
                values = {name: column[head] for name, column in columns.items()}
                rows.append({"module": place.name, "layer": place.layer, "head": head, "kind": place.kind, **values})
        return pandas.DataFrame(rows, columns=names)

    def tokens(self) -> pandas.DataFrame:
        """A row an attention module: how alike the tokens are that enter it, averaged over sequences.

        rank_residual is `measure.rank_residual`. effective_rank is (Σσ²)² / Σσ⁴ of the singular values σ of the
        tokens less their mean: the exponential of the second-order (Rényi) entropy of σ²/Σσ²; it is n where n
        directions are equally strong, and needs no singular value decomposition. mean_cosine is over pairs of
        different tokens. Sequences of fewer than two tokens, as in generation with a cache, do not count.
        """
        import pandas

        names = ["module", "layer", "kind", "rank_residual", "effective_rank", "mean_cosine", "sequences"]
        rows = []
        for watch in self._watches.values():
            columns = watch.tokens.columns()
            if columns is not None:
                place = watch.place
                rows.append({"module": place.name, "layer": place.layer, "kind": place.kind, **columns})
        return pandas.DataFrame(rows, columns=names)

    def rho(self, module: str, query: int = -1) -> NDArray[np.float64]:
        """Measured ρ (heads, Tk): the share of all sequences seen with z in [0, 1], for one query and each key.

        Keys are counted from the sequence's first token, padding before it left out; a key counts for the sequences
        whose query sees it. Where no query saw the key, ρ is NaN; calls with more keys make the array longer.
        """
        watch = next((watch for watch in self._watches.values() if watch.place.name == module), None)
        if watch is None:
            known = ", ".join(watch.place.name for watch in self._watches.values())
            raise LocaterError(f"no attention module {module!r} is observed; these are: {known}")
        if query not in self._queries:
            raise LocaterError(f"ρ was kept for the queries {self._queries}, not for {query}: ask observe for it")
        if watch.heads.queries is None:
            raise LocaterError(f"{module} was not called while observed: there is no ρ of it yet")
        return watch.heads.rho(query).double().cpu().numpy()

    def reset(self) -> None:
        """Forgets what was seen; the count of forwards goes on."""
        for watch in self._watches.values():
            watch.heads, watch.tokens = HeadTally(), TokenTally()

    # ------------------------------------------------------------------ listening

    def _attach(self, undo: ExitStack) -> None:
        model = self._model
        undo.callback(self._forget_calls)
        # torch's encoder layer leaves its fast path, and with it its exact output, for any hook on or inside it
        if not isinstance(model, nn.TransformerEncoderLayer):
            undo.callback(model.register_forward_pre_hook(self._forward_begins, with_kwargs=True).remove)
            undo.callback(model.register_forward_hook(self._forward_ends, always_call=True).remove)
        interface = {}
        for watch in self._watches.values():
            module = watch.place.module
            if watch.place.way == "interface":
                undo.callback(module.register_forward_pre_hook(self._entered, with_kwargs=True).remove)
                for implementation, owner, name, function in watch.place.tables():  # a family's modules share them
                    interface[id(owner), name] = implementation, owner, name, function
            elif watch.place.way == "torch":
                undo.callback(module.register_forward_pre_hook(self._overhear, with_kwargs=True).remove)
                undo.callback(module.register_forward_hook(self._overheard, always_call=True).remove)
        for implementation, owner, name, function in interface.values():
            listener = Listener(self._wants, functools.partial(self._interface_called, implementation))
            undo.callback(tap(owner, name, function, listener))
        self._attach_to_multihead(undo)

    def _attach_to_multihead(self, undo: ExitStack) -> None:
        found = [watch.place for watch in self._watches.values() if watch.place.way == "multihead"]
        kinds = dict.fromkeys(_forward_owner(type(place.module)) for place in found)
        for kind in kinds:
            listener = Listener(self._wants_multihead, self._multihead_called)
            undo.callback(tap(kind, "forward", vars(kind)["forward"], listener))
        if any(place.encoder_layer is not None for place in found):
            kind = nn.TransformerEncoderLayer
            listener = Listener(self._wants_encoder_layer, self._encoder_layer_called)
            undo.callback(tap(kind, "forward", vars(kind)["forward"], listener))

    def __deepcopy__(self, memo: dict[int, Any]) -> Observation:
        """A copy of the model, made inside the block, is not observed; its hooks are idle."""
        return self

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args
        if module is not self._model:
            return
        if self._depth == 0 and not _in_backward():
            self._measured = self._forwards % self._every == 0
            self._forwards += 1
            self._decoder_mask = kwargs.get("decoder_attention_mask")
        self._depth += 1

    def _forward_ends(self, module: nn.Module, *_: Any) -> None:
        if module is self._model:
            self._depth = max(0, self._depth - 1)

    def _measures(self, watch: _Watch) -> bool:
        """Whether this call of the module is one to measure; to be asked once a call."""
        if _in_backward():
            return False
        if self._depth:
            return self._measured
        watch.calls += 1
        return (watch.calls - 1) % self._every == 0

    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch = self._watches.get(id(module))
        if watch is not None and (self._measured or not self._depth):
            watch.states = _states(args, kwargs)

    def _wants(self, module: Any) -> bool:
        watch = self._watches.get(id(module))
        if watch is None or self._measures(watch):
            return watch is not None
        watch.states = None
        return False

    def _interface_called(self, implementation: str, arguments: Mapping[str, Any]) -> None:
        watch = self._watches[id(arguments["module"])]
        calls = _calls.of_interface(implementation, arguments, cross=watch.place.cross)
        if watch.place.cross and self._depth:  # where the padding of queries does not show in the call
            calls = [call.with_padding(self._decoder_mask) for call in calls]
        watch.add(calls, self._queries)

    def _wants_multihead(self, module: Any) -> bool:
        watch = self._watches.get(id(module))
        if watch is None:
            return False
        watch.called = True
        return self._measures(watch)

    def _multihead_called(self, arguments: Mapping[str, Any]) -> None:
        self._add_multihead(self._watches[id(arguments["self"])], arguments)

    def _wants_encoder_layer(self, layer: Any) -> bool:
        """The fast path of torch's encoder layer computes all at once and never calls its attention."""
        watch = self._watches.get(id(layer.self_attn))
        if watch is None:
            return False
        called, watch.called = watch.called, False
        return not called and self._measures(watch)

    def _encoder_layer_called(self, arguments: Mapping[str, Any]) -> None:
        layer = arguments["self"]
        with torch.no_grad():
            src = layer.norm1(arguments["src"]) if layer.norm_first else arguments["src"]
        masks = {"attn_mask": arguments.get("src_mask"), "key_padding_mask": arguments.get("src_key_padding_mask")}
        self._add_multihead(self._watches[id(layer.self_attn)], {"query": src, "key": src, **masks})

    def _add_multihead(self, watch: _Watch, arguments: Mapping[str, Any]) -> None:
        assert isinstance(watch.place.module, nn.MultiheadAttention)
        call, watch.states = _calls.of_multihead(watch.place.module, arguments)
        watch.add([call], self._queries)

    def _overhear(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch = self._watches.get(id(module))
        if watch is None:
            return
        ears = _Ears(watch, self._queries) if self._measures(watch) else None
        watch.ears.append(ears)
        if ears is not None:
            watch.states = _states(args, kwargs)
            ears.__enter__()  # type: ignore[no-untyped-call]

    def _overheard(self, module: nn.Module, args: Any, result: Any) -> None:
        del args
        watch = self._watches.get(id(module))
        ears = watch.ears.pop() if watch is not None and watch.ears else None
        if watch is None or ears is None:
            return
        ears.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        watch.states = None
        if not ears.heard and result is not None:  # None is what a forward that failed gives
            raise LocaterError(
                f"{watch.place.name} ({type(module).__name__}) cannot be observed: it ran without a softmax over "
                "(batch, heads, queries, keys) and without scaled_dot_product_attention; choose other layers=…"
            )

    def _forget_calls(self) -> None:
        for watch in self._watches.values():
            watch.states = self._decoder_mask = None
            while watch.ears:  # an interrupt ended the module's forward
                self._overheard(watch.place.module, None, None)


class _Watch:
    """One module, what is kept of it, and what is known of the call in progress."""

    def __init__(self, place: Place, keep: Keep | None = None) -> None:
        self.place, self.keep = place, keep
        self.heads, self.tokens = HeadTally(), TokenTally()
        self.calls = 0  # outside of the model's forwards
        self.called = False  # since the encoder layer around it was
        self.states: Tensor | None = None  # that entered
        self.ears: list[_Ears | None] = []

    def add(self, calls: Sequence[_calls.Call], queries: tuple[int, ...]) -> None:
        if self.keep is not None:
            self.keep(self.place, calls, self.states)
        for call in calls:
            self.heads.add(call, queries)
        if self.states is not None:
            self.tokens.add(self.states, calls[0].real if len(calls) == 1 else None)
            self.states = None


class _Ears(TorchFunctionMode):
    """Hears the first softmax, or scaled_dot_product_attention, while a module runs."""

    def __init__(self, watch: _Watch, queries: tuple[int, ...]) -> None:
        super().__init__()
        self._watch, self._queries, self.heard = watch, queries, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self.heard or name not in ("softmax", "scaled_dot_product_attention"):
            return result
        if name == "softmax":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            logits = self._logits(args[0] if args else kwargs["input"], dim)
            if logits is None:
                return result
            call = _calls.of_logits(logits, cross=self._watch.place.cross)
        else:
            call = _calls.of_sdpa(_SDPA.bind(*args, **kwargs).arguments)
        self.heard = True
        self._watch.add([call], self._queries)
        return result

    def _logits(self, x: Tensor, dim: int | None) -> Tensor | None:
        """What softmax was given as (B, H, Tq, Tk), if it is that, which the states that entered tell."""
        states = self._watch.states
        if dim not in (-1, x.ndim - 1) or x.ndim not in (3, 4):
            return None
        if x.ndim == 3:  # (B·H, Tq, Tk)
            if states is None or states.ndim != 3 or len(x) % len(states):
                return None
            x = x.unflatten(0, (len(states), -1))
        if states is not None and states.ndim == 3 and (x.shape[0], x.shape[2]) != states.shape[:2]:
            return None
        return x if self._watch.place.cross or x.shape[2] <= x.shape[3] else None


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


def _forward_owner(kind: type) -> type:
    """The class that a class has its forward from."""
    return next(base for base in kind.__mro__ if "forward" in vars(base))


def _in_backward() -> bool:
    """Gradient checkpointing runs forwards again in backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def _states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    first = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
    return first.detach() if isinstance(first, Tensor) and first.is_floating_point() else None
