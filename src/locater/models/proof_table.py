"""The proof of a model, as a table: what is rebuilt from the parts of its attention against what is really compared."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from locater.errors import LocaterError, reason
from locater.models import copies
from locater.models import twin as twins
from locater.models.flow import Compared, compared
from locater.models.proof import by_module, may_be_attention, rebuilt, run_twin, twin
from locater.models.registry import inside, is_pretrained, reading

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["prove"]


def prove(model: nn.Module, batch: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """Logits rebuilt from the parts of every attention module against those that the model really compares.

    On a small twin of the model, the same class from its configuration with every parameter random; or on the model
    itself, called with a `batch` of yours as keywords. A row a module: the largest `difference` of logits of keys that
    are not masked, their `range`, and the `reason` why it is not read, where it is not.
    """
    import pandas as pd

    if batch is not None:
        rows = _rows(model, compared(model, functools.partial(model, **batch))[0])
    else:
        parts = {name: part for name, part in model.named_modules() if is_pretrained(part)}
        outermost = [name for name in parts if not any(name != other and inside(name, other) for other in parts)]
        rows = [row for name in outermost for row in _twin_rows(parts[name], f"{name}." if name else "")]
        rows += _beside(model, outermost) if outermost else _copy_rows(model)
    return pd.DataFrame(rows, columns=["module", "difference", "range", "reason"])


def _twin_rows(model: Any, prefix: str) -> list[dict[str, Any]]:
    made = twin(type(model), model.config)
    twins.randomise(made, seed=5)  # other weights than those that the rules were found with
    return [row | {"module": prefix + row["module"]} for row in _rows(made, run_twin(made)[0])]


def _beside(model: nn.Module, parts: list[str]) -> list[dict[str, Any]]:
    """Modules that are read, outside of these parts."""
    why = "it is beside the models that are called by themselves: give prove a batch"
    names = [site.name for _, site in reading(model, any_at_all=False).sites]
    left = [name for name in names if not any(inside(name, part) for part in parts)]
    return [{"module": name, "difference": math.nan, "range": math.nan, "reason": why} for name in left]


def _copy_rows(model: nn.Module) -> list[dict[str, Any]]:
    made = copies.copied(model)
    seen, _ = copies.seen_at_work(made, [name for name, part in made.named_modules() if may_be_attention(part)])
    if not seen:
        raise LocaterError(f"how a {type(model).__name__} is called is not known: give prove a batch")
    return _rows(made, seen)


def _rows(model: nn.Module, seen: list[Compared]) -> list[dict[str, Any]]:
    """A row for every module that is read, and for every other in which a softmax was seen."""
    events, found = by_module(model, seen), reading(model, any_at_all=False)
    rows = []
    for read, site in found.sites:
        row = {"module": site.name, "difference": math.nan, "range": math.nan, "reason": ""}
        if site.name not in events:
            row["reason"] = "no softmax over its queries and keys was seen"
        else:
            try:
                with torch.no_grad():
                    logits = rebuilt(events[site.name][0], read(site))
                row |= {"difference": logits.difference, "range": logits.range}
            except (LocaterError, RuntimeError) as error:
                row["reason"] = reason(error)
        rows.append(row)
    unread = dict.fromkeys(events, "no reader") | found.unread
    return rows + [
        {"module": name, "difference": math.nan, "range": math.nan, "reason": why}
        for name, why in unread.items()
        if name not in {row["module"] for row in rows}
    ]
