"""A model reads a text, and what its attention does meanwhile is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from locater.errors import LocaterError, reason, require
from locater.io import nulled, read_json
from locater.measure.alarms import Alarm, alarms_between
from locater.measure.doctor import Examination, examine
from locater.measure.observe import Observation, observe
from locater.measure.predict import AttentionPrediction, Prediction, agreement
from locater.models.pretrained import Pretrained, device_of, quiet

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Reading", "alarms_since", "examine_reading", "read"]


@dataclass(frozen=True)
class Reading:
    """What a model's attention did while it read a text."""

    sequences: int
    length: int
    query: int  # that ρ is of, counted from the end: the last token that is text
    heads: pd.DataFrame  # as Observation.table
    layers: pd.DataFrame  # a row a module: means over heads, largest logit, and Observation.tokens
    rho: dict[str, NDArray[np.float64]]  # by module (heads, keys)
    entropy_by_position: dict[str, NDArray[np.float64]]  # by module (heads, queries)
    part: str = ""  # of the model that was run, if not all
    predicted: tuple[Prediction, ...] = ()  # a module each, if it was asked for
    left_out: int = 0  # sequences of the text that were not read

    @property
    def extent(self) -> str:
        """How many sequences were read, and of how many."""
        whole = f" of {self.sequences + self.left_out:,}" if self.left_out else ""
        return f"{self.sequences:,}{whole} sequences"

    def to_json(self) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self.predicted:
            rows = [asdict(row) for row in agreement(self.predicted)]
            more = {
                "predicted": {one.module: _prediction(one) for one in self.predicted},
                "entropy_agreement": nulled(rows),
            }
        return {
            "sequences": self.sequences,
            "left_out": self.left_out,
            "heads": nulled(self.heads.to_dict("records")),
            "layers": nulled(self.layers.to_dict("records")),
            "query": self.query,
            "rho": nulled(self.rho),
            "entropy_by_position": nulled(self.entropy_by_position),
            **more,
        }


def alarms_since(path: Path, now: dict[str, Any]) -> list[Alarm]:
    """What has collapsed since the measurement in a file, which must be of the same text and modules."""
    before = read_json(path)
    if not {"heads", "layers", "length", "sequences"} <= before.keys():
        raise LocaterError(f"{path} is no measurement, as locater measure --json writes one")
    before = {"left_out": 0, **before}  # which it did not say once
    for name in ("length", "sequences", "left_out"):
        if before[name] != now[name]:
            raise LocaterError(f"{path} is of another text: its {name} is {before[name]!r:.80}, here it is {now[name]}")
    try:
        lines = _log_lines(before)
        damaged = not all(map(_is_log_line, lines))
    except (AttributeError, KeyError, TypeError):
        damaged = True
    if damaged:
        raise LocaterError(f"{path} is a damaged measurement")
    current = _log_lines(now)
    if [line["module"] for line in lines] != [line["module"] for line in current]:
        raise LocaterError(f"{path} is of another model: its attention modules are others")
    return alarms_between(lines, current)


def _log_lines(content: dict[str, Any]) -> list[dict[str, Any]]:
    """A measurement's JSON as a log of attention has it: a line a module."""
    lines: dict[str, dict[str, Any]] = {}
    for row in content["layers"]:
        rank = row.get("rank_residual")
        lines[row["module"]] = {"module": row["module"], "keys": content["length"], "rank_residual": rank}
        lines[row["module"]] |= {"step": 0, "entropy_share": [], "max_logit": []}
    for row in content["heads"]:
        for name in ("entropy_share", "max_logit"):
            lines[row["module"]][name].append(row[name])
    return list(lines.values())


def _is_log_line(line: dict[str, Any]) -> bool:
    numbers = [line["rank_residual"], *line["entropy_share"], *line["max_logit"]]
    return isinstance(line["module"], str) and all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in numbers
    )


def _prediction(one: Prediction) -> dict[str, Any]:
    """Measured in the sequences held out, and by each law; None where unknown.

    ρ of the last token, heads × keys; of softmax for each query entropy by head, and weights, heads × keys.
    """
    made = {"general": one.general, "separable": one.separable, "walk": one.walk}
    return {
        "sequences": one.sequences,
        "measured": nulled(one.measured),
        **nulled(made),
        "errors": one.errors(),
        "sampling_error": one.sampling_error(),
        "attention": [
            {
                "query": each.query,
                "entropy": nulled({"measured": each.entropy, "error": each.entropy_error, **_of_laws(each, "entropy")}),
                "weights": nulled({"measured": each.weights, **_of_laws(each, "weights")}),
            }
            for each in one.attention
        ],
    }


def _of_laws(one: AttentionPrediction, name: str) -> dict[str, NDArray[np.float64]]:
    return {law: getattr(found, name) for law, found in one.laws.items()}


