"""One function per figure of the paper, and `draw`, which writes it as PNG, SVG and JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locater.errors import LocaterError
from locater.files import writable_folder, write_file

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["FIGURES", "draw", "draw_scan"]

FIGURES = (1, 2, 3, 4, 5)

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "locater",
}


def draw(number: int, out: str | Path, progress: Callable[[float], None] | None = None) -> list[Path]:
    """Draws figure `number` into the folder `out`: figure-N.png, .svg and .json. All three, or none."""
    if number not in FIGURES:
        raise LocaterError(f"figure must be one of {', '.join(map(str, FIGURES))}, got {number}")
    from locater.figures import _paper

    folder = writable_folder(Path(out))
    with style():
        drawing = getattr(_paper, f"figure_{number}")(progress or (lambda _: None))
        contents = pictures(drawing.figure)
    contents["json"] = json.dumps({"figure": number, **drawing.data}).encode()
    return [write_file(folder / f"figure-{number}.{kind}", content) for kind, content in contents.items()]


def draw_scan(table: pd.DataFrame, eigenvalues: Sequence[tuple[str, Any]], title: str, out: str | Path) -> list[Path]:
    """Writes scan-maps and scan-eigenvalues, as PNG and SVG, into the folder `out`."""
    from locater.figures import scan

    folder = writable_folder(Path(out))
    with style():
        drawn = {"scan-maps": scan.maps(table, title), "scan-eigenvalues": scan.clouds(eigenvalues, title)}
        contents = {f"{name}.{kind}": data for name, fig in drawn.items() for kind, data in pictures(fig).items()}
    return [write_file(folder / name, content) for name, content in contents.items()]


def style() -> AbstractContextManager[None]:
    """The look of every picture the package makes."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def pictures(figure: Figure) -> dict[str, bytes]:
    """A figure as PNG and SVG."""
    contents: dict[str, bytes] = {}
    for kind, options in (("png", {"dpi": 200}), ("svg", {"metadata": {"Date": None}})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, **options)
        contents[kind] = buffer.getvalue()
    return contents
