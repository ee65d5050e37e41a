"""The command `measure`: a model reads a text, and what its attention does is shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption, RevisionOption
from locater.errors import LocaterError
from locater.io import read_file

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from locater.measure import Alarm, Prediction
    from locater.measure.reading import Reading

__all__ = ["measure_command", "text_of"]


def measure_command(
    model: Annotated[str, typer.Argument(help="A hub id (org/model@revision), a folder, or a .gguf file.")],
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="What the model is to read, in UTF-8.")],
    revision: RevisionOption = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 256,
    sequences: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many to read at most, from the first to the last of the text.", show_default="all"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 8,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU if there is one.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many heads to show.")] = 10,
    predicting: Annotated[
        bool,
        typer.Option("--predict", help="Predict entropy, weights and ρ from half of the sequences, for the others."),
    ] = False,
    since: Annotated[
        Path | None,
        typer.Option("--since", metavar="JSON", help="An earlier measurement of this text: what has collapsed since?"),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="DIR", help="Draw maps, positions and predictions.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Entropy, largest logit and ρ of every head of a model while it reads a text."""
    from locater.measure.reading import alarms_since, read

    words = text_of(text)
    _check_folder(plot)
    with terminal.progress("reading") as progress:
        options: dict[str, Any] = {"revision": revision, "length": length, "most": sequences}
        options |= {"batch": batch, "device": device}
        seen = read(model, words, progress=progress, source=str(text), predicting=predicting, **options)
    content = {"model": model, "length": length, **seen.to_json()}
    alarms = None if since is None else alarms_since(since, content)
    if alarms is not None:
        content["alarms"] = [asdict(alarm) for alarm in alarms]
    written: list[Path] = []
    if plot is not None:
        from locater.figures import draw_measure

        written = draw_measure(seen, "/".join(Path(model).parts[-2:]), plot)
    if json_file is not None:
        terminal.write_json(json_file, content)
    if json_file != "-":
        _print(model, seen, top)
        if alarms is not None:
            _print_alarms(alarms, since)
        for path in written:
            print(path)


# ---------------------------------------------------------------------- text and folder


def text_of(path: Path) -> str:
    """What is in a file of text."""
    content = read_file(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LocaterError(f"{path} is not text in UTF-8: byte {error.start} is {content[error.start]:#04x}") from error
    if "\0" in text:
        raise LocaterError(f"{path} is not text: it holds a zero byte")
    if not text.strip():
        raise LocaterError(f"{path} holds no text")
    return text


def _check_folder(plot: Path | None) -> None:
    """Refuses, before the work, a folder that could not be written after it; makes nothing."""
    if plot is not None:
        there = next(folder for folder in (plot, *plot.absolute().parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise LocaterError(f"cannot write into the folder {plot}: choose another one")


# ---------------------------------------------------------------------- for people


def _print(model: str, seen: Reading, top: int) -> None:
    console = terminal.out()
    part = f" (its {seen.part})" if seen.part else ""
    console.print(
        f"{model}{part}: {len(seen.heads)} heads in {len(seen.layers)} attention modules, "
        f"{seen.extent} of {seen.length} tokens",
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
    if seen.predicted:
        _print_agreement(console, seen.predicted)


def _print_agreement(console: Console, predicted: Sequence[Prediction]) -> None:
    from locater.measure import agreement

    found = agreement(predicted)
    rows = [
        {
            "law": row.law,
            "heads": row.heads,
            "median error": row.median,
            "90th percentile": row.percentile_90,
            "rank correlation": row.rank_correlation,
        }
        for row in found
    ]
    position = predicted[0].attention[0].query + 1
    console.print(terminal.table(rows, f"predicted entropy of token {position}, nats", box=SIMPLE_HEAD))
    console.print(
        f"Estimated from half of the sequences, measured in the other {predicted[0].sequences}: "
        f"a perfect law would have a median error of {found[0].floor:.3f}.",
        highlight=False,
    )


def _print_alarms(alarms: Sequence[Alarm], since: Path | None) -> None:
    console = terminal.out()
    for alarm in alarms:
        console.print(f"[bold]{alarm.kind}[/bold] in {alarm.module}: {alarm.reason}", highlight=False)
    console.print(f"{len(alarms)} alarms; step 0 is {since}, step 1 is now." if alarms else f"No alarm since {since}.")


def _shown(table: pd.DataFrame, columns: Sequence[str]) -> list[dict[str, Any]]:
    kept = [name for name in columns if name != "kind" or table["kind"].nunique() > 1]
    return [{name.replace("_", " "): row[name] for name in kept} for row in table.to_dict("records")]