def read(
    model: str,
    text: str,
    *,
    predicting: bool = False,
    batch: int = 8,
    progress: Callable[[float], None] = lambda _: None,
    source: str = "the text",
    **options: Any,
) -> Reading:
    """Runs a model, without its head, over a text cut into sequences of `length` tokens, those of its tokenizer among
    them that frame a sequence ([CLS], [SEP], <s>); what is left over at the end of the text is not read.

    `predicting` keeps queries and keys of half of them and predicts the others', which takes minutes on many heads.
    `options`: revision, length, most and device, as of `_opened`."""
    opened = _opened(model, text, source=source, **options)
    if predicting and len(opened.ids) < 4:
        raise LocaterError(
            f"--predict needs at least 4 sequences, and {source} makes {len(opened.ids)}: "
            "give more text or a smaller --length"
        )
    seen = _observed(opened.network(), opened.ids, batch, opened.query, predicting, progress)
    return opened.reading(seen, predicting)


def examine_reading(
    model: str,
    text: str,
    *,
    batch: int = 8,
    progress: Callable[[float], None] = lambda _: None,
    **options: Any,
) -> tuple[Reading, Examination, Any]:
    """As `read`, for `measure.doctor`: what was read, what the doctor looks at, and the model."""
    opened = _opened(model, text, **options)
    network, total = opened.network(), len(opened.ids)

    def batches() -> Iterator[torch.Tensor]:
        for start in range(0, total, batch):
            yield opened.ids[start : start + batch]
            progress(min(1.0, (start + batch) / total))

    def run(ids: torch.Tensor) -> None:
        _forward(network, ids)

    examined = examine(network, batches(), run, queries=(opened.query,), by_position=True)
    return opened.reading(examined.seen, False), examined, network


@dataclass
class _Opened:
    """A model and a text in its tokens."""

    pretrained: Pretrained
    ids: torch.Tensor
    query: int
    length: int
    device: torch.device
    left_out: int = 0
    part: str = ""

    def network(self) -> Any:
        with quiet():
            network, self.part = self.pretrained.network(self.device)
        self.ids = self.ids.to(self.device)
        return network

    def reading(self, seen: Observation, predicting: bool) -> Reading:
        heads, tokens = seen.table(), seen.tokens()
        means = heads.groupby("module", sort=False).agg(
            {"layer": "first", "kind": "first", "entropy": "mean", "entropy_share": "mean", "max_logit": "max"}
        )
        layers = means.reset_index().merge(tokens.drop(columns=["layer", "kind", "sequences"]), on="module", how="left")
        names = list(layers["module"])
        return Reading(
            sequences=len(self.ids),
            length=self.length,
            query=self.query,
            heads=heads,
            layers=layers,
            rho={name: seen.rho(name, self.query) for name in names},
            entropy_by_position={name: seen.entropy_by_position(name) for name in names},
            part=self.part,
            predicted=tuple(seen.predict()) if predicting else (),
            left_out=self.left_out,
        )


def _opened(
    model: str,
    text: str,
    *,
    revision: str | None = None,
    length: int = 256,
    most: int | None = None,
    device: str | None = None,
    source: str = "the text",
) -> _Opened:
    """Of a text of more than `most` sequences as many, from the first to the last."""
    require("transformers", "hf")
    target = device_of(device)
    pretrained = Pretrained.called(model, revision)
    with quiet():
        ids, suffix = pretrained.sequences(text, length, source)
    whole = len(ids)
    if most is not None and most < whole:
        ids = ids[torch.linspace(0, whole - 1, most, dtype=torch.float64).round().long()]
    return _Opened(pretrained, ids, -1 - suffix, length, target, whole - len(ids))


def _observed(
    network: Any, ids: torch.Tensor, batch: int, query: int, predicting: bool, progress: Callable[[float], None]
) -> Observation:
    kept = len(ids) if predicting else None
    with observe(network, queries=(query,), by_position=True, predict=kept) as seen, torch.inference_mode():
        for start in range(0, len(ids), batch):
            _forward(network, ids[start : start + batch])
            progress(min(1.0, (start + batch) / len(ids)))
    return seen


def _forward(network: Any, ids: torch.Tensor) -> None:
    try:
        network(input_ids=ids, attention_mask=torch.ones_like(ids), **_without_cache(network))
    except torch.OutOfMemoryError as error:
        raise LocaterError(
            f"{len(ids)} sequences of {ids.shape[1]} tokens do not fit into memory: a smaller --batch or --length does"
        ) from error
    except LocaterError:
        raise
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise LocaterError(
            f"{type(network).__name__} does not run on sequences of {ids.shape[1]} tokens: {reason(error)}"
        ) from error


def _without_cache(network: Any) -> dict[str, bool]:
    return {"use_cache": False} if getattr(network.config, "use_cache", None) is not None else {}
