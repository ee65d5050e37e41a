"""`python -m locater`, and the command `locater`: the command line, with Ctrl-C in order while it is being loaded."""

from __future__ import annotations

import os
import signal
from types import FrameType

__all__ = ["main"]


def main() -> None:
    """Libraries take a second to load, and nothing has begun by then: Ctrl-C just leaves."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a job in the background ignores it
    if usual:
        signal.signal(signal.SIGINT, _leave)
    from locater.cli import main as run

    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
