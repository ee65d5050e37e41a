"""The command `scan`: the query-key spectrum of every head."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption, RevisionOption
from locater.errors import LocaterError, reason
from locater.io import writable_folder, write_file

if TYPE_CHECKING:
    import pandas as pd

    from locater.models import Attention
    from locater.models.checkpoint import Checkpoint

__all__ = ["scan_command"]


def scan_command(
    model: Annotated[
        str, typer.Argument(help="A folder, a .safetensors, .gguf, .bin or .pt file, or a hub id (org/model@revision).")
    ],
    revision: RevisionOption = None,
    offset: Annotated[float, typer.Option(help="Under RoPE: key position minus query position.")] = 0.0,
    average_offsets: Annotated[
        int | None, typer.Option(help="Under RoPE: average W_QK over that many offsets from 0 down.")
    ] = None,
    fold_norm: Annotated[bool, typer.Option("--fold-norm", help="Fold in the norm before attention.")] = False,
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="Only these, as 0,5,10-12; no weights of others are read.")
    ] = None,
    reader: Annotated[
        Path | None,
        typer.Option(metavar="FILE.py", help="A file of yours that registers a family; it is run."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="T of both regimes: softmax's, and the shape of ρ.")] = 64,
    top: Annotated[int, typer.Option(min=1, help="How many heads to show.")] = 20,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the whole table.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="DIR", help="Draw maps and eigenvalues.")] = None,
    json_file: JsonOption = None,
) -> None:
    """The query-key spectrum of every head of a model, the largest logits first.

    attention_regime: where softmax looks, for T independent tokens of variance 1. regime: the shape of the paper's ρ,
    for a random walk of T tokens.
    """
    from locater.figures import draw_scan
    from locater.models import Scan
    from locater.models.checkpoint import open_checkpoint
    from locater.models.scan import table_of
    from locater.models.spectrum import find
    from locater.models.unread import in_words

    if plot is not None:
        writable_folder(plot)
    terminal.check_file(csv)
    if reader is not None:
        _run(reader)
    checkpoint = open_checkpoint(model, revision=revision)
    asked: dict[str, Any] = {"offset": offset, "average_offsets": average_offsets, "fold_norm": fold_norm}
    asked["layers"] = None if layers is None else _numbers(layers)
    with terminal.progress("scanning") as show:
        watch = _watched(checkpoint, asked["layers"], show)
        with_eigenvalues = plot is not None or json_file is not None  # they take longer than the rest
        made = Scan.of(checkpoint, name=model, **asked, tokens=tokens, progress=watch) if with_eigenvalues else None
        if made is None:
            table = table_of(find(checkpoint, **asked), tokens, lambda each: watch(each.attention))
        else:
            table = made.table
        written = draw_scan(made, plot) if made and plot else []
    if csv is not None and str(csv) != "-":
        write_file(csv, table.to_csv(index=False).encode())
    if made and json_file is not None:
        terminal.write_json(json_file, made.to_json())
    if str(csv) == "-":
        print(table.to_csv(index=False), end="")
    if "-" in (json_file, str(csv)):
        return
    console = terminal.out()
    gain = "" if fold_norm else "; --fold-norm counts the gain of the norm"
    lines = [
        f"{model}: {len(table)} heads in {table['module'].nunique()} attention modules",
        f"attention_regime, softmax over {tokens} independent tokens of variance 1{gain}: "
        + _counts(table["attention_regime"]),
        f"regime, the shape of the paper's ρ over a random walk of {tokens} tokens: {_counts(table['regime'])}",
        *in_words(table.attrs["unread"]),
    ]
    if checkpoint.traffic is not None:
        lines.insert(0, "fetched {} of {}".format(*map(_bytes, checkpoint.traffic())))
    console.print("\n".join(lines), highlight=False, markup=False)
    shown = table.assign(_size=table["spectral_norm"] * table["logit_scale"].abs()).nlargest(top, "_size")
    columns = ("layer", "kind", "head", "trace", "scale", "xi", "spectral_norm", "effective_rank", "symmetric_share")
    records = [
        {name: row[name] for name in (*columns, "r", "attention_entropy", "attention_regime", "regime")}
        for row in shown.to_dict("records")
    ]
    if table["kind"].nunique() == 1:
        records = [{name: cell for name, cell in row.items() if name != "kind"} for row in records]
    console.print(terminal.table(records, "", box=SIMPLE_HEAD))
    for path in written:
        print(path)


def _counts(names: pd.Series[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in names.value_counts().items() if name) or "none"


def _run(file: Path) -> None:
    """Runs a file of the user's, which may import others beside it."""
    if not file.is_file():
        raise LocaterError(f"--reader takes a Python file, and {file} is none")
    module = ModuleType("locater_reader")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(file.resolve().parent))
    try:
        exec(compile(file.read_bytes(), file, "exec"), vars(module))
    except LocaterError:
        raise
    except (Exception, SystemExit) as error:  # it is anyone's code
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(file)]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
        where = file if line is None else f"line {line} of {file}"
        raise LocaterError(f"--reader: {where} fails: {type(error).__name__} {reason(error)}") from error
    finally:
        sys.path.pop(0)


def _numbers(text: str) -> set[int]:
    """0,5,10-12 → {0, 5, 10, 11, 12}."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise LocaterError(f"--layers takes numbers and ranges like 0,5,10-12, got {text!r:.80}")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _watched(
    checkpoint: Checkpoint, layers: set[int] | None, show: Callable[[float], None]
) -> Callable[[Attention], None]:
    """Shows the share of the layers that are done; how many there are, the first number of the names says."""
    numbers = (re.search(r"\.(\d{1,4})\.", name) for name in checkpoint.names)
    expected = {int(found[1]) for found in numbers if found and (layers is None or int(found[1]) in layers)}
    done: set[int] = set()

    def watch(attention: Attention) -> None:
        done.add(attention.layer)
        show(len(done) / max(len(expected), len(done)))

    return watch


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
