"""One run: train its members, record what is measured, and be ready to be killed at any moment."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from locater import __version__
from locater.errors import LocaterError, require
from locater.io import remove_unfinished, writable_folder
from locater.lab.config import FREE_TO_RESUME, Config, Member, fingerprint
from locater.lab.data import Corpus, load_corpus
from locater.lab.engine.interventions import Interventions
from locater.lab.engine.methods import METHODS
from locater.lab.engine.stack import Stack, check_sizes
from locater.lab.intervention import check_interventions
from locater.lab.runs import checkpoint
from locater.lab.runs.lock import exclusive_lock
from locater.lab.runs.records import MetricsFile, Run, read_records, read_run, write_run
from locater.models.pretrained import device_of

__all__ = ["Progress", "Terminated", "train"]


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    step: int
    steps: int
    tokens_per_second: float  # of all members together
    seconds_left: float
    losses: dict[str, float]  # by member, of the last batch
    perplexities: dict[str, float | None]  # by member, of the last record
    broke_at: dict[str, int]  # members that stopped, and at which step
    note: str = ""
    done: bool = False


Watch = Callable[[Progress], None]


def train(
    config: Config,
    members: Sequence[Member],
    folder: str | Path,
    *,
    corpus: Corpus | None = None,
    device: str | None = None,
    tensorboard: bool = False,
    watch: Watch | None = None,
    about: dict[str, Any] | None = None,
    owner: str | None = None,
) -> Run:
    """Trains the members together into `folder`; if that holds this run's checkpoints, goes on from the last one.

    Ctrl-C, or SIGTERM as schedulers send it, ends after the current step with a checkpoint written, and is raised then
    as KeyboardInterrupt or `Terminated`, a SystemExit. A folder in use is waited for a while, longer if an earlier
    process of the same `owner` has it.
    """
    members = tuple(members)
    names = [member.name for member in members]
    if not members or len(set(names)) < len(names):
        raise LocaterError(f"a run needs members whose names differ, got {', '.join(names) or 'none'}")
    check_interventions(config.model, members)
    torch_device = device_of(device)
    corpus = corpus or load_corpus(config.data, unit=config.unit, vocabulary=config.vocabulary)
    folder = Path(folder)
    probed = min(config.probe_blocks, len(corpus.splits["valid"]) // config.model.tokens)
    run = Run(folder, config, members, _about(corpus, torch_device) | {"probed": probed} | (about or {}))
    if (folder / "sweep.json").exists():
        raise LocaterError(f"{folder} holds a sweep; choose another folder for a run of its own")
    earlier = read_run(folder) if (folder / "run.json").exists() else None
    if earlier is not None:
        _check_same(earlier, run)
        run = replace(run, about=earlier.about)
    check_sizes(config, corpus)
    writable_folder(folder)
    with _determinism(config.deterministic), exclusive_lock(folder, owner):
        remove_unfinished(folder)
        loaded = checkpoint.load_newest(folder / "checkpoints", _fingerprint(run))
        if loaded is None and _finished_without(run, earlier):
            return run
        if loaded is not None and loaded.step > config.steps:
            raise LocaterError(f"the run in {folder} is at step {loaded.step:,} already, beyond {config.steps:,}")
        stack = Stack(config, members, corpus, torch_device)
        if loaded is not None:
            stack.load_state(loaded.state)
        kept = -1 if loaded is None else loaded.step  # records up to this step
        metrics = MetricsFile(folder, kept, None if loaded is None else loaded.records)
        write_run(run)
        began = time.perf_counter()
        with _Interrupts() as interrupts, _outputs(metrics, kept, tensorboard) as record:
            try:
                session = _Session(stack, run, metrics, record, interrupts, watch or (lambda _: None))
                session.run_to_the_end(_note(loaded))
            finally:
                before = run.about.get("seconds")
                spent = time.perf_counter() - began + (before if isinstance(before, int | float) else 0.0)
                run.about["seconds"] = round(spent, 1)
                write_run(run)
    return run


@dataclass
class _Session:
    """From the step the stack is at to the last one."""

    stack: Stack
    run: Run
    metrics: MetricsFile
    record: Callable[[list[dict[str, Any]]], None]
    interrupts: _Interrupts
    watch: Watch

    def __post_init__(self) -> None:
        self.perplexities: dict[str, float | None] = {}
        steps = zip(self.stack.members, self.stack.broke_at.tolist(), strict=True)
        self.broke_at = {member.name: step for member, step in steps if step >= 0}

    def run_to_the_end(self, note: str) -> None:
        config, stack = self.run.config, self.stack
        began, first, reported, saved = time.perf_counter(), stack.step, time.perf_counter(), stack.step
        if stack.step == 0:
            self._measure()
        self._report(began, first, note)
        while stack.step < config.steps and len(self.broke_at) < len(stack):
            stack.advance()
            if config.records_at(stack.step):
                self._measure()
            if config.checkpoints_at(stack.step):
                self._save()
                saved = stack.step
            if self.interrupts.wanted:
                if config.checkpoint_every and saved < stack.step:
                    self._save()
                raise self.interrupts.wanted
            if (now := time.perf_counter()) - reported > 0.5:
                reported = now
                self._report(began, first)
        if config.checkpoint_every and saved < stack.step:  # all members broke; the last record says so
            self._save()
        self._report(began, first, done=True)

    def _save(self) -> None:
        folder, state = self.run.folder / "checkpoints", self.stack.state()
        checkpoint.save(folder, self.stack.step, state, _fingerprint(self.run), self.metrics.checksums)

    def _measure(self) -> None:
        records = self.stack.measure()
        self.record(records)
        self.perplexities = {row["member"]: row["perplexity"] for row in records}
        self.broke_at = {row["member"]: row["broke_at"] for row in records if "broke_at" in row}

    def _report(self, began: float, first: int, note: str = "", *, done: bool = False) -> None:
        stack, config = self.stack, self.run.config
        made, seconds = stack.step - first, time.perf_counter() - began
        rate = made / seconds if made else 0.0
        losses = dict(zip((m.name for m in stack.members), stack.losses.tolist(), strict=True)) if made else {}
        self.watch(
            Progress(
                stack.step,
                config.steps,
                rate * config.tokens_per_batch * len(stack),
                (config.steps - stack.step) / rate if rate else float("inf"),
                losses,
                self.perplexities,
                self.broke_at,
                note,
                done,
            )
        )


def _note(loaded: checkpoint.Loaded | None) -> str:
    """A sentence about where a run goes on, for people."""
    if loaded is None:
        return ""
    damaged = f"; damaged and passed over: {', '.join(loaded.damaged)}" if loaded.damaged else ""
    return f"going on from step {loaded.step}{damaged}"


def _finished_without(run: Run, earlier: Run | None) -> bool:
    """Whether a run that left no checkpoint has come to its end; one that is lost in between is not overwritten.

    A step's record is written before its checkpoint: a run that was killed before it had any begins anew.
    """
    records = read_records(run.folder)
    if not records:
        return False
    last = max(record["step"] for record in records)
    if earlier is not None and last <= min(earlier.config.checkpoint_every, earlier.config.steps):
        return False
    if last >= run.config.steps or all("broke_at" in record for record in records if record["step"] == last):
        return True
    raise LocaterError(
        f"the run in {run.folder} ended at step {last:,} and left no checkpoint to go on from; "
        "remove the folder to start anew, or choose another one"
    )


def _check_same(earlier: Run, run: Run) -> None:
    """More steps are welcome; anything else is another run."""
    if earlier.about.get("words") != run.about["words"]:
        raise LocaterError(
            f"the run in {run.folder} was trained on another vocabulary ({earlier.about.get('vocabulary')} words, "
            f"now {run.about['vocabulary']}); choose another folder, or the data it began with"
        )
    parted = [m.name for m in run.members if m.intervention is not None and m.intervention.until < 1]
    if parted and earlier.config.steps != run.config.steps:
        raise LocaterError(
            f"{parted[0]} in {run.folder} has LocAteR for a part of {earlier.config.steps:,} updates, and that part "
            f"would be another of {run.config.steps:,}: choose another folder"
        )
    if _fingerprint(earlier) != _fingerprint(run):
        then, now = (
            each.config.without(FREE_TO_RESUME) | {"members": [member.to_json() for member in each.members]}
            for each in (earlier, run)
        )
        differs = next((key for key in then if then[key] != now[key]), "the text")
        if differs == "members" and len(then[differs]) == len(now[differs]):
            pairs = zip(then[differs], now[differs], strict=True)
            fields = [key for a, b in pairs for key in a | b if a.get(key) != b.get(key)]
            differs = f"{fields[0]} of its members"
        raise LocaterError(
            f"{run.folder} belongs to another run: {differs} differs; choose another folder, or remove it to start anew"
        )


def _fingerprint(run: Run) -> str:
    """Of all that decides what the numbers will be."""
    settings = run.config.without(FREE_TO_RESUME)
    if settings["model"]["positions"] == "sines":  # checkpoints that were written before there were others
        del settings["model"]["positions"]
    version = METHODS[run.config.model.method].version
    rest: list[Any] = [] if version == 1 else [version]  # the first had no number in its checkpoints
    if any(member.intervention for member in run.members):
        rest.append(["interventions", Interventions.version])
    return fingerprint([settings, [member.to_json() for member in run.members], run.about.get("corpus"), *rest])


def _about(corpus: Corpus, device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "text": corpus.name,
        "corpus": corpus.fingerprint,
        "words": corpus.words_fingerprint,
        "vocabulary": len(corpus.words),
        "hardware": torch.cuda.get_device_name(device) if cuda else f"{torch.get_num_threads()} CPU threads",
        "versions": {
            "locater": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


@contextlib.contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def _outputs(metrics: MetricsFile, step: int, tensorboard: bool) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """Where records go: the metrics file, and TensorBoard if asked."""
    writer = None
    if tensorboard:
        require("tensorboard", "lab")
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(metrics.path.parent / "tensorboard"), purge_step=step + 1)

    def record(records: list[dict[str, Any]]) -> None:
        metrics.append(records)
        if writer is not None:
            for row in records:
                for name, value in _scalars(row):
                    writer.add_scalar(f"{name}/{row['member']}", value, row["step"])
            writer.flush()

    try:
        yield record
    finally:
        metrics.close()
        if writer is not None:
            writer.close()


def _scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a record by name, those of layers as name/layer, those of heads as name/layer.head."""
    for name, value in row.items():
        if name in ("step", "member", "rho", "eigenvalues") or value is None:
            continue
        found = np.asarray(value, dtype=float)  # a number that is null is NaN
        for index, number in np.ndenumerate(found):
            yield "/".join(filter(None, (name, ".".join(map(str, index))))), number


class Terminated(SystemExit):
    """SIGTERM: the process is to end, with time to write a checkpoint."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class _Interrupts:
    """Remembers the first Ctrl-C or SIGTERM for the end of the step; the second acts at once."""

    _KINDS: ClassVar[dict[int, type[BaseException]]] = {
        signal.SIGINT: KeyboardInterrupt,
        signal.SIGTERM: Terminated,
    }

    def __init__(self) -> None:
        self.wanted: BaseException | None = None

    def __enter__(self) -> _Interrupts:
        here = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._note) for number in self._KINDS if here}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None is a handler that C code installed
                signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        error = self._KINDS[number]()
        if self.wanted:
            raise error
        self.wanted = error
