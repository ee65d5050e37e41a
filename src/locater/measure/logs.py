"""What attention does in the course of training, a line for each logged step and attention module.

    with AttentionLog(model, every=50, file="attention.jsonl") as log:
        for step, batch in enumerate(batches):
            with log.step(step):
                loss = model(**batch).loss
            ...

    {"step": 50, "module": "model.layers.0.self_attn", "layer": 0, "kind": "self",
     "keys": …,                                                           unmasked for the longest sequence's last query
     "entropy": […], "entropy_share": […], "max_logit": […],              a number a head, null where not finite
     "rank_residual": …, "effective_rank": …, "mean_cosine": …}           of the tokens that enter the module

A step's lines are on disk, whole, before the next step begins. `locater.measure.alarms` are raised over them. On a GPU
its numbers are fetched while the rest of the step runs, and written when the next one begins, or the log is closed.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from locater.errors import LocaterError, require
from locater.hooks import attention_sites
from locater.io import parse_json_lines, read_file, write_file
from locater.measure.alarms import Alarm, Alarms
from locater.measure.observe import LOGGED, Observation, observe

if TYPE_CHECKING:
    import pandas

__all__ = ["AttentionLog", "read_log"]

_TOKENS = ("rank_residual", "effective_rank", "mean_cosine")


class AttentionLog:
    """Observes a model in every `every`-th step of its training and writes its statistics; other steps cost nothing.

    `file`: JSON lines. One that is there is gone on with: lines from the first logged step on, which are made again,
    and a last line that is not whole are dropped then. `tensorboard`: a folder for its files; per module the mean
    and the lowest entropy share, the largest logit, and the rank residual. `layers`: only those.

    `alarms`: a function that is called with each alarm once its step is written, or an `Alarms` with thresholds of your
    own; unless given, alarms are warnings of Python's logging. What is in the file from before counts, and is not
    raised again: `log.alarms` is what `alarms_of` makes of the file.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        file: str | Path | None = "attention.jsonl",
        tensorboard: str | Path | None = None,
        layers: Sequence[int] | None = None,
        alarms: Alarms | Callable[[Alarm], object] | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise LocaterError(f"every must be a whole number, 1 or more, got {every!r}")
        if file is None and tensorboard is None:
            raise LocaterError("nothing to write to: give a file or a folder for tensorboard")
        attention_sites(model, layers)  # a model that cannot be observed is refused now
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise LocaterError(f"cannot write {file}: there is no folder {Path(file).parent}")
        if tensorboard is not None:
            require("tensorboard", "lab")
        self.every = every
        self._alarms = Alarms.of(alarms)
        self._alarms.forget()  # those of another run
        self._model, self._layers = model, layers
        self._path = None if file is None else Path(file)
        self._board = tensorboard
        self._writer: Any = None
        self._begun = False  # writing
        self._asked: int | None = None  # the last step that began
        self._open: tuple[int, ExitStack, Observation] | None = None  # the step that is observed now
        self._unwritten: _Fetched | None = None  # of the step before
        atexit.register(_finish, weakref.ref(self))

    @property
    def alarms(self) -> list[Alarm]:
        """All that were raised so far."""
        self._finish()
        return self._alarms.raised

    @contextmanager
    def step(self, step: int) -> Iterator[Observation | None]:
        """Around the forwards of a step: gives its observation, or None in a step that is not logged.

        Several forwards, as with gradient accumulation, are averaged. An exception inside writes nothing.
        """
        seen = self.begin(step)
        try:
            yield seen
        except BaseException:
            self.cancel()
            raise
        self.end()

    def begin(self, step: int) -> Observation | None:
        """Starts observing if the step is to be logged: a multiple of `every`, or the first after one."""
        self.cancel()
        self._finish()
        asked, self._asked = self._asked, step
        due = step % self.every == 0 if asked is None else step // self.every > asked // self.every
        if not due:
            return None
        stack = ExitStack()
        seen = stack.enter_context(observe(self._model, layers=self._layers))
        self._open = step, stack, seen
        return seen

    def end(self) -> None:
        """Ends observing and writes the lines of the step; nothing if it is not logged."""
        if self._open is None:
            return
        step, _, seen = self._open
        self.cancel()
        self._unwritten = _Fetched(step, seen)
        if self._unwritten.arrived is None:
            self._finish()

    def _finish(self) -> None:
        """Writes what was fetched."""
        fetched, self._unwritten = self._unwritten, None
        if fetched is None:
            return
        rows = fetched.rows()
        if self._path is not None:
            self._write(self._path, fetched.step, rows)
        if self._board is not None:
            self._show(fetched.step, rows)
        self._alarms.update(fetched.step, rows)

    def cancel(self) -> None:
        """Ends observing and leaves the model as it was found."""
        if self._open is not None:
            _, stack, _ = self._open
            self._open = None
            stack.close()

    def close(self) -> None:
        self.cancel()
        self._finish()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> AttentionLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, path: Path, step: int, rows: list[dict[str, Any]]) -> None:
        if not self._begun:
            kept = [row for row in _whole_lines(path) if row["step"] < step] if path.exists() else []
            self._alarms.recall(kept)
            write_file(path, _lines(kept))
            self._begun = True
        try:
            with open(path, "ab", buffering=0) as file:
                file.write(_lines(rows))
                os.fsync(file.fileno())
        except OSError as error:
            raise LocaterError(f"cannot write {path}: {error.strerror}") from error

    def _show(self, step: int, rows: list[dict[str, Any]]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._board), purge_step=step)
        for row in rows:
            shares = [share for share in row["entropy_share"] if share is not None]
            logits = [logit for logit in row["max_logit"] if logit is not None]
            values = {
                "entropy_share": sum(shares) / len(shares) if shares else None,
                "lowest_entropy_share": min(shares, default=None),
                "max_logit": max(logits, default=None),
                "rank_residual": row["rank_residual"],
            }
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(f"attention/{name}/{row['module']}", value, step)
        self._writer.flush()


