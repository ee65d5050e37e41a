"""runs.jsonl, a line a run, in a folder that several processes may share: each trains what no other has or does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from locater.io import parse_json_lines

__all__ = ["add_line", "claim", "read_lines", "somebody_trains"]

Run = TypeVar("Run")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A line that was cut off is no run."""
    return list(parse_json_lines(path.read_bytes())) if path.exists() else []


def add_line(path: Path, line: dict[str, Any]) -> None:
    """On a line of its own, whatever the last one ends with."""
    before = path.read_bytes() if path.exists() else b""
    start = "\n" if before and not before.endswith(b"\n") else ""
    with path.open("a", encoding="utf-8") as file:
        file.write(start + json.dumps(line) + "\n")


def claim(
    folder: Path, runs: Iterable[Run], done: Callable[[], Container[Run]], name: Callable[[Run], str]
) -> tuple[Run, FileLock] | None:
    """The first run that is neither done nor being trained by another process, which is kept from it."""
    (folder / "running").mkdir(parents=True, exist_ok=True)
    before = done()
    for run in runs:
        if run in before:
            continue
        lock = FileLock(folder / "running" / f"{re.sub('[^a-zA-Z0-9.]+', '-', name(run))}.lock")
        with suppress(Timeout):
            lock.acquire(timeout=0)
            if run not in done():
                return run, lock
            lock.release()
    return None


def somebody_trains(folder: Path) -> bool:
    """Whether a run in this folder is claimed."""
    for path in (folder / "running").glob("*.lock"):
        try:
            with FileLock(path, timeout=0):
                pass
        except Timeout:
            return True
    return False
