"""The arena on a real Llama, and fine-tuning SmolLM2: what was run is what was planned."""

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
def test_every_run_of_fine_tuning_was_planned(monkeypatch, name):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    made = importlib.import_module("finetune_smollm2")
    known = made.read(ROOT / "results" / name)
    runs = [(line["method"], line["rate"], line["seed"]) for line in known]
    assert len(runs) == len(set(runs))
    assert set(runs) <= set(made.plan(known, lora=name.endswith("lora")))
