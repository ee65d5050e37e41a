"""The lab's commands: train, sweep, claims, presets."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from locater import _terminal as terminal
from locater._terminal import JsonOption
from locater.errors import LocaterError
from locater.io import write_file

if TYPE_CHECKING:
    from locater.lab import Config, Preset, Progress

__all__ = ["changed", "register", "summary", "watching"]

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


def register(app: typer.Typer) -> None:
    app.command("train")(train_command)
    app.command("sweep")(sweep_command)
    app.command("claims")(claims_command)
    app.command("presets")(presets_command)


def presets_command(json_file: JsonOption = None) -> None:
    """What `train` and `sweep` can be told to do."""
    from locater.lab import PRESETS

    if json_file is not None:
        terminal.write_json(json_file, {name: {"about": p.about, **p.config.to_json()} for name, p in PRESETS.items()})
    if json_file != "-":
        terminal.out().print(terminal.table([{"preset": name, "is": p.about} for name, p in PRESETS.items()], ""))


def train_command(
    preset: PresetArgument,
    out: FolderOption = None,
    data: DataOption = None,
    kappa_2: Annotated[str, typer.Option("--kappa-2", help="LocAteR's κ₂ as in the paper, or none.")] = "none",
    kappa_1: Kappa1Option = 100.0,
    learning_rate: RateOption = None,
    decay: DecayOption = 0.01,
    seed: terminal.SeedOption = 0,
    steps: StepsOption = None,
    precision: PrecisionOption = None,
    device: DeviceOption = None,
    settings: SetOption = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard's files too.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Train one language model of the paper, with or without LocAteR; go on if the folder holds its checkpoints."""
    from locater.lab import members_for, train

    chosen, config = _config(preset, data, steps, precision, settings)
    (member,) = members_for(
        config,
        [_kappa(kappa_2)],
        seeds=[seed],
        learning_rate=chosen.learning_rate if learning_rate is None else learning_rate,
        decay=decay,
        kappa_1=kappa_1,
    )
    folder = out or Path("runs") / f"{preset}-{member.name}"
    with watching() as watch:
        train(
            config,
            [member],
            folder,
            device=device,
            tensorboard=tensorboard,
            watch=lambda progress: watch(preset, progress),
            about={"preset": preset},
        )
    _report(folder, json_file)


def sweep_command(
    preset: PresetArgument,
    out: FolderOption = None,
    data: DataOption = None,
    kappa_2: Annotated[
        str | None, typer.Option("--kappa-2", help="κ₂ as in the paper, and none, with commas between.")
    ] = None,
    kappa_1: Kappa1Option = 100.0,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = "0",
    readings: Annotated[
        str, typer.Option("--readings", help="Of the paper's objective: figures, trace-mean, scale-sum, printed.")
    ] = "figures",
    learning_rate: RateOption = None,
    decay: DecayOption = 0.01,
    steps: StepsOption = None,
    precision: PrecisionOption = None,
    device: DeviceOption = None,
    settings: SetOption = None,
    group_size: Annotated[int, typer.Option(help="How many members to train stacked.")] = 24,
    engine: Annotated[str, typer.Option(help="local, or ray.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster, as ray://HOST:10001 or HOST:6379.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Train a model for every κ₂ and seed, stacked; go on with what the folder holds."""
    from locater.lab import members_for, sweep

    chosen, config = _config(preset, data, steps, precision, settings)
    kappas = chosen.kappas if kappa_2 is None else tuple(_kappa(word) for word in _words("--kappa-2", kappa_2))
    numbers = [_whole("--seeds", word) for word in _words("--seeds", seeds)]
    members = []
    for i, reading in enumerate(_words("--readings", readings)):
        # a model without LocAteR is the same under every reading
        wanted = [kappa for kappa in kappas if kappa is not None or i == 0]
        members += members_for(
            config,
            wanted,
            seeds=numbers,
            learning_rate=chosen.learning_rate if learning_rate is None else learning_rate,
            decay=decay,
            kappa_1=kappa_1,
            reading=reading,
        )
    folder = out or Path("runs") / preset
    with watching() as watch:
        sweep(
            config,
            members,
            folder,
            group_size=group_size,
            engine=engine,
            address=address,
            device=device,
            watch=watch,
            about={"preset": preset},
        )
    _report(folder, json_file)


def claims_command(
    runs: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a sweep.")],
    seeds_from: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A sweep of several seeds, for the spread where this one has a single seed."),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as Markdown.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Put the paper's claims to the test with the numbers of a sweep."""
    from locater.lab.claims import claims, claims_markdown, seed_spread

    noise = None if seeds_from is None else seed_spread(seeds_from)
    found = claims(runs, noise=noise)
    if markdown is not None:
        write_file(markdown, (claims_markdown(runs, noise=noise).rstrip() + "\n").encode())
    if json_file is not None:
        terminal.write_json(json_file, {"runs": str(runs), "claims": [asdict(claim) for claim in found]})
    if json_file != "-":
        rows = [{"the paper says": c.statement, "where": c.where, "measured": c.measured, "": c.verdict} for c in found]
        terminal.out().print(terminal.table(rows, ""))


def _config(
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


def _words(option: str, value: str) -> list[str]:
    words = [word.strip() for word in value.split(",") if word.strip()]
    if not words:
        raise LocaterError(f"{option} needs at least one value, got {value!r}")
    if len(set(words)) < len(words):
        raise LocaterError(f"{option} names a value twice: {value!r}")
    return words


def _whole(option: str, word: str) -> int:
    try:
        return int(word)
    except ValueError as error:
        raise LocaterError(f"{option} takes whole numbers, got {word!r}") from error


def _kappa(word: str) -> float | None:
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
    told: dict[str, float] = {}
    if not console.is_terminal:

        def tell(group: str, progress: Progress) -> None:
            now = time.monotonic()
            told.setdefault(group, now)
            if progress.note or progress.done or now - told[group] > 30:
                told[group] = now
                print(f"{group}: {_line(progress)}", file=sys.stderr, flush=True)

        yield tell
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

    def finite(values: Any, reduce: Any = np.mean) -> float | None:
        """Over layers and heads; None for a member that broke."""
        value = float(reduce(np.asarray(values, dtype=float)))
        return value if np.isfinite(value) else None

    rows = []
    for name, records in read_metrics(folder).groupby("member", sort=False):
        last, best = records.iloc[-1], records["perplexity"].dropna()
        row = {
            "member": name,
            "steps": int(last["step"]),
            "perplexity": finite(last["perplexity"]),
            "best perplexity": finite(best.min()) if len(best) else None,
            "trace": finite(last["trace"]),
            "scale": finite(last["scale"]),
            "entropy": finite(last["entropy"]),
            "max logit": finite(last["max_logit"], np.max),
            "rank residual": finite(last["rank_residual"][-1]),
        }
        if "broke_at" in records and records["broke_at"].notna().any():
            row["broke at"] = int(records["broke_at"].max())
        rows.append(row)
    return rows


def _report(folder: Path, json_file: str | None) -> None:
    rows = summary(folder)
    if json_file is not None:
        terminal.write_json(json_file, {"folder": str(folder), "members": rows})
    if json_file != "-":
        terminal.out().print(terminal.table(rows, "validation perplexity; W_QK and attention averaged over heads"))
        print(folder)
