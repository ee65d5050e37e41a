"""Measuring the attention of a running model, whatever computes it.

    with observe(model) as seen:
        model(**batch)
    seen.table()

The model's own attention function runs as ever; what it was given is measured beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.hooks import Stacked, attention_sites
from locater.measure._moments import Covariances
from locater.measure._recorder import SiteRecorder
from locater.measure._split import query_positions
from locater.measure._tally import HeadTally
from locater.measure._tracker import Tracker
from locater.measure.predict import Prediction, predictions_of

if TYPE_CHECKING:
    import pandas

__all__ = ["LOGGED", "Observation", "observe"]

LOGGED = ("entropy", "entropy_share", "max_logit")  # of heads, in a log


@contextmanager
def observe(
    model: nn.Module | Stacked,
    every: int = 1,
    layers: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
    covariances: int | None = None,
    by_position: bool = False,
    predict: int | None = None,
) -> Iterator[Observation]:
    """Statistics of every attention head of `model` while the block runs; outputs and gradients stay bitwise the same.

    `every`: only the first of so many forwards of the model is measured. `layers`: only those, by number. `queries`:
    for which ρ is kept, as rows of a call, negative ones counted from each sequence's last token; that alone unless
    given. `covariances`: also keep those of the hidden states, over so many first tokens T of each sequence; it costs
    products of T²·D and T·D² for each of them, and float64 numbers T² + D² + T·D for each module. `by_position`: also
    keep the entropy of each row of queries. `predict`: also keep what `Observation.predict` needs, of so many first
    sequences, all of one length and without padding: of half of them the chosen queries and all keys, T·K float32
    numbers a key head, and covariances of the hidden states, T² + D² + T·D float64 numbers a module.

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

    Layers without a softmax over keys (linear or deformable attention) are left out where others have one. A model
    whose attention cannot be observed raises LocaterError on entering; one that ran, and none of its attention was
    intercepted, is warned of on leaving. On leaving, also by an exception, all is as it was; the statistics remain.
    """
    if covariances is not None and (type(covariances) is not int or covariances < 1):
        raise LocaterError(f"covariances must be how many tokens of each sequence they are of, got {covariances!r}")
    if predict is not None and (type(predict) is not int or predict < 4):
        raise LocaterError(f"predict must be how many sequences, 4 or more, predictions are made from, got {predict!r}")
    if predict is not None and isinstance(model, Stacked):
        raise LocaterError("predictions are of a model; a stack has none")
    rows = (-1,) if queries is None else query_positions(queries)
    sites = attention_sites(model, layers)
    recorders = [SiteRecorder(site, rows, covariances, by_position, predict) for site in sites]
    tracker = Tracker(model, every, recorders)
    with ExitStack() as undo:
        tracker.attach(undo)
        yield Observation(recorders, None if isinstance(model, Stacked) else model)
        tracker.warn_if_nothing_intercepted()


class Observation:
    """What `observe` has recorded so far; padding left out where the masks of the calls show it."""

    def __init__(self, recorders: Sequence[SiteRecorder], model: nn.Module | None = None) -> None:
        self._recorders, self._model = recorders, model

    def table(self) -> pandas.DataFrame:
        """A row a head of every module that was called.

        module, layer, head, kind (self, cross, encoder, decoder); means over queries of entropy (nats), of
        entropy_share (entropy / ln of the number of unmasked keys, queries with one left out) and of logsumexp;
        max_logit, the largest; queries, how many there were. Of a stack of several members: member. Under tensor
        parallelism the rows are those of the rank's own heads, by their numbers in the whole model.
        """
        names = ["module", "layer", "head", "kind", "entropy", "entropy_share", "max_logit", "logsumexp", "queries"]
        rows = []
        for recorder in self._recorders:
            if not recorder.heads:
                continue
            members = recorder.members()
            columns = {name: x.view(len(members), -1).tolist() for name, x in recorder.heads.columns().items()}
            rows += [
                {**known, "head": recorder.first_head + h, **{name: column[e][h] for name, column in columns.items()}}
                for e, known in enumerate(members)
                for h in range(len(columns["entropy"][e]))
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
        for recorder in self._recorders:
            for e, known in enumerate(recorder.members()):
                columns = recorder.tokens.columns(e)
                if columns is not None:
                    rows.append({**known, **columns})
        return self._frame(rows, names)

    def packed(self) -> tuple[list[dict[str, Any]], Tensor]:
        """For a log: what is known of every module that was called (module, layer, kind, how many heads), and all its
        numbers, one module's after the other in one tensor, so that one copy fetches them.

        Of each: the keys that are unmasked for the longest sequence's last query; of all heads entropy, then
        entropy_share, then max_logit; rank_residual, effective_rank and mean_cosine.
        """
        known, numbers = [], []
        for recorder in self._recorders:
            if not recorder.heads:
                continue
            members, columns = recorder.members(), recorder.heads.columns()
            rho = recorder.heads.rho(-1)
            assert rho is not None
            for e, row in enumerate(members):
                of_heads = [columns[name].view(len(members), -1)[e].double() for name in LOGGED]
                unmasked = (~rho.unflatten(0, (len(members), -1))[e].isnan()).any(0).sum()
                keys = torch.where(unmasked > 0, unmasked, rho.shape[-1])
                tokens = recorder.tokens.means(e)
                tokens = of_heads[0].new_full((3,), torch.nan) if tokens is None else tokens.double()
                known.append({name: row[name] for name in ("module", "layer", "kind")} | {"heads": len(of_heads[0])})
                numbers.append(torch.cat([keys.double()[None], *of_heads, tokens.to(rho.device)]))
        device = numbers[0].device if numbers else torch.device("cpu")
        empty = torch.empty(0, dtype=torch.float64)
        return known, torch.cat([each.to(device) for each in numbers]) if numbers else empty

    def rho(self, module: str, query: int = -1) -> NDArray[np.float64]:
        """Measured ρ (heads, Tk): the share of all sequences with z in [0, 1], for one query and each key.

        That is how often the key is on the slope of the paper's piecewise linear softmax; softmax can look elsewhere.
        Keys are counted from the sequence's first token, padding before it left out; a key counts for the sequences
        where it is unmasked for the query. Where it never is, ρ is NaN; calls with more keys make the array longer.
        """
        return self._of_heads(module, lambda heads: heads.rho(query))

    def entropy_by_position(self, module: str) -> NDArray[np.float64]:
        """Mean entropy (heads, Tq) of each row of queries, padding left out; NaN where all were padding."""
        return self._of_heads(module, HeadTally.entropy_by_position)

    def covariances(self, module: str) -> Covariances:
        """Mean, position covariance K and feature covariance Σ of the tokens that enter a module, in float64.

        Of the first T tokens of the sequences that have as many, padding left out wherever it stands; T is what observe
        was given. Shorter sequences, and those that go on from a cache, do not count. Sequences are the sample: each
        position has a mean of its own, and the sums are over n − 1.
        """
        recorder, member = self._found(module)
        moments = recorder.moments
        if moments is None:
            raise LocaterError("covariances were not kept; observe(model, covariances=T) does, over T tokens")
        count = moments.sequences(member)
        if count < 2:
            raise LocaterError(
                f"covariances of {module} need 2 sequences of at least {moments.tokens} tokens, and {count} came by: "
                "run more, or ask observe for fewer tokens"
            )
        return moments.covariances(member)

    def predict(self, rho_method: str = "gaussian") -> list[Prediction]:
        """What the theory predicts for the sequences that came by, beside what attention did: as `measure.predict`.

        Every second sequence is held out; the weights of the model are those it has now. Minutes on many heads.
        """
        kept = [(one.split, one.not_split) for one in self._recorders if one.split is not None]
        if not kept or self._model is None:
            raise LocaterError("nothing to predict from was kept; observe(model, predict=N) does, of N sequences")
        for _, reason in kept:
            if reason is not None:
                raise reason
        return predictions_of(self._model, [split for split, _ in kept], rho_method)

    def reset(self) -> None:
        """Forgets what was recorded; the count of forwards goes on."""
        for recorder in self._recorders:
            recorder.reset()

    def _of_heads(self, module: str, values: Callable[[HeadTally], Tensor | None]) -> NDArray[np.float64]:
        """The module's heads (H, …) of what is kept for those of all members (E·H, …)."""
        recorder, member = self._found(module)
        found = values(recorder.heads)
        if found is None:
            raise LocaterError(f"{module} was not called while observed: nothing is known of it yet")
        heads: Tensor = found.unflatten(0, (len(recorder.members()), -1))[member]
        return heads.double().cpu().numpy()

    def _found(self, module: str) -> tuple[SiteRecorder, int]:
        """What is recorded of the module, and the number of the member."""
        known = {row["module"]: (one, e) for one in self._recorders for e, row in enumerate(one.members())}
        if module not in known:
            raise LocaterError(f"no attention module {module!r} is observed; these are: {', '.join(known)}")
        return known[module]

    def _frame(self, rows: list[dict[str, Any]], names: list[str]) -> pandas.DataFrame:
        import pandas

        stacked = any(recorder.site.members for recorder in self._recorders)
        return pandas.DataFrame(rows, columns=["member", *names] if stacked else names)
