"""The command `doctor`: what is wrong with a model's attention, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption, RevisionOption
from locater.cli.measure import text_of

__all__ = ["doctor_command"]


def doctor_command(
    model: Annotated[str, typer.Argument(help="A hub id (org/model@revision), a folder, or a .gguf file.")],
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="What the model is to read, in UTF-8.")],
    log: Annotated[
        Path | None, typer.Option("--log", metavar="FILE", help="The log of attention of its training, for its alarms.")
    ] = None,
    revision: RevisionOption = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 256,
    sequences: Annotated[
        int, typer.Option(min=1, help="How many to read at most, from the first to the last of the text.")
    ] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 8,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU if there is one.")] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path("doctor.html"),
    json_file: JsonOption = None,
) -> None:
    """Say in at most five sentences what is wrong with a model's attention and what to do, and write a page of it."""
    from locater.measure.doctor import diagnose
    from locater.measure.logs import read_log
    from locater.measure.reading import examine_reading
    from locater.models import Scan
    from locater.pages.report import Found, page_of

    words = text_of(text)
    terminal.check_file(out)
    history = None if log is None else read_log(log)
    with terminal.progress("reading") as progress:
        options: dict[str, Any] = {"revision": revision, "length": length, "most": sequences}
        options |= {"batch": batch, "device": device}
        reading, examined, network = examine_reading(model, words, progress=progress, source=str(text), **options)
    diagnosis = diagnose(examined, network, log=history)
    content = {"model": model, "text": str(text), "length": length, "sequences": reading.sequences}
    content |= {"left_out": reading.left_out, **diagnosis.to_json()}
    measured = {"model": model, "length": length, **reading.to_json()}
    shown = [Found("diagnosis", Path(model), content), Found("measurement", Path(model), measured)]
    if diagnosis.heads["scale"].notna().any():  # the weights were read
        shown.append(Found("scan", Path(model), Scan.of(network, name=model, fold_norm=True, tokens=length).to_json()))
    if history is not None and log is not None and not history.empty:
        shown.append(Found("log", log, history.to_dict("records")))
    page_of(shown).write(out)
    if json_file is not None:
        terminal.write_json(json_file, content)
    if json_file != "-":
        console = terminal.out()
        read = [f"Read {reading.extent} of the text."] if reading.left_out else []
        for sentence in (*diagnosis.sentences(), *diagnosis.notes, *read):
            console.print(sentence, highlight=False, markup=False, soft_wrap=True)  # code is not folded
        console.print(str(out), highlight=False, markup=False, soft_wrap=True)
