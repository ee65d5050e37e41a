"""The command `measure`: a model reads a text, and what its attention does is shown."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD

from locater import _terminal as terminal
from locater._terminal import JsonOption
from locater.errors import LocaterError, require

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch
    from numpy.typing import NDArray

    from locater.measure import Observation
    from locater.measure.predict import Prediction

__all__ = ["Reading", "measure_command", "read", "register"]


def register(app: typer.Typer) -> None:
    app.command("measure")(measure_command)


def measure_command(
    model: Annotated[str, typer.Argument(help="A hub id, a folder, or a .gguf file.")],
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="What the model is to read, in UTF-8.")],
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 8,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU if there is one.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many heads to show.")] = 10,
    predicting: Annotated[
        bool, typer.Option("--predict", help="Predict ρ from half of the sequences beside what the others measure.")
    ] = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="DIR", help="Draw maps and positions.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Entropy, largest logit and ρ of every head of a model while it reads a text."""
    words = _text(text)
    _check_targets(plot, json_file)
    with terminal.progress("reading") as progress:
        options: dict[str, Any] = {"length": length, "batch": batch, "device": device, "predicting": predicting}
        seen = read(model, words, progress=progress, source=str(text), **options)
    written: list[Path] = []
    if plot is not None:
        from locater.figures import draw_measure

        written = draw_measure(seen, "/".join(Path(model).parts[-2:]), plot)
    if json_file is not None:
        terminal.write_json(json_file, {"model": model, "length": length, **seen.to_json()})
    if json_file != "-":
        _print(model, seen, top)
        for path in written:
            print(path)


# ---------------------------------------------------------------------- what is found


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

    def to_json(self) -> dict[str, Any]:
        more = {"predicted": {one.module: _prediction(one) for one in self.predicted}} if self.predicted else {}
        return {
            "sequences": self.sequences,
            "heads": _records(self.heads),
            "layers": _records(self.layers),
            "query": self.query,
            "rho": {name: _lists(values) for name, values in self.rho.items()},
            "entropy_by_position": {name: _lists(values) for name, values in self.entropy_by_position.items()},
            **more,
        }


def _prediction(one: Prediction) -> dict[str, Any]:
    """ρ of the last token: measured in the sequences held out, and by each law, heads × keys; None where unknown."""
    made = {"general": one.general, "separable": one.separable, "walk": one.walk}
    return {
        "sequences": one.sequences,
        "measured": _lists(one.measured),
        **{law: None if values is None else _lists(values) for law, values in made.items()},
        "errors": one.errors(),
        "sampling_error": one.sampling_error(),
    }


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): _finite(cell) for key, cell in row.items()} for row in table.to_dict("records")]


def _lists(values: NDArray[np.float64]) -> list[list[float | None]]:
    return [[_finite(value) for value in row] for row in values.tolist()]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def read(
    model: str,
    text: str,
    *,
    length: int = 256,
    batch: int = 8,
    device: str | None = None,
    predicting: bool = False,
    progress: Callable[[float], None] = lambda _: None,
    source: str = "the text",
) -> Reading:
    """Runs a model, without its head, over a text cut into sequences of `length` tokens, those of its tokenizer among
    them that frame a sequence ([CLS], [SEP], <s>); what is left over at the end of the text is not read.

    `predicting` runs them once more and sets `measure.predict` to work, which takes minutes on many heads."""
    require("transformers", "hf")
    place = _device(device)
    files = _files(model)
    with _quiet():
        config = _config(model, files)
        _check_length(model, config, length)
        tokenizer = _tokenizer(model, files, config)
        ids, suffix = _sequences(model, tokenizer, text, length, source)
        _check_ids(model, config, ids)
        if predicting and len(ids) < 4:
            raise LocaterError(
                f"--predict needs at least 4 sequences, and {source} makes {len(ids)}: "
                "give more text or a smaller --length"
            )
        network, part = _network(model, files, config, place)
    seen, tallies = _observed(network, ids.to(place), batch, -1 - suffix, progress)
    heads, tokens = seen.table(), seen.tokens()
    means = heads.groupby("module", sort=False).agg(
        {"layer": "first", "kind": "first", "entropy": "mean", "entropy_share": "mean", "max_logit": "max"}
    )
    layers = means.reset_index().merge(tokens.drop(columns=["layer", "kind", "sequences"]), on="module", how="left")
    names = list(layers["module"])
    return Reading(
        sequences=len(ids),
        length=length,
        query=-1 - suffix,
        heads=heads,
        layers=layers,
        rho={name: seen.rho(name, -1 - suffix) for name in names},
        entropy_by_position={name: tallies[name]() for name in names},
        part=part,
        predicted=_predicted(network, ids.to(place), batch) if predicting else (),
    )


