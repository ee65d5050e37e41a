"""The arena on a real Llama, and fine-tuning SmolLM2: what was run is what was planned."""

from __future__ import annotations

import importlib
import json
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


def test_every_run_was_planned(benchmark):
    known = benchmark.read(RESULTS / "runs.jsonl")
    assert {run for run, _ in known} <= set(benchmark.plan(known))


def test_runs_of_another_version_of_locater_are_trained_again_and_marked(benchmark, tmp_path):
    lines = [json.loads(line) for line in (RESULTS / "runs.jsonl").read_text().splitlines()[:40]]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = benchmark.read(tmp_path / "runs.jsonl")
    old = [run for run, line in known if "LocAteR" in run.method]
    assert old
    assert benchmark.done(known) == {run for run, _ in known} - set(old)
    assert sum("LocAteR †" in line for line in benchmark.table(tmp_path)) > 0
    with (tmp_path / "runs.jsonl").open("a") as file:
        for line in lines:
            file.write(json.dumps(benchmark.versioned(line)) + "\n")
    known = benchmark.read(tmp_path / "runs.jsonl")
    assert len(known) == len(lines)
    assert benchmark.done(known) == {run for run, _ in known}
    assert not any("†" in line for line in benchmark.table(tmp_path))


def test_an_interval_is_student_s(benchmark):
    sample = [0.01, 0.02, 0.04]
    low, high = stats.ttest_1samp(sample, 0).confidence_interval(0.95)
    assert benchmark.interval(sample) == f"{100 * (low + high) / 2:+.2f}% ± {100 * (high - low) / 2:.2f}"


@pytest.mark.parametrize("name", ["finetune-smollm2", "finetune-smollm2-lora"])
def test_every_run_of_fine_tuning_was_planned(monkeypatch, name):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    made = importlib.import_module("finetune_smollm2")
    known = made.read(ROOT / "results" / name)
    runs = {(line["method"], line["rate"], line["seed"]) for line in known}
    assert runs <= set(made.plan(known, lora=name.endswith("lora")))
