"""One process at a time in a run's folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from locater.errors import LocaterError

fcntl: Any = None
with contextlib.suppress(ImportError):  # Windows has none
    import fcntl

__all__ = ["alone"]

_OTHERS = 10.0  # seconds to wait for a folder that somebody else trains in
_OWN = 180.0  # and for an earlier worker of the same sweep: NFS keeps a dead node's locks for 90, Ray is sure after 30


@contextlib.contextmanager
def alone(folder: Path, owner: str) -> Iterator[None]:
    """Holds the folder's lock, which the operating system takes back from a process that dies.

    Somebody else may have it: another run in the same folder, or an earlier worker of the same sweep, on a node that
    Ray lost sight of and that has not noticed yet. Where the system has no such locks, nothing is held.
    """
    if fcntl is None:
        yield
        return
    path = folder / ".lock"
    try:
        file = path.open("a+")
    except OSError as error:
        raise LocaterError(f"cannot open {path}: {error.strerror}") from error
    with file:
        _wait(file, path, owner)
        file.truncate(0)
        file.write(json.dumps({"node": platform.node(), "process": os.getpid(), "driver": owner}))
        file.flush()
        yield


def _wait(file: TextIO, path: Path, owner: str) -> None:
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                why = f"{error.strerror}; choose a folder on a file system that has locks"
                raise LocaterError(f"cannot lock {path}: {why}") from error
        holder = _holder(file)
        patience = _OWN if holder.get("driver") == owner else _OTHERS
        if time.monotonic() - began > patience:
            raise LocaterError(
                f"{path.parent} is in use by process {holder.get('process', 'unknown')} on "
                f"{holder.get('node', 'an unknown node')}; wait for it to end, or end it"
            )
        time.sleep(0.2)


def _holder(file: TextIO) -> dict[str, Any]:
    """What the holder wrote into the lock; nothing if it has not yet."""
    file.seek(0)
    try:
        value = json.loads(file.read())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
