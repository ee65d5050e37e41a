"""plotly.js, cut down to what the pages draw with.

As it comes with the Python package `plotly` (extra `report`), it is 4.8 MB of text with fifty kinds of traces, globes
and street maps among them, all of which start when it is loaded. It is a bundle of some 1,200 modules, each a function
that runs when another module first asks for it by name. So the modules that the wanted traces ask for, directly or
through others, are all that is needed: a quarter of the text, which starts in a third of the time.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import re
from functools import cache

from locater.errors import require
from locater.pages._page import script_hash

__all__ = ["TRACES", "lean", "plotly"]

TRACES = ("heatmap",)
"""Those that pages draw with, besides plotly's core: scatter."""

_WORD = re.compile(r"[\w$]+")


@cache
def plotly() -> tuple[str, str]:
    """plotly.js, minified, its licence on top, as `UNPACK` takes it, and its hash for `policy`."""
    source = lean(str(require("plotly.offline", "report").get_plotlyjs()))
    return base64.b64encode(gzip.compress(source.encode(), compresslevel=9, mtime=0)).decode(), script_hash(source)


def lean(source: str) -> str:
    """plotly.js with the traces of `TRACES` alone; a source of another shape than the known is given back as it is."""
    registering = re.search(r"\.register\(\[((?:[\w$]+\(\),?){20,})\]\)", source)
    wrapper = re.search(r"([\w$]+)=\(\w+,\w+\)=>\(\)=>[^;]{1,60}\{exports:\{\}\}", source)  # of CommonJS modules
    if registering is None or wrapper is None:
        return source
    # a piece begins where a CommonJS module does; ES modules, which have a wrapper of their own, are in the one before
    begins = [found.start() for found in re.finditer(rf"(?<=\}}\);)var [\w$]+={re.escape(wrapper[1])}\(", source)]
    begins = [place for place in begins if place < registering.start()]
    if len(begins) < 100:
        return source
    head, tail = source[: begins[0]], source[begins[-1] :]
    pieces = [source[start:end] for start, end in itertools.pairwise(begins)]

    wrappers = re.findall(r"([\w$]+)=\(\w+,\w+(?:,\w+)?\)=>\(\)=>", head)
    defining = re.compile(rf"([\w$]+)=(?:{'|'.join(map(re.escape, wrappers))})\(")
    place = {name: index for index, piece in enumerate(pieces) for name in defining.findall(piece)}

    def asked_for(text: str) -> set[int]:
        """The pieces it names. A local variable may have a module's name: then one too many is kept."""
        return {place[word] for word in set(_WORD.findall(text)) if word in place}

    def makes(loader: str, trace: str) -> bool:
        near = {place[loader], *asked_for(pieces[place[loader]])} if loader in place else set()
        return any(f'moduleType:"trace",name:"{trace}"' in pieces[index] for index in near)

    loaders = _WORD.findall(registering[1])
    wanted = [loader for trace in TRACES for loader in loaders if makes(loader, trace)]
    if len(wanted) != len(TRACES):
        return source
    tail = tail.replace(registering[0], f".register([{','.join(f'{loader}()' for loader in wanted)}])")
    kept: set[int] = set()
    found = asked_for(head + tail)
    while found:
        kept |= found
        found = set().union(*(asked_for(pieces[index]) for index in found)) - kept
    return _called_at_once(head + "".join(pieces[index] for index in sorted(kept)) + tail)


def _called_at_once(source: str) -> str:
    """With brackets around the outer function: they tell a browser of the call, and it parses the function once."""
    start, arrow, inside = source.partition("? self : this, () => {")
    if not arrow or not inside.rstrip().endswith("}));"):
        return source
    return f"{start}? self : this, (() => {{{inside.rstrip().removesuffix('}));')}}})));\n"
