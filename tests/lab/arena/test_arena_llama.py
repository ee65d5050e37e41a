"""The arena on a real Llama, and fine-tuning SmolLM2: what was run is what was planned."""

from __future__ import annotations

import gzip
import importlib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parent.parent.parent.parent
RESULTS = ROOT / "results" / "arena-llama"


def imported(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def benchmark():
    return imported("arena_llama")


@pytest.fixture(scope="module")
def tuning():
    return imported("finetune_smollm2")


@pytest.fixture
def tiny(benchmark, tmp_path, monkeypatch):
    """The model for a CPU, smaller still, and its text."""
    folder = tmp_path / "enwik8"
    folder.mkdir()
    drawn = np.random.default_rng(0).integers(97, 123, 5_000, dtype=np.uint8)
    (folder / "enwik8.gz").write_bytes(gzip.compress(drawn.tobytes()))
    monkeypatch.setenv("LOCATER_DATA", str(tmp_path))
    size = replace(benchmark.SMALL, width=32, layers=2, inner=64, batch=2, tokens=64, train=4_000, valid=600,
                   updates=4, look_every=4)  # fmt: skip
    return benchmark.Text("bytes", size)


def test_every_method_trains_from_one_start_again_and_again(benchmark, tiny):
    """Through the public API; a run says the same whatever its trainer has trained before."""
    losses = {}
    for method, optimizer in zip(benchmark.METHODS, 3 * ("AdamW", "Muon"), strict=True):
        trainer = benchmark.Trainer(method, tiny)
        runs = [benchmark.Run(method, optimizer, 0.05, seed, 4) for seed in (0, 1, 0)]
        lines = [trainer(run) | {"seconds": 0} for run in runs]
        assert all(math.isfinite(line["loss"]) and line["largest_logit"] > 0 for line in lines)
        assert lines[0] == lines[2] != lines[1]
        losses[method] = lines[0]["loss"]
    assert len({losses["none"], losses["QK-norm"], losses["keys alone"]}) == 3


@pytest.fixture
def trained(benchmark, monkeypatch):
    """The names of the runs that `run_all` trains, in their order; a process that would wait fails."""
    names = []

    class Trainer:
        def __init__(self, *_):
            pass

        def __call__(self, run):
            names.append(run.name)
            return {**asdict(run), "loss": run.rate, "largest_logit": 9.0, "seconds": 1.0}

    def wait(seconds):
        raise AssertionError(f"waits {seconds} s")

    monkeypatch.setattr(benchmark, "Trainer", Trainer)
    monkeypatch.setattr(benchmark, "Text", lambda *_: None)
    monkeypatch.setattr(benchmark.time, "sleep", wait)
    return names


def test_every_run_was_planned(benchmark):
    known = benchmark.read(RESULTS / "runs.jsonl")
    assert {run for run, _ in known} <= set(benchmark.plan(known))
    small = benchmark.read(RESULTS.with_name("arena-llama-small") / "runs.jsonl")
    assert {run for run, _ in small} == set(benchmark.plan(small, benchmark.SMALL))


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


def test_what_no_process_could_ever_train_is_not_waited_for(benchmark, tmp_path, trained, monkeypatch, capsys):
    """QK-norm's runs need no best rate; QK-clip's do, which nobody here finds."""
    benchmark.run_all(tmp_path, "QK-norm", math.inf)
    rivals = [run.name for run in benchmark.plan([]) if run.method == "QK-norm"]
    assert sorted(trained) == sorted(rivals)
    assert "best rate" in capsys.readouterr().out
    monkeypatch.setattr(benchmark.time, "sleep", lambda _: None)
    benchmark.run_all(tmp_path, "QK-clip", math.inf)
    assert "best rate" in capsys.readouterr().out
    benchmark.run_all(tmp_path, "none", math.inf)
    benchmark.run_all(tmp_path, "QK-clip", math.inf)
    assert sum("QK-clip" in name for name in trained) == 6


def test_a_best_rate_that_another_process_is_about_to_find_is_waited_for(benchmark, tmp_path, trained, monkeypatch):
    benchmark.run_all(tmp_path, "none, (AdamW|Muon 0.001, seed 0)", math.inf)
    waits = []

    def until_it_is_done(_):
        waits.append(1)
        if len(waits) == 3:
            other.release()
            benchmark.run_all(tmp_path, "none", math.inf)

    monkeypatch.setattr(benchmark.time, "sleep", until_it_is_done)
    _, other = benchmark.missing(tmp_path / "runs.jsonl", "none")  # as another process would
    benchmark.run_all(tmp_path, "QK-clip, Muon", math.inf)
    assert len(waits) == 3
    assert sum("QK-clip, Muon" in name for name in trained) == 3


def test_the_longest_runs_begin_as_soon_as_the_best_rates_are_known(benchmark):
    """So that processes that share the rest end together; and nothing is planned twice."""
    known = benchmark.read(RESULTS / "runs.jsonl")
    for at in ([], known):
        runs = list(benchmark.plan(at))
        assert len(set(runs)) == len(runs)
        assert sum(run.updates == benchmark.LARGE.long for run in runs) == 3
    assert [run.updates == benchmark.LARGE.long for run in benchmark.plan(known)][:4] == [True, True, True, False]
    assert next(iter(benchmark.plan([]))).updates == benchmark.LARGE.updates


@pytest.mark.parametrize("end", ['{"method": "none", "optim', "", "\n"])
def test_a_line_that_was_cut_off_is_no_run_and_takes_no_other_with_it(benchmark, tmp_path, trained, end):
    path = tmp_path / "runs.jsonl"
    whole = (RESULTS / "runs.jsonl").read_text().splitlines()[:3]
    path.write_text("\n".join(whole) + ("\n" if end else "") + end)
    assert len(benchmark.read(path)) == 3
    benchmark.run_all(tmp_path, "QK-norm, Muon 0.003", math.inf)
    assert len(trained) == 3
    assert [run.name for run, _ in benchmark.read(path)][3:] == trained


@pytest.mark.parametrize("name", ["finetune-smollm2", "finetune-smollm2-lora"])
def test_every_run_of_fine_tuning_was_planned(tuning, name):
    known = tuning.read(ROOT / "results" / name)
    runs = {(line["method"], line["rate"], line["seed"]) for line in known}
    lora = name.endswith("lora")
    assert runs <= set(tuning.plan(known, lora=lora))
    assert {tuning.size_of(line) for line in known} == {tuning.Size(120, 8, 256, lora)}


class Task:
    """Trains at once; the lower a rate, the lower its loss."""

    def __init__(self, file, size):
        del file
        self.size = size

    def __call__(self, method, rate, seed):
        found = {"method": method, "rate": rate, "seed": seed, "loss": rate, "largest_logit": 9.0, "alarms": []}
        return {**found, "seconds": 1.0, **asdict(self.size)}


@pytest.mark.parametrize("other", [{"lora": True}, {"updates": 20}, {"batch": 2}, {"tokens": 64}])
def test_fine_tuning_of_another_size_or_kind_is_another_run(tuning, tmp_path, monkeypatch, other):
    monkeypatch.setattr(tuning, "Task", Task)
    sizes = [tuning.Size(**{"updates": 120, "batch": 8, "tokens": 256} | more) for more in ({}, other)]
    for size in sizes:
        tuning.run_all(tmp_path, None, size, math.inf)
    lines = tuning.read(tmp_path)
    for size in sizes:
        own = [line for line in lines if tuning.size_of(line) == size]
        runs = {(line["method"], line["rate"], line["seed"]) for line in own}
        assert runs == set(tuning.plan(own, size.lora))
        assert tuning.missing(tmp_path, size) is None
    assert len(tuning.table(tmp_path)) - 2 == len({(tuning.size_of(x), x["rate"], x["method"]) for x in lines})


def test_two_processes_fine_tune_different_runs_and_the_best_rate_is_of_all(tuning, tmp_path, monkeypatch):
    size, trained = tuning.Size(120, 8, 256), []

    class Shared(Task):
        def __call__(self, *run):
            trained.append(run)
            return super().__call__(*run)

    def other_ends(_):
        assert [rate for _, rate, _ in trained] == [1e-4, 3e-4, 1e-3]  # no more, before the best is known
        other.release()

    monkeypatch.setattr(tuning, "Task", Shared)
    monkeypatch.setattr(tuning.time, "sleep", other_ends)
    run, other = tuning.missing(tmp_path, size)
    assert run == ("none", 3e-5, 0)
    tuning.run_all(tmp_path, None, size, math.inf)
    assert len(trained) == len(set(trained))
    assert {rate for method, rate, _ in trained if method == "LocAteR"} == {3e-5, 3 * 3e-5, 10 * 3e-5}


def test_a_line_of_fine_tuning_that_was_cut_off_is_no_run(tuning, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "Task", Task)
    size = tuning.Size(120, 8, 256)
    line = json.dumps(Task(None, size)("none", 3e-5, 0))
    (tmp_path / "runs.jsonl").write_text(f"{line}\n{line[:40]}")
    tuning.run_all(tmp_path, None, size, math.inf)
    lines = tuning.read(tmp_path)
    assert {(x["method"], x["rate"], x["seed"]) for x in lines} == set(tuning.plan(lines, lora=False))
