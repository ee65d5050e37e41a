"""One HTML file that needs nothing but itself.

Three walls stand between names from files and the browser. The data are JSON in which no `<`, `>` or `&` stands, so
nothing in them ends their element. The page's script puts text into the document as text, never as HTML, and escapes
what it hands to plotly, which reads a few tags. And a Content-Security-Policy lets two scripts run, the page's and
plotly's, named by their hashes: any other, wherever it came from, does not, and nothing can be fetched or sent.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from locater import __version__
from locater.pages._page import UNPACK, head, inert, plotly, put, script_hash

SCRIPTS = (
    "core", "plots", "table", "maps", "alarms", "claims", "diagnosis", "members", "curves", "compare", "sweep", "scan",
    "positions", "softmax", "predicted", "measurement", "log", "prediction", "main",
)  # fmt: skip
"""The page's script is these files in this order, as one function."""


def page(title: str, sections: list[dict[str, Any]], passed: list[str]) -> str:
    """The whole page; the same bytes for the same input."""
    library, library_hash = plotly()
    script = _script()
    return put(
        _file("page.html"),
        {
            "HEAD": head(title, _file("page.css"), [script_hash(script), library_hash]),
            "DATA": inert({"version": __version__, "title": title, "passed": passed, "sections": sections}),
            "LIBRARY": library,
            "SCRIPT": script,
        },
    )


@cache
def _script() -> str:
    inside = "\n".join([UNPACK, *(_file(f"{name}.js") for name in SCRIPTS)])
    return f'(() => {{\n"use strict";\n{inside}\n}})();'


def _file(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8").strip()
