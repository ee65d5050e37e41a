"""The one exception of the package, and the check for optional dependencies."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["LocaterError", "require"]


class LocaterError(ValueError):
    """A value the package cannot work with: the message names it and says what is accepted."""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional `module`, or say which extra of the package brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        raise LocaterError(
            f"{missing} is not installed; it comes with an extra: pip install 'locater[{extra}]'"
        ) from error
