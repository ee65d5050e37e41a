"""What the commands that train share: options, settings, a live table, the results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from locater.cli import _terminal as terminal
from locater.errors import LocaterError
from locater.io import nulled

if TYPE_CHECKING:
    from locater.lab import Config, Preset, Progress


PresetArgument = Annotated[str, typer.Argument(metavar="PRESET", help="As `locater presets` lists them.")]
DataOption = Annotated[
    str | None,
    typer.Option("--data", metavar="PATH", help="A folder with train, valid and test text, or wikitext-2."),
]
FolderOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where to write; a folder in runs if not given.")
]
StepsOption = Annotated[int | None, typer.Option(help="Updates; the preset's if not given.")]
PrecisionOption = Annotated[str | None, typer.Option(help="fp32, bf16, fp16, or on a CPU fp64.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU if there is one.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting, as in --set batch=16.")
]
RateOption = Annotated[float | None, typer.Option(help="Learning rate; the preset's if not given.")]
DecayOption = Annotated[float, typer.Option(help="Decoupled weight decay.")]
Kappa1Option = Annotated[float, typer.Option("--kappa-1", help="The paper's κ₁.")]


def configured(
    name: str, data: str | None, steps: int | None, precision: str | None, settings: list[str] | None
) -> tuple[Preset, Config]:
    from locater.lab import preset

    chosen = preset(name)
    return chosen, changed(chosen.config, settings, data=data, steps=steps, precision=precision)


def changed(config: Config, settings: list[str] | None, **given: Any) -> Config:
    """With what was given and is not None, and with what --set said."""
    from locater.lab import parsed

    changes = {key: value for key, value in given.items() if value is not None}
    for setting in settings or []:
        key, equals, word = setting.partition("=")
        if not equals:
            raise LocaterError(f"--set takes NAME=VALUE, got {setting!r}")
        if given.get(key.strip()) is not None:
            raise LocaterError(f"{key.strip()} is given twice, by --set {setting} and by its own option")
        changes[key.strip()] = parsed(key.strip(), word.strip())
    return config.changed(**changes)


def kappa(word: str) -> float | None:
    if word == "none":
        return None
    try:
        return float(word)
    except ValueError as error:
        raise LocaterError(f"--kappa-2 takes a number or none, got {word!r}") from error


# ---------------------------------------------------------------------- for people


@contextmanager
def watching() -> Iterator[Any]:
    """A live table on a terminal, a line now and then elsewhere; takes the name of a group and its progress."""
    console = Console(stderr=True)
    seen: dict[str, Progress] = {}
    printed: dict[str, float] = {}  # when, by group
    if not console.is_terminal:

        def report(group: str, progress: Progress) -> None:
            now = time.monotonic()
            printed.setdefault(group, now)
            if progress.note or progress.done or now - printed[group] > 30:
                printed[group] = now
                print(f"{group}: {_line(progress)}", file=sys.stderr, flush=True)

        yield report
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def show(group: str, progress: Progress) -> None:
            seen[group] = progress
            live.update(Group(*(_live(name, p) for name, p in seen.items())))

        yield show


def _line(p: Progress) -> str:
    loss = f"mean loss {sum(p.losses.values()) / len(p.losses):.4f}, " if p.losses else ""
    known = [value for value in p.perplexities.values() if value is not None]
    best = f"best perplexity {min(known):.4g}, " if known else ""
    broke = f"; broke: {', '.join(f'{m} at {s}' for m, s in p.broke_at.items())}" if p.broke_at else ""
    note = f"; {p.note}" if p.note else ""
    return (
        f"step {p.step:,} of {p.steps:,}, {p.tokens_per_second:,.0f} tokens/s, {loss}"
        f"{best}{_duration(p.seconds_left)} left{broke}{note}"
    )


def _live(group: str, p: Progress) -> Group:
    head = Text(
        f"{group}  step {p.step:,} of {p.steps:,}   {p.tokens_per_second:,.0f} tokens/s   "
        f"{_duration(p.seconds_left)} left   {p.note}",
        style="bold",
    )
    table = Table(box=None, padding=(0, 2))
    for name in ("member", "loss", "perplexity", ""):
        table.add_column(name, justify="left" if name in ("member", "") else "right")
    for member in p.perplexities:
        loss, perplexity = p.losses.get(member), p.perplexities[member]
        table.add_row(
            member,
            "" if loss is None else f"{loss:.4f}",
            "" if perplexity is None else f"{perplexity:.2f}",
            f"broke at {p.broke_at[member]}" if member in p.broke_at else "",
        )
    return Group(head, table)


def _duration(seconds: float) -> str:
    if seconds == float("inf"):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def summary(folder: Path) -> list[dict[str, Any]]:
    """A row a member: where it ended."""
    import numpy as np

    from locater.lab import read_metrics

    def mean(values: Any) -> float:
        """Over layers and heads; NaN for a member that broke."""
        return float(np.mean(np.asarray(values, dtype=float)))

    rows = []
    for name, records in read_metrics(folder).groupby("member", sort=False):
        last, best = records.iloc[-1], records["perplexity"].dropna()
        row = {
            "member": name,
            "steps": int(last["step"]),
            "perplexity": mean(last["perplexity"]),
            "best perplexity": mean(best.min()),
            "trace": mean(last["trace"]),
            "scale": mean(last["scale"]),
            "entropy": mean(last["entropy"]),
            "max logit": float(np.max(np.asarray(last["max_logit"], dtype=float))),
            "rank residual": mean(last["rank_residual"][-1]),
        }
        if "broke_at" in records and records["broke_at"].notna().any():
            row["broke at"] = int(records["broke_at"].max())
        rows.append(nulled(row))
    return rows


def show_results(folder: Path, json_file: str | None) -> None:
    rows = summary(folder)
    if json_file is not None:
        terminal.write_json(json_file, {"folder": str(folder), "members": rows})
    if json_file != "-":
        terminal.out().print(terminal.table(rows, "validation perplexity; W_QK and attention averaged over heads"))
        print(folder)
