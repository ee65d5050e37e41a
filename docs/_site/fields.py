"""The comment beside a field of a class is its docstring."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["FieldComments"]


class FieldComments(griffe.Extension):
    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        beside = re.search(r"  # (?!type:|noqa)(.+)$", attr.source.rstrip())
        if attr.docstring is None and beside is not None and attr.parent is not None and attr.parent.is_class:
            attr.docstring = griffe.Docstring(beside[1], parent=attr)
