"""One process at a time in a run's folder."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from locater.errors import LocaterError, reason
from locater.io import json_bytes, read_json

__all__ = ["exclusive_lock"]

_OTHERS = 10.0  # seconds to wait for a folder that somebody else trains in
_OWN = 180.0  # and for an earlier worker of the same sweep: NFS keeps a dead node's locks for 90, Ray is sure after 30


@contextlib.contextmanager
def exclusive_lock(folder: Path, owner: str | None = None) -> Iterator[None]:
    """Holds the folder's lock, which the operating system takes back from a process that dies.

    Another process may hold it: another run in the same folder, or an earlier worker of the same sweep (`owner` names
    it), on a node that Ray lost sight of and that has not noticed yet.
    """
    path = folder / ".lock"
    began = time.monotonic()

    def sign(handle: int) -> None:  # with a hook, filelock refuses file systems without locks, as it should
        os.ftruncate(handle, 0)
        os.write(handle, json_bytes({"node": platform.node(), "process": os.getpid(), "driver": owner}))

    def waited_for_another() -> bool:
        return time.monotonic() - began > _OTHERS and (owner is None or _holder(path).get("driver") != owner)

    lock = FileLock(path, poll_interval=0.2, on_acquired=sign)
    try:
        lock.acquire(_OWN, cancel_check=waited_for_another)
    except Timeout as error:
        holder = _holder(path)
        raise LocaterError(
            f"{folder} is in use by process {holder.get('process', 'unknown')} on "
            f"{holder.get('node', 'an unknown node')}; wait for it to end, or end it"
        ) from error
    except OSError as error:
        raise LocaterError(
            f"cannot lock {path}: {reason(error)}; choose a folder whose file system has locks"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _holder(path: Path) -> dict[str, Any]:
    """What the holder wrote into the lock; nothing if it has not yet."""
    with contextlib.suppress(LocaterError):
        return read_json(path)
    return {}
