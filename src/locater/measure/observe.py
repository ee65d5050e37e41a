"""Watching the attention of a running model, whatever computes it.

    with observe(model) as seen:
        model(**batch)
    seen.table()

The model's own attention function runs as ever; what it was given is measured beside it. `locater.hooks` tells of each
call, whatever computes it; the lab's stacks, which are no modules, tell by themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.hooks import (
    HOW,
    Intercepted,
    Interceptor,
    Stacked,
    Tell,
    attention_sites,
    has_compiled,
    hidden_states,
    in_backward,
    intercept,
    of_multihead,
    of_stack,
    patch,
    plain_name,
    untraced,
)
from locater.measure._moments import Covariances
from locater.measure._watch import Keep, Watch

if TYPE_CHECKING:
    import pandas

__all__ = ["Observation", "observe"]


@contextmanager
def observe(
    model: nn.Module | Stacked,
    every: int = 1,
    layers: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
    covariances: int | None = None,
) -> Iterator[Observation]:
    """Statistics of every attention head of `model` while the block runs; outputs and gradients stay bitwise the same.

    `every`: only the first of so many forwards of the model is measured. `layers`: only those, by number. `queries`:
    for which ρ is kept, as rows of a call, negative ones counted from each sequence's last token; that alone unless
    given. `covariances`: also keep those of the hidden states, over so many first tokens T of each sequence; it costs
    products of T²·D and T·D² for each of them, and float64 numbers T² + D² + T·D for each module.

    Works with any backend of Hugging Face's attention interface (sdpa, flash, flex, eager), modules that call softmax
    or scaled_dot_product_attention themselves, and nn.MultiheadAttention; in training, also with gradient checkpointing
    (what backward computes again does not count twice), and in generation with a cache. Calls that are in no forward of
    `model`, such as those of a part of it, are counted module by module. A module that layers share counts for all of
    them under one name.

    What torch.compile has compiled notices it only where it uses Hugging Face's interface: there it is compiled once
    more, with a break at each attention (so not with fullgraph=True, and the last bits may differ). Elsewhere it is
    refused, or, where compiled code around the model does not show, warned of on leaving; inside
    torch.compiler.set_stance("force_eager") all can be observed.

    A `lab.Stack` is observed in all its forwards, of updates and of validation; while it is, updates on a GPU run
    operation by operation and are not replayed. With several members their names are a column of the tables, and the
    modules are called "member/layers.0"; a stack of one looks like any other model.

    A model whose attention cannot be observed raises LocaterError on entering; one that ran, and none of its attention
    was heard, is warned of on leaving. On leaving, also by an exception, all is as it was; the statistics remain.
    """
    seen = Observation(model, every, layers, queries, covariances)
    with ExitStack() as undo:
        seen._attach(undo)
        yield seen
        seen._warn_if_deaf()


class Observation:
    """What `observe` has seen so far; padding left out where the masks of the calls show it."""

    def __init__(
        self,
        model: nn.Module | Stacked,
        every: int,
        layers: Sequence[int] | None,
        queries: Sequence[int] | None,
        covariances: int | None = None,
        keep: Keep | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise LocaterError(f"every must be a whole number, 1 or more, got {every!r}")
        if covariances is not None and (type(covariances) is not int or covariances < 1):
            raise LocaterError(f"covariances must be how many tokens of each sequence they are of, got {covariances!r}")
        self._queries = (-1,) if queries is None else tuple(int(query) for query in queries)
        self._model, self._every = model, every
        found = attention_sites(model, layers)
        # those of a stack have no module of their own
        self._watches = {p.layer if p.way == "told" else id(p.module): Watch(p, keep, covariances) for p in found}
        self._listening: dict[int, Watch] = {}  # the same, while hooks are to act
        self._forwards = 0
        self._ran = False  # whether one of them came to its end
        self._depth = 0  # of forwards of the model in progress
        self._measured = False  # whether the one in progress is
        self._decoder_mask: Tensor | None = None  # (B, Tq) that the one in progress was given

    # ------------------------------------------------------------------ results

    def table(self) -> pandas.DataFrame:
        """A row a head of every module that was called.

        module, layer, head, kind (self, cross, encoder, decoder); means over queries of entropy (nats), of
        entropy_share (entropy / ln of the number of keys seen, queries with one key left out) and of logsumexp;
        max_logit, the largest; queries, how many there were. Of a stack of several members: member.
        """
        names = ["module", "layer", "head", "kind", "entropy", "entropy_share", "max_logit", "logsumexp", "queries"]
        rows = []
        for watch in self._watches.values():
            if watch.heads.queries is None:
                continue
            members = watch.members()
            columns = {name: x.view(len(members), -1).tolist() for name, x in watch.heads.columns().items()}
            for e, known in enumerate(members):
                values = zip(*(column[e] for column in columns.values()), strict=True)
                rows += [
                    {**known, "head": head, **dict(zip(columns, row, strict=True))} for head, row in enumerate(values)
                ]
        return self._frame(rows, names)

    def tokens(self) -> pandas.DataFrame:
        """A row an attention module: how alike the tokens are that enter it, averaged over sequences.

        rank_residual is `measure.rank_residual`. effective_rank is (Σσ²)² / Σσ⁴ of the singular values σ of the
        tokens less their mean: the exponential of the second-order (Rényi) entropy of σ²/Σσ²; it is n where n
        directions are equally strong, and needs no singular value decomposition. mean_cosine is over pairs of
        different tokens. Sequences of fewer than two tokens, as in generation with a cache, do not count.
        """
        names = ["module", "layer", "kind", "rank_residual", "effective_rank", "mean_cosine", "sequences"]
        rows = []
        for watch in self._watches.values():
            for e, known in enumerate(watch.members()):
                columns = watch.tokens.columns(e)
                if columns is not None:
                    rows.append({**known, **columns})
        return self._frame(rows, names)

    def rho(self, module: str, query: int = -1) -> NDArray[np.float64]:
        """Measured ρ (heads, Tk): the share of all sequences seen with z in [0, 1], for one query and each key.

        That is how often the key is on the slope of the paper's piecewise linear softmax; softmax can look elsewhere.
        Keys are counted from the sequence's first token, padding before it left out; a key counts for the sequences
        whose query sees it. Where no query saw the key, ρ is NaN; calls with more keys make the array longer.
        """
        watch, member = self._found(module)
        if query not in self._queries:
            raise LocaterError(f"ρ was kept for the queries {self._queries}, not for {query}: ask observe for it")
        if watch.heads.queries is None:
            raise LocaterError(f"{module} was not called while observed: there is no ρ of it yet")
        heads: Tensor = watch.heads.rho(query).unflatten(0, (len(watch.members()), -1))[member]
        return heads.double().cpu().numpy()

    def covariances(self, module: str) -> Covariances:
        """Mean, position covariance K and feature covariance Σ of the tokens that enter a module, in float64.

        Of the first T tokens of the sequences that have as many, padding left out wherever it stands; T is what observe
        was told. Shorter sequences, and those that go on from a cache, do not count. Sequences are the sample: each
        position has a mean of its own, and the sums are over n − 1.
        """
        watch, member = self._found(module)
        if watch.moments is None:
            raise LocaterError("covariances were not kept; observe(model, covariances=T) does, over T tokens")
        count, tokens = watch.moments.sequences(member), watch.moments.tokens
        if count < 2:
            raise LocaterError(
                f"covariances of {module} need 2 sequences of at least {tokens} tokens, and {count} came by: "
                "run more, or ask observe for fewer tokens"
            )
        return watch.moments.covariances(member)

    def _found(self, module: str) -> tuple[Watch, int]:
        """What is kept of the module, and the number of the member."""
        known = {row["module"]: (watch, e) for watch in self._watches.values() for e, row in enumerate(watch.members())}
        if module not in known:
            raise LocaterError(f"no attention module {module!r} is observed; these are: {', '.join(known)}")
        return known[module]

    def _frame(self, rows: list[dict[str, Any]], names: list[str]) -> pandas.DataFrame:
        import pandas

        stacked = any(watch.place.members for watch in self._watches.values())
        return pandas.DataFrame(rows, columns=["member", *names] if stacked else names)

    def reset(self) -> None:
        """Forgets what was seen; the count of forwards goes on."""
        for watch in self._watches.values():
            watch.reset()

    # ------------------------------------------------------------------ listening

    def _attach(self, undo: ExitStack) -> None:
        model = self._model
        undo.callback(self._forget_calls)
        self._listening = self._watches
        if isinstance(model, Stacked):
            undo.callback(model.watch(self._stack_begins))
            return
        # torch's encoder layer leaves its fast path, and with it its exact output, for any hook on or inside it
        if not isinstance(model, nn.TransformerEncoderLayer):
            undo.callback(model.register_forward_pre_hook(untraced(self._forward_begins), with_kwargs=True).remove)
            undo.callback(model.register_forward_hook(untraced(self._forward_ends), always_call=True).remove)
        entered, left = untraced(self._entered), untraced(self._left)
        found = [watch.place for watch in self._watches.values()]
        intercept(found, Interceptor(self._wants, self._heard, changes=False), undo)
        for place in found:
            if place.way == "interface":
                undo.callback(place.module.register_forward_pre_hook(entered, with_kwargs=True).remove)
            elif place.way == "torch":
                undo.callback(place.module.register_forward_hook(left, always_call=True).remove)
            if place.encoder_layer is not None:
                kind = nn.TransformerEncoderLayer
                around = patch(kind, "forward", vars(kind)["forward"])
                around.observe(place.encoder_layer, self._encoder_layer_called, undo)

    def __deepcopy__(self, memo: dict[int, Any]) -> Observation:
        """A copy of the model, made inside the block, is not observed; its hooks are idle."""
        return self

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args
        if module is not self._model:
            return
        if self._depth == 0 and not in_backward():
            self._measured = self._forwards % self._every == 0
            self._forwards += 1
            self._decoder_mask = kwargs.get("decoder_attention_mask")
        self._depth += 1

    def _forward_ends(self, module: nn.Module, args: Any, result: Any) -> None:
        del args
        if module is self._model:
            self._depth = max(0, self._depth - 1)
            self._ran |= result is not None  # None is what a forward that failed gives

    def _stack_begins(self, real: Tensor) -> Tell | None:
        measured = self._forwards % self._every == 0
        self._forwards += 1

        def tell(layer: int, states: Tensor, q: Tensor, k: Tensor, scale: float) -> None:
            watch = self._listening.get(layer)
            if watch is not None:
                watch.states = states.detach().flatten(0, 1)
                watch.add([of_stack(q.detach(), k.detach(), scale, real)], self._queries)

        return tell if measured else None

    def _measures(self, watch: Watch) -> bool:
        """Whether this call of the module is one to measure; to be asked once a call."""
        if in_backward():
            return False
        if self._depth:
            return self._measured
        watch.calls += 1
        return (watch.calls - 1) % self._every == 0

    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch = self._listening.get(id(module))
        if watch is not None and (self._measured or not self._depth):
            watch.states = _detached(hidden_states(args, kwargs))

    def _wants(self, module: nn.Module) -> bool:
        watch = self._listening.get(id(module))
        if watch is None:
            return False
        watch.called = True
        watch.awaited = self._measures(watch)
        if not watch.awaited:
            watch.states = None
        return watch.awaited

    def _heard(self, intercepted: Intercepted, result: Tensor) -> Tensor | None:
        watch = self._listening[id(intercepted.module)]
        if not _fits(intercepted):
            return None
        if intercepted.states is not None:
            watch.states = intercepted.states.detach()
        calls = [call.detached() for call in intercepted.calls]
        if watch.place.cross and self._depth:  # where the padding of queries does not show in the call
            calls = [call.with_padding(self._decoder_mask) for call in calls]
        watch.awaited = False
        watch.add(calls, self._queries)
        return result

    def _encoder_layer_called(self, layer: Any, named: Callable[[], Mapping[str, Any]], result: Any) -> None:
        """The fast path of torch's encoder layer computes all at once and never calls its attention."""
        del result
        watch = self._listening.get(id(layer.self_attn))
        if watch is None:
            return
        called, watch.called = watch.called, False
        if called or not self._measures(watch):
            return
        arguments = named()
        with torch.no_grad():
            src = layer.norm1(arguments["src"]) if layer.norm_first else arguments["src"]
            masks = {"attn_mask": arguments.get("src_mask"), "key_padding_mask": arguments.get("src_key_padding_mask")}
            call, watch.states = of_multihead(layer.self_attn, {"query": src, "key": src, **masks})
        watch.add([call.detached()], self._queries)

    def _left(self, module: nn.Module, args: Any, result: Any) -> None:
        del args
        watch = self._listening.get(id(module))
        if watch is None:
            return
        unheard, watch.awaited, watch.states = watch.awaited, False, None
        if unheard and result is not None:
            raise LocaterError(
                f"{watch.place.name} ({type(module).__name__}) cannot be observed: it ran without a softmax over "
                "(batch, heads, queries, keys) and without scaled_dot_product_attention; choose other layers=…"
            )

    def _forget_calls(self) -> None:
        for watch in self._watches.values():
            watch.states = self._decoder_mask = None
        self._listening = {}  # code compiled meanwhile may keep the hooks

    def _warn_if_deaf(self) -> None:
        """If the model ran, or may have run in compiled code, and no attention was intercepted."""
        watches = self._watches.values()
        unnoticed = has_compiled() and any(watch.place.way in ("torch", "multihead") for watch in watches)
        if (self._ran or unnoticed) and not any(watch.heard for watch in watches):
            what = "ran" if self._ran else "may have run in code that torch.compile has compiled"
            warnings.warn(
                f"nothing of {type(self._model).__name__} was measured: it {what}, and none of its attention modules "
                f"was heard, {plain_name(next(iter(watches)).place.name)} and others; if it is compiled, {HOW}",
                stacklevel=4,
            )


def _fits(intercepted: Intercepted) -> bool:
    """Whether logits can be those of the tokens that entered."""
    states, logits = intercepted.states, intercepted.logits
    if logits is None or states is None or states.ndim != 3:
        return True
    return (logits.shape[0], logits.shape[2]) == states.shape[:2]


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()
