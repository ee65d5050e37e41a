"""What the tests of the lab share."""

from __future__ import annotations

import pytest
from corpora import write_corpus

from locater.lab import load_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return load_corpus(write_corpus(tmp_path_factory.mktemp("corpus")), cache=tmp_path_factory.mktemp("cache"))
