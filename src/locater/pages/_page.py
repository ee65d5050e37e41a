"""One-file HTML pages that need nothing but themselves: no network, open from disk, plotly.js inside.

A page carries plotly.js gzipped in base64 in an element of its own, and `UNPACK` gives the page's script a function
that inflates and runs it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from locater.errors import LocaterError

_HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{POLICY}}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{{TITLE}} · locater</title>
<link rel="icon" href="data:,">
<style>
{{STYLE}}
</style>
</head>"""

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
    """plotly.js as `UNPACK` takes it, and its hash for `head`."""
    source = files(__package__).joinpath("plotly", "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(source, mtime=0)).decode(), script_hash(source.decode())


def script_hash(source: str) -> str:
    """By which a policy knows a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def head(title: str, style: str, hashes: Sequence[str], *, workers: bool = False) -> str:
    """What stands in a page's head. Scripts of these hashes run and no other; `workers` may come from Blobs."""
    shown = html.escape(title).encode("utf-8", "replace").decode()
    return put(_HEAD, {"POLICY": _policy(hashes, workers), "TITLE": shown, "STYLE": style})


def _policy(hashes: Sequence[str], workers: bool) -> str:
    """A Content-Security-Policy that lets the scripts of these hashes run and no other, and nothing be fetched or sent.

    Scripts are hashed as the browser sees them, where every line ends in a line feed.
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
    """The template with each {{NAME}} replaced by the part of that name; parts may hold {{…}} of their own."""
    slots = re.findall(r"\{\{(\w+)\}\}", template)
    if set(slots) != set(parts):
        raise LocaterError(f"the page has slots for {', '.join(slots)} and is given {', '.join(parts)}")
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], template)
