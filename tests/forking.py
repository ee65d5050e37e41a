"""Calls in processes of their own that start at once: forked from one that has everything loaded and no threads.

For scripts, not for pytest's own process, which has threads.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple


class Ended(NamedTuple):
    """How a call went."""

    status: int  # 0, what it left with, or minus the signal that ended it
    out: str
    err: str
    seconds: float
    bytes: int  # of memory at its peak, beyond what the parent has
    hung: bool


class Child:
    """A call under way."""

    def __init__(self, call: Callable[[], None], *, most_bytes: int | None = None) -> None:
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - closed in ended()
        self._began = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(call, most_bytes)

    def _run(self, call: Callable[[], None], most_bytes: int | None) -> None:
        status = 70
        try:
            for number, file in zip((1, 2), self._files, strict=True):
                os.dup2(file.fileno(), number)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if most_bytes is not None:
                soft = _of_process("VmSize") + most_bytes
                resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))
            call()
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (OSError, ValueError):
                    status = 120
            os._exit(status)

    def ended(self, within: float = 60.0) -> Ended:
        """Waits for the end, and makes it if it takes too long."""
        hung = False
        while True:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                break
            if not hung and time.monotonic() - self._began > within:
                hung = True
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.002)
        seconds = time.monotonic() - self._began
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.close()
        grown = used.ru_maxrss * 1024 - _of_process("VmRSS")
        return Ended(os.waitstatus_to_exitcode(status), *texts, seconds, max(0, grown), hung)


def _of_process(what: str) -> int:
    """Bytes of this process, as Linux counts them."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(what + ":"))