def _predicted(network: Any, ids: torch.Tensor, batch: int) -> tuple[Prediction, ...]:
    from locater.measure import predict

    more: dict[str, Any] = _without_cache(network)
    return tuple(predict(network, ({"input_ids": part, **more} for part in ids.split(batch))))


def _observed(
    network: Any, ids: torch.Tensor, batch: int, query: int, progress: Callable[[float], None]
) -> tuple[Observation, dict[str, Callable[[], NDArray[np.float64]]]]:
    """What was seen, and for each module a function that gives its entropy by position."""
    import torch

    from locater.measure import observe
    from locater.measure._calls import Call
    from locater.measure._tally import HeadTally
    from locater.measure.attention import AttentionStatistics

    @dataclass(frozen=True)
    class Measured(Call):
        """A call whose statistics are known already."""

        known: AttentionStatistics | None = None

        def statistics(self) -> AttentionStatistics:
            assert self.known is not None
            return self.known

    class PositionTally(HeadTally):
        """Keeps the entropy of each query besides; all sequences have one length and no padding."""

        def __init__(self) -> None:
            super().__init__()
            self.total: torch.Tensor | None = None  # (H, T)
            self.sequences = 0

        @torch.no_grad()
        def add(self, call: Call, queries: tuple[int, ...]) -> None:
            found = call.statistics()
            entropy = found.entropy.double() if found.entropy.device.type != "mps" else found.entropy
            self.total = entropy.sum(0) if self.total is None else self.total + entropy.sum(0)
            self.sequences += len(entropy)
            given = {field.name: getattr(call, field.name) for field in fields(Call)}
            super().add(Measured(**given, known=found), queries)

        def by_position(self) -> NDArray[np.float64]:
            assert self.total is not None
            return (self.total / self.sequences).double().cpu().numpy()

    tallies = {}
    with observe(network, queries=(query,)) as seen, torch.inference_mode():
        for watch in seen._watches.values():
            watch.heads = tally = PositionTally()
            tallies[watch.place.name] = tally.by_position
        for start in range(0, len(ids), batch):
            _forward(network, ids[start : start + batch])
            progress(min(1.0, (start + batch) / len(ids)))
    return seen, tallies


def _forward(network: Any, ids: torch.Tensor) -> None:
    import torch

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
            f"{type(network).__name__} does not run on sequences of {ids.shape[1]} tokens: {_reason(error)}"
        ) from error


def _without_cache(network: Any) -> dict[str, bool]:
    return {"use_cache": False} if getattr(network.config, "use_cache", None) is not None else {}


