"""What docs/results.md and results/ say of the paper is what the runs in results/ give."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from locater.lab.claims import claims_markdown

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture(scope="module")
def reproduced():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "_site")
        return importlib.import_module("reproduced")


def test_the_table_in_the_docs_is_that_of_the_results(reproduced):
    assert "\n".join(reproduced.table()) in (ROOT / "docs" / "results.md").read_text()


def test_the_claims_beside_the_results_are_those_of_all_their_seeds(reproduced):
    for name in reproduced.SWEEPS:
        folders = reproduced.folders(name)
        assert (folders[0] / "claims.md").read_text() == claims_markdown(folders), "python docs/_site/reproduced.py"


def test_every_sweep_of_the_paper_s_sizes_is_in_the_table(reproduced):
    used = {folder for name in reproduced.SWEEPS for folder in reproduced.folders(name)}
    assert used == set((ROOT / "results").glob("paper-*"))
