"""A run's folder on disk: run.json, what was trained; metrics.jsonl, a line for each recorded step and member.

    {"step": 500, "member": "k1-s0", "train_loss": …, "valid_loss": …, "perplexity": …,      nats a token
     "trace": [[…]], "scale": [[…]], "trace_square": [[…]], "entropy": [[…]], "max_logit": [[…]],   layer × head
     "rank_residual": […],            of the hidden states: the embeddings, then after each layer
     "rho": [[[…]]],                  layer × head × token position
     "eigenvalues": [[[[…]]]]}        of W_QK, layer × head × eigenvalue × real and imaginary part; in the last record

A line is on disk, whole, before the next one is begun; a last line that a killed process left half written is dropped
when the run goes on. Readers also take metrics.jsonl.gz.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locater.errors import LocaterError
from locater.files import write_file
from locater.lab.config import Config, Member

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MetricsFile", "Run", "read_metrics", "read_records", "read_run", "read_runs", "write_run"]

_RUN, _METRICS = "run.json", "metrics.jsonl"


@dataclass(frozen=True)
class Run:
    """What run.json says."""

    folder: Path
    config: Config
    members: tuple[Member, ...]
    about: dict[str, Any]  # preset, vocabulary, corpus, hardware, versions, seconds: whatever is known


def write_run(run: Run) -> None:
    value = {"format": 1, "config": run.config.to_json(), "members": [m.to_json() for m in run.members], **run.about}
    write_file(run.folder / _RUN, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_run(folder: str | Path) -> Run:
    folder = Path(folder)
    path = folder / _RUN
    try:
        value = json.loads(path.read_text())
        config = Config.from_json(value.pop("config"))
        members = tuple(Member(**member) for member in value.pop("members"))
    except FileNotFoundError as error:
        raise LocaterError(f"{folder} is not the folder of a run: it has no {_RUN}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise LocaterError(f"cannot read {path}: {error}") from error
    return Run(folder, config, members, value)


def read_runs(folder: str | Path) -> list[Run]:
    """The run in this folder, or those in the folders right below it, as a sweep writes them."""
    folder = Path(folder)
    if (folder / _RUN).is_file():
        return [read_run(folder)]
    if not folder.is_dir():
        raise LocaterError(f"there is no folder {folder}")
    found = [read_run(path.parent) for path in sorted(folder.glob(f"*/{_RUN}"))]
    if not found:
        raise LocaterError(f"{folder} holds no run: neither it nor a folder in it has a {_RUN}")
    return found


def read_metrics(folder: str | Path) -> pd.DataFrame:
    """Every whole record of the runs under `folder`, a row each."""
    import pandas as pd

    records = [record for run in read_runs(folder) for record in read_records(run.folder)]
    if not records:
        raise LocaterError(f"{folder} holds no records yet")
    return pd.DataFrame(records)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The whole records of one run, in the order they were written; damaged lines are passed over."""
    return _parsed(folder)[0]


def _parsed(folder: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Records, and the numbers of damaged lines before the last one."""
    plain, packed = folder / _METRICS, folder / f"{_METRICS}.gz"
    try:
        raw = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes()) if packed.exists() else b""
    except (OSError, EOFError) as error:
        raise LocaterError(f"cannot read the metrics in {folder}: {error}") from error
    records: list[dict[str, Any]] = []
    damaged: list[int] = []
    lines = raw.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if isinstance(record, dict) and {"step", "member"} <= record.keys():
            records.append(record)
        elif number < len(lines):
            damaged.append(number)
    return records, damaged


class MetricsFile:
    """Appends records so that a reader, or a process that goes on, finds whole lines only."""

    def __init__(self, folder: Path, keep_until: int) -> None:
        """Keeps the records up to a step: those after it are made again by the run that goes on from there."""
        self.path = folder / _METRICS
        records, damaged = _parsed(folder)
        if damaged:
            raise LocaterError(f"line {damaged[0]} of {self.path} is damaged; mend or remove it to go on")
        kept = [record for record in records if record["step"] <= keep_until]
        write_file(self.path, b"".join(_line(record) for record in kept))
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def append(self, records: list[dict[str, Any]]) -> None:
        try:
            self._file.write(b"".join(map(_line, records)))
            os.fsync(self._file.fileno())
        except OSError as error:
            raise LocaterError(
                f"cannot write {self.path}: {error.strerror}; the run can go on from its last checkpoint"
            ) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, separators=(",", ":")) + "\n").encode()
