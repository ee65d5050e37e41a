"""The command line: a file a command, which parses, calls a room, and prints; here the way in and every way out."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Annotated

import typer

from locater import __version__
from locater.cli import _terminal as terminal
from locater.cli.arena import arena_command
from locater.cli.attention import attention_command
from locater.cli.claims import claims_command
from locater.cli.demo import demo_command
from locater.cli.doctor import doctor_command
from locater.cli.explore import explore_command
from locater.cli.figure import figure_command
from locater.cli.init import init_command
from locater.cli.measure import measure_command
from locater.cli.presets import presets_command
from locater.cli.report import report_command
from locater.cli.rho import rho_command
from locater.cli.scan import scan_command
from locater.cli.study import study_command
from locater.cli.sweep import sweep_command
from locater.cli.train import train_command
from locater.errors import LocaterError, one_line, reason

__all__ = ["app", "main"]

app = typer.Typer(
    name="locater",
    help="See, predict and control where a transformer's attention looks.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    demo_command, doctor_command, attention_command, rho_command, figure_command, study_command, explore_command,
    init_command, scan_command, measure_command, report_command, train_command, sweep_command, claims_command,
    presets_command, arena_command,
):  # fmt: skip
    app.command(command.__name__.removesuffix("_command"))(command)

_STOPPED, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def _version(asked: bool) -> None:
    if asked:
        print(f"locater {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where a failure comes from.")] = False,
) -> None:
    """See, predict and control where a transformer's attention looks."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line: status 0; 2 and one line for a user's mistake; 130 and 143 for Ctrl-C and SIGTERM."""
    given = sys.argv[1:] if arguments is None else arguments
    traceback = "--traceback" in given  # it may stand anywhere
    words = [word for word in given if word != "--traceback"]
    terminal.encode_what_can_be()
    code: object = None
    interrupt = _CtrlC()
    try:
        _check_working_folder()
        with interrupt:
            code = app(words or ["--help"], standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = _STOPPED
    except SystemExit as leaving:  # by SIGTERM; by click, with 1, where the reader of our output went away
        code = leaving.code if leaving.code == _TERMINATED else 0
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        terminal.discard_output()
    except Exception as error:
        if traceback:
            raise
        message, code = explained(error, words[0] if words else "")
        terminal.discard_output()
        if interrupt.received:
            code = _STOPPED
        else:
            with suppress(OSError):
                print(f"locater: {message}", *getattr(error, "__notes__", ()), sep="\n\n", file=sys.stderr)
    if code in (_STOPPED, _TERMINATED):
        print("locater: stopped", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


class _CtrlC:
    """Remembers Ctrl-C: a library that is being imported may turn the KeyboardInterrupt into an error of its own."""

    received = False

    def __enter__(self) -> None:
        here = threading.current_thread() is threading.main_thread()
        self._usual = here and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._usual:
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.default_int_handler(number, frame)


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:  # libraries fail in ways of their own then
        raise LocaterError("the working directory is gone: change to another one") from error


def explained(error: Exception, command: str) -> tuple[str, int]:
    """An exception as one line for people, and the status to leave with."""
    if isinstance(error, LocaterError):
        return one_line(str(error)), 2
    if (parser := getattr(error, "format_message", None)) is not None:
        return one_line(f"{parser()} (locater --help lists the commands, locater COMMAND --help their options)"), 2
    doing, rest = f"while running {one_line(command, 80)}", "(--traceback shows where)"
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "allocate memory" in str(error):
        return f"not enough memory for a problem of this size, {doing}", 2
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        return one_line(f"{where}{reason(error)}, {doing} {rest}"), 2
    if isinstance(error, RecursionError):
        return f"something is nested too deep, {doing} {rest}", 2
    if isinstance(error, UnicodeError):
        return one_line(f"a name or a text is not Unicode ({reason(error)}), {doing} {rest}"), 2
    return one_line(
        f"{type(error).__name__} {doing}: {reason(error)}; this is a fault of locater's: please report what "
        "--traceback shows"
    ), 1
