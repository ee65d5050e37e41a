"""One function per figure of the paper, and `draw`, which writes it as PNG, SVG and JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from locater.errors import LocaterError
from locater.files import writable_folder, write_file

__all__ = ["FIGURES", "draw"]

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
    import matplotlib

    from locater.figures import _paper

    folder = writable_folder(Path(out))
    with matplotlib.rc_context(_STYLE):
        drawing = getattr(_paper, f"figure_{number}")(progress or (lambda _: None))
        contents: dict[str, bytes] = {}
        for kind, options in (("png", {"dpi": 200}), ("svg", {"metadata": {"Date": None}})):
            buffer = io.BytesIO()
            drawing.figure.savefig(buffer, format=kind, **options)
            contents[kind] = buffer.getvalue()
    contents["json"] = json.dumps({"figure": number, **drawing.data}).encode()
    return [write_file(folder / f"figure-{number}.{kind}", content) for kind, content in contents.items()]
