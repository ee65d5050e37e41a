"""Reports: what scan, measure, sweep and train write, as one page to look at, send and print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from locater.errors import LocaterError
from locater.io import write_file
from locater.pages.report._find import Found, collect

__all__ = ["LARGEST", "Found", "Report", "page_of", "report"]

Maker = Callable[[float], dict[str, Any]]

LARGEST = 6_000_000
"""Bytes that no report exceeds: what does not fit is shown in less detail, and the page says so."""


@dataclass(frozen=True)
class Report:
    """A page, and what is on it."""

    html: str
    sections: list[dict[str, Any]]
    passed: list[str]  # files in the given folders that no command of ours wrote, with the reason

    def write(self, path: str | Path) -> Path:
        return write_file(Path(path), self.html.encode())


def report(paths: Sequence[str | Path], *, seeds_from: str | Path | None = None) -> Report:
    """A page of the files and folders: scans, measurements, sweeps, runs, logs of attention.

    `seeds_from` is a sweep of several seeds, for the spread between seeds where one to be shown has a single seed.
    """
    found, passed = collect(paths)
    return page_of(found, passed, seeds_from=seeds_from)


def page_of(found: Sequence[Found], passed: Sequence[str] = (), *, seeds_from: str | Path | None = None) -> Report:
    """A page of contents that are at hand, a section each."""
    from locater.pages.report._page import page

    passed = list(passed)
    builders = _builders(seeds_from)
    makers = [builders[each.kind](each) for each in found]
    detail = [1.0] * len(found)
    sections = [make(1.0) for make in makers]
    while True:
        made = page(_title(sections), sections, passed)
        if len(made.encode()) <= LARGEST:
            return Report(made, sections, passed)
        largest = max(range(len(found)), key=lambda index: _size(sections[index]))
        detail[largest] /= 2
        if detail[largest] < 1 / 64:
            raise LocaterError(
                f"a page of these would be larger than {LARGEST / 1e6:g} MB; give fewer at a time, "
                f"{found[largest].path} by itself"
            )
        sections[largest] = makers[largest](detail[largest])


def _builders(seeds_from: str | Path | None) -> dict[str, Callable[[Found], Maker]]:
    """By kind: what reads a thing, and gives what makes its section in a detail from 1 down."""
    from locater.lab.claims import seed_spread
    from locater.pages.report._diagnosis import diagnosis_section
    from locater.pages.report._log import log_section
    from locater.pages.report._measurement import measurement_section
    from locater.pages.report._prediction import prediction_section
    from locater.pages.report._scan import scan_section
    from locater.pages.report._sweep import claims_section, metrics_section, summary_section, sweep_section

    noise = None if seeds_from is None else seed_spread(seeds_from)
    makes = {
        "diagnosis": diagnosis_section,
        "scan": scan_section,
        "measurement": measurement_section,
        "log": log_section,
        "metrics": metrics_section,
        "prediction": prediction_section,
        "summary": summary_section,
        "claims": claims_section,
    }
    return {kind: partial(partial, make) for kind, make in makes.items()} | {"sweep": partial(sweep_section, noise)}


def _title(sections: Sequence[dict[str, Any]]) -> str:
    names = [str(section["title"]) for section in sections]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _size(section: dict[str, Any]) -> int:
    import json

    return len(json.dumps(section))