# ---------------------------------------------------------------------- text and targets


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LocaterError(f"cannot read the text {path}: {error.strerror}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LocaterError(f"{path} is not text in UTF-8: byte {error.start} is {content[error.start]:#04x}") from error
    if "\0" in text:
        raise LocaterError(f"{path} is not text: it holds a zero byte")
    if not text.strip():
        raise LocaterError(f"{path} holds no text")
    return text


def _check_targets(plot: Path | None, json_file: str | None) -> None:
    """Says before the work what would be in the way after it; makes nothing."""
    if json_file not in (None, "-"):
        target = Path(str(json_file))
        if not target.parent.is_dir():
            raise LocaterError(f"cannot write {target}: there is no folder {target.parent}")
        if target.is_dir():
            raise LocaterError(f"cannot write {target}: it is a folder")
    if plot is not None:
        there = next(folder for folder in (plot, *plot.absolute().parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise LocaterError(f"cannot write into the folder {plot}: choose another one")


def _sequences(model: str, tokenizer: Any, text: str, length: int, source: str) -> tuple[torch.Tensor, int]:
    """The text as (sequences, length) token ids, and how many at the end of each only frame it."""
    import torch

    prefix, suffix = _frame(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    inner = length - len(prefix) - len(suffix)
    if inner < 1:
        raise LocaterError(
            f"--length {length} leaves no room for text beside the {length - inner} special tokens of {model}"
        )
    count = len(ids) // inner
    if count == 0:
        raise LocaterError(
            f"{source} is {len(ids)} tokens long for {model}, and one sequence takes {inner} of them: "
            f"give more text or a smaller --length"
        )
    body = torch.tensor(ids[: count * inner]).view(count, inner)
    ends = (torch.tensor(part, dtype=body.dtype).expand(count, -1) for part in (prefix, suffix))
    first, last = ends
    return torch.cat([first, body, last], 1), len(suffix)


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    framed, bare = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (True, False))
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    return [], []


# ---------------------------------------------------------------------- model


def _files(model: str) -> dict[str, Any]:
    """How transformers is to be told of the model; code that comes with one is not run, nor asked about."""
    path = Path(model)
    common = {"trust_remote_code": False}
    if path.is_dir():
        return {"pretrained_model_name_or_path": str(path), **common}
    if path.is_file():
        if path.suffix != ".gguf":
            raise LocaterError(f"{model} is no model to run: give its folder, a .gguf file, or a hub id")
        require("gguf", "hf")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, **common}
    if path.suffix == ".gguf" or path.is_absolute() or len(path.parts) > 2 or model.startswith("."):
        raise LocaterError(f"{model} does not exist; give a folder, a .gguf file, or a hub id like organisation/model")
    return {"pretrained_model_name_or_path": model, **common}


def _config(model: str, files: dict[str, Any]) -> Any:
    import transformers

    with _explained(f"{model} cannot be loaded"):
        return transformers.AutoConfig.from_pretrained(**files)


def _check_length(model: str, config: Any, length: int) -> None:
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < length:
        raise LocaterError(f"--length {length} is more than {model} takes, which is {longest} tokens")


def _tokenizer(model: str, files: dict[str, Any], config: Any) -> Any:
    import transformers

    wanted = f"{model} has no tokenizer that can be loaded, as from a tokenizer.json beside its weights"
    with _explained(wanted):
        tokenizer = transformers.AutoTokenizer.from_pretrained(**files, config=config)
        if not tokenizer("a", add_special_tokens=False)["input_ids"]:
            raise LocaterError("its vocabulary is empty")
    return tokenizer


def _check_ids(model: str, config: Any, ids: torch.Tensor) -> None:
    size = getattr(config.get_text_config(), "vocab_size", None)
    if isinstance(size, int) and int(ids.max()) >= size:
        raise LocaterError(f"the tokenizer of {model} gives token {int(ids.max())}, but the model has only {size}")


def _network(model: str, files: dict[str, Any], config: Any, device: torch.device) -> tuple[Any, str]:
    """The model without its head; of an encoder and decoder the encoder, since a text is nothing to decode."""
    import torch
    import transformers

    dtype: Any = torch.float32 if device.type == "cpu" else "auto"
    with _explained(f"{model} cannot be loaded"):
        options = {"config": config, "dtype": dtype, "output_loading_info": True}
        network, told = transformers.AutoModel.from_pretrained(**files, **options)
        missing = sorted(name for name in told["missing_keys"] if "pooler" not in name)
        if missing:  # transformers fills them with random numbers
            raise LocaterError(f"its weights lack {', '.join(missing[:3])}{' and others' if missing[3:] else ''}")
        whole = network.to(device).eval()
        if network.config.is_encoder_decoder:
            return whole.get_encoder(), "encoder"
    return whole, ""


def _device(name: str | None) -> torch.device:
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LocaterError(f"cannot run on the device {name!r}: {_reason(error)}") from error
    return device


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Loading fails in many ways, with errors of many libraries; one sentence of each will do."""
    try:
        yield
    except Exception as error:
        raise LocaterError(f"{what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip().removesuffix(" from one of:") if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars and remarks of transformers, which would end up between ours."""
    from transformers.utils import logging as remarks

    level, bars = remarks.get_verbosity(), remarks.is_progress_bar_enabled()
    remarks.set_verbosity(logging.ERROR)
    remarks.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        remarks.set_verbosity(level)
        if bars:
            remarks.enable_progress_bar()  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------------- for people


def _print(model: str, seen: Reading, top: int) -> None:
    console = terminal.out()
    part = f" (its {seen.part})" if seen.part else ""
    console.print(
        f"{model}{part}: {len(seen.heads)} heads in {len(seen.layers)} attention modules, "
        f"{seen.sequences} sequences of {seen.length} tokens",
        highlight=False,
    )
    columns = ["layer", "kind", "head", "entropy", "entropy_share", "max_logit", "logsumexp"]
    for title, table in (
        ("lowest entropy share", seen.heads.nsmallest(top, "entropy_share")),
        ("largest logit", seen.heads.nlargest(top, "max_logit")),
    ):
        console.print(terminal.table(_shown(table, columns), title, box=SIMPLE_HEAD))
    columns = ["layer", "kind", "entropy", "entropy_share", "max_logit"]
    columns += ["rank_residual", "effective_rank", "mean_cosine"]
    console.print(
        terminal.table(_shown(seen.layers, columns), "layers: heads averaged, largest logit", box=SIMPLE_HEAD)
    )
    console.print("entropy in nats, averaged over queries; its share is of ln(keys that the query sees).")


def _shown(table: pd.DataFrame, columns: Sequence[str]) -> list[dict[str, Any]]:
    kept = [name for name in columns if name != "kind" or table["kind"].nunique() > 1]
    return [{name.replace("_", " "): row[name] for name in kept} for row in table.to_dict("records")]
