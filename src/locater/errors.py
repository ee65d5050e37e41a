"""The one exception of the package, other libraries' words in one line, and the check for optional dependencies."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

__all__ = ["LocaterError", "one_line", "reason", "require"]


class LocaterError(ValueError):
    """A value the package cannot work with: the message names it and says what is accepted."""


def reason(error: BaseException, most: int = 200) -> str:
    """Why something failed, in one line: the first that another library says, without its C++ frames."""
    if isinstance(error, LocaterError):
        return str(error)  # one line already
    told = getattr(error, "strerror", None) or str(error)
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return one_line(lines[0], most) if lines else type(error).__name__


def one_line(message: str, most: int = 700) -> str:
    """A message as one line that people read to its end; what is too long loses its middle."""
    flat = " ".join(re.split(r"C\+\+ CapturedTraceback|Exception raised from ", message)[0].split())
    if len(flat) <= most:
        return flat
    end = most // 3
    return f"{flat[: most - end - 3]} … {flat[-end:]}"


def require(module: str, extra: str) -> ModuleType:
    """Import an optional `module`, or say which extra of the package brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        raise LocaterError(
            f"{missing} is not installed; it comes with an extra: pip install 'locater[{extra}]'"
        ) from error
