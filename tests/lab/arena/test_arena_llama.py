"""The arena on a real Llama, and fine-tuning SmolLM2: tables in the docs are those of the results, and what was run is
what was planned."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from scipy import stats

ROOT = Path(__file__).parent.parent.parent.parent
RESULTS = ROOT / "results" / "arena-llama"


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module("arena_llama")


def test_the_table_in_the_docs_is_that_of_the_results(benchmark):
    assert "\n".join(benchmark.table(RESULTS)) in (ROOT / "docs" / "arena.md").read_text()


def test_every_run_was_planned_and_stands_once(benchmark):
    known = benchmark.read(RESULTS / "runs.jsonl")
    runs = [run for run, _ in known]
    assert len(runs) == len(set(runs))
    assert set(runs) <= set(benchmark.plan(known))


def test_an_interval_is_student_s(benchmark):
    sample = [0.01, 0.02, 0.04]
    low, high = stats.ttest_1samp(sample, 0).confidence_interval(0.95)
    assert benchmark.interval(sample) == f"{100 * (low + high) / 2:+.2f}% ± {100 * (high - low) / 2:.2f}"


@pytest.mark.parametrize("name", ["finetune-smollm2", "finetune-smollm2-lora"])
def test_the_tables_of_fine_tuning_in_the_docs_are_those_of_the_results(monkeypatch, name):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    made = importlib.import_module("finetune_smollm2")
    folder = ROOT / "results" / name
    assert "\n".join(made.table(folder)) in (ROOT / "docs" / "locater.md").read_text()
    runs = [(line["method"], line["rate"], line["seed"]) for line in made.read(folder)]
    assert set(runs) <= set(made.plan(made.read(folder), lora=name.endswith("lora")))
