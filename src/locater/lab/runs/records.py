"""A run's folder on disk: run.json, what was trained; metrics.jsonl, a line for each recorded step and member.

    {"step": 500, "member": "k1-s0", "train_loss": …, "valid_loss": …, "perplexity": …,      nats a token
     "trace": [[…]], "scale": [[…]], "trace_square": [[…]], "entropy": [[…]], "max_logit": [[…]],   layer × head
     "temperature": [[…]],            layer × head, of members whose entropy is held: what logits are divided by
     "rank_residual": […],            of the hidden states: the embeddings, then after each layer
     "rho": [[[…]]],                  layer × head × token position
     "eigenvalues": [[[[…]]]]}        of W_QK, layer × head × eigenvalue × real and imaginary part; in the last record

A line is on disk, whole, before the next one is begun; a last line that a killed process left half written is dropped
when the run goes on. Every checkpoint holds the checksums of the records up to it, so that a run does not go on beside
records that were lost or changed. Readers also take metrics.jsonl.gz.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locater.errors import LocaterError, reason
from locater.io import json_bytes, nulled, parse_json_lines, read_file, read_json, unpacked, write_file
from locater.lab.config import Config, Member

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Checksums", "MetricsFile", "Run", "read_metrics", "read_records", "read_run", "read_runs", "write_run"]

_RUN, _METRICS = "run.json", "metrics.jsonl"

Checksums = dict[int, int]  # by step: CRC-32 of its lines

# dimensions of what a record holds; each number may be null, for what is not finite
_DIMENSIONS = {
    **dict.fromkeys(("train_loss", "valid_loss", "perplexity"), 0),
    **dict.fromkeys(("trace", "scale", "trace_square", "entropy", "max_logit"), 2),
    "rank_residual": 1,
}
_IF_THERE = {"broke_at": 0, "temperature": 2, "rho": 3, "eigenvalues": 4}


@dataclass(frozen=True)
class Run:
    """What run.json says."""

    folder: Path
    config: Config
    members: tuple[Member, ...]
    about: dict[str, Any]  # preset, vocabulary, corpus, hardware, versions, seconds: whatever is known


def write_run(run: Run) -> None:
    value = {"format": 1, "config": run.config.to_json(), "members": [m.to_json() for m in run.members], **run.about}
    write_file(run.folder / _RUN, json_bytes(nulled(value), indent=1) + b"\n")


def read_run(folder: str | Path) -> Run:
    folder = Path(folder)
    path = folder / _RUN
    if not path.exists():
        raise LocaterError(f"{folder} is not the folder of a run: it has no {_RUN}")
    value = read_json(path)
    try:
        config = Config.from_json(value.pop("config"))
        members = tuple(Member.from_json(member) for member in value.pop("members"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LocaterError(f"cannot read {path}: {_said(error)}") from error
    return Run(folder, config, members, value)


def _said(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else reason(error)


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
    """Every record of the runs under `folder`, a row each."""
    import pandas as pd

    records = [record for run in read_runs(folder) for record in read_records(run.folder)]
    if not records:
        raise LocaterError(f"{folder} holds no records yet")
    return pd.DataFrame(records)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of one run, in the order they were written; a last line that is being written is left out."""
    return [record for record, _ in _records(folder)]


def _records(folder: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Records, each with the line it stands on."""
    plain, packed = folder / _METRICS, folder / f"{_METRICS}.gz"
    if not plain.exists() and not packed.exists():
        return []
    path = plain if plain.exists() else packed
    raw = read_file(path)
    if path is packed:
        raw, whole = unpacked(path, raw)
        if not whole:
            raise LocaterError(f"cannot read {path}: it is cut off or damaged; unpack what can be had of it by hand")
    found = parse_json_lines(raw)
    wrong = [number for number, record in zip(found.numbers, found, strict=True) if not _is_record(record)]
    if damaged := sorted(found.damaged + wrong):
        raise LocaterError(f"line {damaged[0]} of {path} is damaged; mend or remove it to go on")
    return list(zip(found, found.lines, strict=True))


def _is_record(value: Mapping[str, Any]) -> bool:
    step, member = value.get("step"), value.get("member")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0 or not isinstance(member, str):
        return False
    there = {name: count for name, count in _IF_THERE.items() if name in value}
    return all(name in value and _has_dimensions(value[name], n) for name, n in (_DIMENSIONS | there).items())


def _has_dimensions(value: Any, count: int) -> bool:
    """Numbers or null in lists so many deep, none of them empty."""
    if count == 0:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return isinstance(value, list) and bool(value) and all(_has_dimensions(each, count - 1) for each in value)


class MetricsFile:
    """Appends records so that a reader, or a process that goes on, finds whole lines only."""

    def __init__(self, folder: Path, keep_until: int, expected: Checksums | None) -> None:
        """Keeps the records up to a step: those after it are made again by the run that goes on from there.

        `expected` are the checksums of the records to keep, as the checkpoint of that step has them; None is not known.
        """
        self.path = folder / _METRICS
        kept = [(record["step"], line + b"\n") for record, line in _records(folder) if record["step"] <= keep_until]
        self.checksums: Checksums = {}
        for step, line in kept:
            self._count(step, line)
        if expected is not None:
            self._check(expected)
        write_file(self.path, b"".join(line for _, line in kept))
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def append(self, records: list[dict[str, Any]]) -> None:
        """All of one step."""
        lines = [_line(record) for record in records]
        try:
            self._file.write(b"".join(lines))
            os.fsync(self._file.fileno())
        except OSError as error:
            raise LocaterError(
                f"cannot write {self.path}: {error.strerror}; the run can go on from its last checkpoint"
            ) from error
        for record, line in zip(records, lines, strict=True):
            self._count(record["step"], line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _count(self, step: int, line: bytes) -> None:
        self.checksums[step] = zlib.crc32(line, self.checksums.get(step, 0))

    def _check(self, expected: Checksums) -> None:
        for step in sorted(expected.keys() | self.checksums.keys()):
            if self.checksums.get(step) == expected.get(step):
                continue
            what = "are missing" if step not in self.checksums else "were changed" if step in expected else "were added"
            raise LocaterError(
                f"the records of step {step:,} in {self.path} {what} since the checkpoint was written: "
                "put the file back as it was, or remove the folder to start anew"
            )


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, separators=(",", ":")) + "\n").encode()
