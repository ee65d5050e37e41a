"""The lines that teach locater an attention module, shown beside the error that asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from locater.errors import LocaterError

__all__ = ["ten_lines", "with_ten_lines"]

_LINES = """\
from locater.models import Projection, register

@register("MyAttention", checkpoints=("my_type",), paths=(r"layers\\.\\d+\\.attention",))  # class; model_type, names
def read(site):  # of 8 heads, each 64 wide
    query, key = (
        Projection(site.tensor(name), lambda w: w.unflatten(0, (8, 1, 64)))  # (key heads, query heads of each, …)
        for name in ("query.weight", "key.weight")
    )
    return site.attention(query, key, scale=64**-0.5)  # rope=, query_norm=, softcap= …: docs/howto/new-family.md
# as my_reader.py: locater scan MODEL --reader my_reader.py
"""


def ten_lines() -> str:
    """A file for `locater scan --reader`: a module of eight heads with layers `query` and `key`."""
    return _LINES


@contextmanager
def with_ten_lines() -> Iterator[None]:
    """Adds the lines as a note to an error that asks for a family: below the message of a traceback."""
    try:
        yield
    except LocaterError as error:
        if "locater.models.register" in str(error) and not hasattr(error, "__notes__"):
            error.add_note(ten_lines())
        raise
