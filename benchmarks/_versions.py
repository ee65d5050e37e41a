"""Which lines of results were trained by another version of LocAteR's rule than the one that is shipped."""

from __future__ import annotations

from typing import Any

from locater.control.rules.decoupled import VERSION

__all__ = ["MARK", "newest", "outdated", "versioned"]

MARK = "†"


def outdated(line: dict[str, Any]) -> bool:
    return "LocAteR" in line["method"] and line.get("version", 3) != VERSION  # 3 did not say so


def versioned(line: dict[str, Any]) -> dict[str, Any]:
    return line | ({"version": VERSION} if "LocAteR" in line["method"] else {})


def newest(lines: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Of lines that agree in these, the last."""
    return list({tuple(line[name] for name in names): line for line in lines}.values())
