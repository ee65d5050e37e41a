"""docs/paper.md: a row for every item of the paper, and what its rows name exists."""

from __future__ import annotations

import re
import shlex
import unicodedata
from importlib import import_module
from typing import NamedTuple

import pytest
import typer

from locater.cli import app
from locater.lab import PRESETS
from locater.theory import STUDIES
from markdown_pages import DOCS, ROOT

PAGE = (DOCS / "paper.md").read_text()

EQUATIONS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22)
LEMMAS = (1, 2, 3, 4)
FIGURES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
LIMITS_OF_LEMMA_2 = (1, 2, 3, 4)
REMARKS = (1, 2)

ITEMS = [
    "Definition 1",
    "Assumption 1",
    "A1",
    "A2",
    *(f"Eq. ({number})" for number in EQUATIONS),
    *(f"Lemma {number}" for number in LEMMAS),
    *(f"Lemma 2, limit {number}" for number in LIMITS_OF_LEMMA_2),
    *(f"Remark {number}" for number in REMARKS),
    *(f"Fig. {number}" for number in FIGURES),
]


class Row(NamedTuple):
    item: str
    here: str
    verdict: str
    erratum: str


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


TABLE = [_cells(line) for line in PAGE.splitlines() if line.startswith("|")]
ROWS = [cells for cells in TABLE if cells != list(Row._fields) and set("".join(cells)) != {"-"}]
CODE = re.findall(r"`([^`\n]+)`", PAGE)
NAMES = sorted({code for code in CODE if code.startswith("locater.")})
COMMANDS = sorted({code for code in CODE if code.startswith("locater ")})


def test_every_row_has_four_cells_of_which_here_and_verdict_are_not_empty():
    for cells in ROWS:
        assert len(cells) == len(Row._fields), cells
        row = Row(*cells)
        assert row.item, cells
        assert row.here, row.item
        assert row.verdict, row.item


@pytest.mark.parametrize("item", ITEMS)
def test_every_item_of_the_paper_has_a_row(item):
    begins = re.compile(rf"{re.escape(item)}(?!\d)")  # Fig. 1 is not Fig. 12; Fig. 6B is of Fig. 6
    assert any(begins.match(cells[0]) for cells in ROWS)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_on_the_page_is_there_to_import(name):
    package, *parts = name.split(".")
    found, path = import_module(package), package
    for part in parts:
        path = f"{path}.{part}"
        found = getattr(found, part) if hasattr(found, part) else import_module(path)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_on_the_page_is_one_of_the_command_line_with_these_options(command):
    commands = typer.main.get_command(app).commands
    _, name, *arguments = shlex.split(command)
    assert name in commands
    options = {option for each in commands[name].params for option in (*each.opts, *each.secondary_opts)}
    assert {word.split("=")[0] for word in arguments if word.startswith("--")} <= options


@pytest.mark.parametrize("command", COMMANDS)
def test_studies_presets_figures_and_results_that_the_commands_name_exist(command):
    _, name, *arguments = shlex.split(command)
    known = {"study": STUDIES, "train": PRESETS, "sweep": PRESETS, "figure": tuple(map(str, FIGURES))}
    assert arguments[0] in known.get(name, arguments)
    for word in arguments:
        assert not word.startswith("results/") or (ROOT / word).is_dir(), word


def test_every_link_to_a_section_leads_to_a_heading():
    anchors = re.findall(r"\]\(([\w/-]*(?:\.md)?)#([^)]+)\)", PAGE)
    assert any(page == "errata.md" for page, _ in anchors)
    for page, anchor in anchors:
        text = (DOCS / page).read_text() if page else PAGE
        headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.M)
        assert anchor in map(_slug, headings), f"{page}#{anchor}"


def _slug(heading: str) -> str:
    """As mkdocs.yml has it: pymdownx.slugs.slugify(case="lower")."""
    return re.sub(r"[^\w\- ]", "", unicodedata.normalize("NFC", heading).strip().lower()).replace(" ", "-")
