"""`locater explore`: the theory in one HTML page, computed where it is read."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from locater.io import write_file
from locater.pages._page import UNPACK, head, inert, plotly, put, script_hash

__all__ = ["explorer_page", "write_explorer"]

_THEORY = ("quadratic.js", "theory.js", "attention.js", "plane.js")  # for the page and for its workers
_APP = ("state.js", "plots.js", "app.js")
_COMMENT = re.compile(r"^ *(//.*|/\*\*[\s\S]*?\*/)\n", re.MULTILINE)  # on lines of its own


def explorer_page() -> str:
    """The page: everything inside, no network, opens from disk; the same bytes every time."""
    from locater import __version__

    library, library_hash = plotly()
    theory, app = _script(_softmax_rule(), *map(_code, _THEORY)), _script(UNPACK, *map(_code, _APP))
    hashes = [script_hash(theory), script_hash(app), library_hash]
    parts = {
        "HEAD": head("Signal propagation in attention", _read("explorer.css"), hashes, workers=True),
        "VERSION": __version__,
        "PLOTLY": library,
        "WORKER": _code("worker.js"),
        "THEORY": theory,
        "APP": app,
    }
    return put(_read("page.html"), parts)


def write_explorer(path: str | Path) -> Path:
    """Writes the page to `path`."""
    return write_file(Path(path), explorer_page().encode())


def _softmax_rule() -> str:
    """Thresholds and words of `attention_regime`, for attention.js."""
    from locater.theory import softmax_regime as rule

    numbers = {
        "uniformFrom": rule.UNIFORM_FROM,
        "collapsedTo": rule.COLLAPSED_TO,
        "nearFrom": rule.NEAR_FROM,
        "farTo": rule.FAR_TO,
    }
    return f"const SOFTMAX = {inert(numbers | {'words': rule.ATTENTION_REGIMES})};"


def _script(*sources: str) -> str:
    return "\n".join(('"use strict";', *sources))


def _code(name: str) -> str:
    return _COMMENT.sub("", _read(name))


def _read(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