def read_log(file: str | Path) -> pandas.DataFrame:
    """The lines of a log, a row each; a last one that is not whole is left out."""
    import pandas

    return pandas.DataFrame(_whole_lines(Path(file)))


class _Fetched:
    """The numbers of a step, on their way from the device."""

    def __init__(self, step: int, seen: Observation) -> None:
        self.step = step
        self._known, numbers = seen.packed()
        self.arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            with torch.cuda.device(numbers.device):
                self.arrived = torch.cuda.Event()
                self.arrived.record()
        else:
            self._numbers = numbers.cpu()

    def rows(self) -> list[dict[str, Any]]:
        """The lines of the log."""
        if self.arrived is not None:
            self.arrived.synchronize()
        left, rows = iter(self._numbers.tolist()), []
        for known in self._known:
            row = {
                "step": self.step,
                **{name: known[name] for name in ("module", "layer", "kind")},
                "keys": int(next(left)),
            }
            row |= {name: [_finite(next(left)) for _ in range(known["heads"])] for name in LOGGED}
            rows.append(row | {name: _finite(next(left)) for name in _TOKENS})
        return rows


def _finish(log: weakref.ref[AttentionLog]) -> None:
    """At the end of a process that did not close its log."""
    found = log()
    if found is not None:
        found._finish()


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join((json.dumps(row, separators=(",", ":")) + "\n").encode() for row in rows)


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    found = parse_json_lines(read_file(path))
    for number, row in zip(found.numbers, found, strict=True):
        if not isinstance(row.get("step"), int) or not isinstance(row.get("module"), str):
            found.damaged.append(number)
    if found.damaged:
        raise LocaterError(f"line {min(found.damaged)} of {path} is no line of a log of attention; choose another file")
    return found
