"""One-file HTML pages that need nothing but themselves: no network, open from disk, plotly.js inside.

plotly.js comes with the Python package `plotly` (extra `report`), 4.8 MB of text. A page carries it gzipped in base64,
2 MB, in an element of its own, and `UNPACK` gives the page's script a function that inflates and runs it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from locater.errors import LocaterError, require

__all__ = ["TRACES", "UNPACK", "inert", "plotly", "policy", "put", "quick", "script_hash"]

TRACES = ("heatmap",)
"""Those that pages draw with, besides plotly's core: scatter."""

UNPACK = """\
/** Runs the script that the element `id` holds, gzip in base64. */
async function unpack(id) {
  const text = document.getElementById(id).textContent.trim();
  const bytes = Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(inflated).text();
  document.head.append(script);
}
"""


@cache
def plotly() -> tuple[str, str]:
    """plotly.js, minified, its licence on top, as `unpack` takes it, and its hash for `policy`."""
    source = quick(str(require("plotly.offline", "report").get_plotlyjs()))
    return base64.b64encode(gzip.compress(source.encode(), compresslevel=9, mtime=0)).decode(), script_hash(source)


def quick(source: str) -> str:
    """plotly.js that starts in a third of the time, with the traces of `TRACES` alone.

    As it comes, it starts all its fifty kinds of traces when it is loaded, globes and street maps among them; and a
    browser parses its outer function twice, since it is not in the brackets that tell of a call. A source of another
    shape is given back as it is.
    """
    wanted = json.dumps(TRACES)
    made, found = re.subn(
        r"\b([\w$]+)\.register\(\[((?:[\w$]+\(\),?){20,})\]\)",
        lambda call: (
            f"{call[1]}.register((w=>{{const k=[];for(const f of [{call[2].replace('()', '')}]){{const m=f();k.push(m);"
            f"w=w.filter(n=>n!==m.name);if(!w.length)break}}return k}})({wanted}))"
        ),
        source,
    )
    start, arrow, inside = made.partition("? self : this, () => {")
    if found != 1 or not arrow or len(start) > 2000 or not inside.rstrip().endswith("}));"):
        return source
    return f"{start}? self : this, (() => {{{inside.rstrip().removesuffix('}));')}}})));\n"


def script_hash(source: str) -> str:
    """By which a policy knows a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def policy(*hashes: str, workers: bool = False) -> str:
    """A Content-Security-Policy that lets the scripts of these hashes run and no other, and nothing be fetched or sent.

    Scripts are hashed as the browser sees them, where every line ends in a line feed. `workers` may come from Blobs.
    """
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(f"'{each}'" for each in hashes),
        "style-src": "'unsafe-inline'",  # plotly styles its elements
        "img-src": "data: blob:",  # its heat maps, and pictures a reader saves
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    if workers:
        rules["worker-src"] = "blob:"
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def inert(value: Any) -> str:
    """JSON without a character that HTML or JavaScript reads as anything but text."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode()  # lone surrogates cannot be written


def put(template: str, parts: Mapping[str, str]) -> str:
    """The template with each {{NAME}} replaced by the part of that name; what is put in is not looked into."""
    made, *rest = template.split("{{")
    unused = set(parts)
    for piece in rest:
        name, _, tail = piece.partition("}}")
        if name not in parts:
            raise LocaterError(f"the page has a place for {name!r:.40} and is given {', '.join(parts)}")
        unused.discard(name)
        made += parts[name] + tail
    if unused:
        raise LocaterError(f"the page has no place for {', '.join(sorted(unused))}")
    return made
