"""Docstrings are written to be read in a terminal; this makes Markdown of what is laid out by columns there.

    term                      a line above an indented text: a definition
        what it is

    name    what it is        a table: a list
            in several lines

and anything else that is indented stays as it stands. A comment beside a field is its docstring.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import griffe

__all__ = ["Columns", "as_markdown"]

_TERM = re.compile(r"[\w.*-]+(, [\w.*-]+)*")
_ROW = re.compile(r"(\S+(?: \S+)*?) {2,}(\S.*)")


class Columns(griffe.Extension):
    """Rewrites every docstring once its object is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        beside = re.search(r"  # (?!type:|noqa)(.+)$", attr.source.rstrip())
        if attr.docstring is None and beside is not None and attr.parent is not None and attr.parent.is_class:
            attr.docstring = griffe.Docstring(as_markdown(beside[1]), parent=attr)


def as_markdown(text: str) -> str:
    text = re.sub(r"`[^`\n]*`|<(?=[/\w])", lambda found: "&lt;" if found[0] == "<" else found[0], text)  # no tags
    made: list[str] = []
    for block in re.split(r"\n[ ]*\n", text):
        lines = block.split("\n")
        inner = [line.startswith("  ") for line in lines]
        outer = [line for line, indented in zip(lines, inner, strict=True) if not indented]
        if not any(inner) or re.match(r"[*\-]|\d+\.", lines[0]):
            made.append(block)  # a paragraph, or a list with its continuations
        elif outer and not inner[0] and all(map(_TERM.fullmatch, outer)):
            made += _definitions(lines)
        else:
            for indented, part in groupby(lines, key=lambda line: line.startswith("  ")):
                together = list(part)
                made.append(_laid_out(together) if indented else "\n".join(together))
    return "\n\n".join(made)


def _definitions(lines: list[str]) -> list[str]:
    groups: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("  "):
            groups[-1][1].append(line)
        else:
            groups.append((line, []))
    return [part for term, below in groups for part in _definition(term, below)]


def _definition(term: str, below: list[str]) -> list[str]:
    if _is_table(below):
        return [f"`{term}`:", _laid_out(below)]
    return [f"`{term}`\n:   " + " ".join(line.strip() for line in below)]


def _laid_out(lines: list[str]) -> str:
    least = min(len(line) - len(line.lstrip()) for line in lines)
    lines = [line[least:] for line in lines]
    if not _is_table(lines):
        return "\n".join("    " + line for line in lines)
    rows: list[str] = []
    for line in lines:
        row = _ROW.fullmatch(line)
        if line.startswith(" ") or row is None:
            rows[-1] += " " + line.strip()
        else:
            rows.append(f"- `{row[1]}`: {row[2]}")
    return "\n".join(rows)


def _is_table(lines: list[str]) -> bool:
    """Whether every line that is not indented further has a name, a gap and a text; one that is a formula is not."""
    least = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    starts = [line[least:] for line in lines if not line[least:].startswith(" ")]
    rows = [_ROW.fullmatch(line) for line in starts]
    return len(rows) > 1 and all(row is not None and _TERM.fullmatch(row[1].replace(" ", "")) for row in rows)
