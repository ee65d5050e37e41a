"""`locater explore`: the theory in one HTML page, computed where it is read."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from locater.io import write_file
from locater.pages._page import UNPACK, head, plotly, put, script_hash

__all__ = ["explorer_page", "write_explorer"]

_THEORY = ("quadratic.js", "theory.js", "plane.js")  # for the page and for its workers
_APP = ("state.js", "plots.js", "app.js")


def explorer_page() -> str:
    """The page: everything inside, no network, opens from disk; the same bytes every time."""
    from locater import __version__

    library, library_hash = plotly()
    theory, app = _script(*map(_read, _THEORY)), _script(UNPACK, *map(_read, _APP))
    hashes = [script_hash(theory), script_hash(app), library_hash]
    parts = {
        "HEAD": head("Signal propagation in attention", _read("explorer.css"), hashes, workers=True),
        "VERSION": __version__,
        "PLOTLY": library,
        "WORKER": _read("worker.js"),
        "THEORY": theory,
        "APP": app,
    }
    return put(_read("page.html"), parts)


def write_explorer(path: str | Path) -> Path:
    """Writes the page to `path`."""
    return write_file(Path(path), explorer_page().encode())


def _script(*sources: str) -> str:
    return "\n".join(('"use strict";', *sources))


def _read(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
