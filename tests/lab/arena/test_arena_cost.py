"""What an update costs: all contenders in turns, by the same clock, and never lost."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from locater.errors import LocaterError
from locater.lab import load_corpus
from locater.lab.arena import ARENAS, outdated_costs, read_arena, run_arena
from locater.lab.arena import cost as cost
from locater.lab.engine.methods import METHODS

SMALL = replace(
    ARENAS["laptop"],
    config=ARENAS["laptop"].config.changed(steps=1, warmup=0, record_every=1, width=16, ffn=16, tokens=16, batch=2),
    learning_rates=(1e-3,),
)
CPU = torch.device("cpu")
TAKES = {"none": 1.0, "qk-norm": 1.5, "softcap": 3.0}  # milliseconds a model


class Machine:
    """A clock, and stacks whose updates take what their method takes, at a machine that is busy now and then."""

    def __init__(self, monkeypatch):
        self.takes = dict(TAKES)
        self.fits = 100  # models of a contender
        self.now, self.order, self.texts = 0.0, [], []
        monkeypatch.setattr(cost, "Stack", lambda *given: Stacked(self, *given))
        monkeypatch.setattr(cost.time, "perf_counter", lambda: self.now)


class Stacked:
    def __init__(self, machine, config, members, corpus, device):
        if len(members) > machine.fits:
            raise torch.OutOfMemoryError("too much")
        self.machine, self.method, self.device, self.models = machine, config.model.method, device, len(members)
        machine.texts.append(corpus)

    def advance(self):
        machine = self.machine
        machine.order.append(self.method)
        busy = 100 if len(machine.order) in (7, 8, 20, 45, 46, 60) else 1
        machine.now += 1e-3 * machine.takes[self.method] * self.models * busy


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(SMALL.config.data, unit="bytes")


def entries(*names):
    planned = {name: SMALL.planned(name) for name in names}
    return {name: (config, members[0]) for name, (config, members) in planned.items()}


def test_contenders_are_timed_in_turns_and_by_the_median(machine, corpus):
    timing = cost.time_contenders(entries(*TAKES), corpus, CPU)
    found = {name: row["milliseconds"] for name, row in timing["contenders"].items()}
    assert found == pytest.approx(TAKES)  # a mean would show when the machine was busy
    turns = machine.order[6:]  # after two updates of each to warm up
    rounds = [turns[start : start + 3] for start in range(0, len(turns), 3)]
    assert len(rounds) == timing["rounds"]
    there = list(TAKES)
    assert all(each == (there if i % 2 == 0 else there[::-1]) for i, each in enumerate(rounds))


def test_timing_ends_after_seconds_however_slow_an_update(machine, corpus):
    assert cost.time_contenders(entries("none"), corpus, CPU)["rounds"] == 25
    machine.takes = {"none": 1e6}
    assert cost.time_contenders(entries("none"), corpus, CPU)["rounds"] == 5


def test_no_more_text_is_on_the_device_than_is_read(machine, corpus):
    """So that a corpus counts as nobody's memory; and an epoch does not end while updates are timed."""
    cost.time_contenders(entries("none"), corpus, CPU)
    (text,) = machine.texts
    per_batch = SMALL.config.tokens_per_batch
    assert len(machine.order) * per_batch <= len(text.splits["train"]) < 40 * per_batch < len(corpus.splits["train"])


def test_fewer_models_are_timed_where_more_do_not_fit(machine, corpus):
    machine.fits = 1
    timing = cost.time_contenders(entries("none", "softcap"), corpus, CPU)
    assert timing["models"] == 1
    assert timing["contenders"]["softcap"]["milliseconds"] == pytest.approx(3.0)
    machine.fits = 0
    with pytest.raises(LocaterError, match="2 models, one a contender, do not fit on cpu"):
        cost.time_contenders(entries("none", "softcap"), corpus, CPU)


def test_a_contender_that_comes_later_is_timed_beside_no_protection(tmp_path):
    run_arena(replace(SMALL, contenders=("qk-norm",)), tmp_path, device="cpu")
    run_arena(replace(SMALL, contenders=("qk-norm", "softcap")), tmp_path, device="cpu")
    timings = [timing["contenders"] for timing in json.loads((tmp_path / "cost.json").read_text())["timings"]]
    assert [set(timing) for timing in timings] == [{"none", "qk-norm"}, {"none", "softcap"}]
    models = read_arena(tmp_path).set_index("contender")
    for name, timing in zip(("qk-norm", "softcap"), timings, strict=True):
        milliseconds = {key: row["milliseconds"] for key, row in timing.items()}
        assert models.milliseconds[name] == milliseconds[name] > 0
        assert models.relative[name] == milliseconds[name] / milliseconds["none"]


def told(folder, rules):
    """The folder's timings as if by these versions of the methods; None is a file that did not say so yet."""
    path = folder / "cost.json"
    value = json.loads(path.read_text())
    for timing in value["timings"]:
        for name, row in timing["contenders"].items():
            assert row.pop("rule") == METHODS[name].version
            if rules is not None:
                row["rule"] = rules.get(name, METHODS[name].version)
    path.write_text(json.dumps(value))


def test_the_time_of_a_formula_that_has_changed_since_is_told_from_the_shipped_one_s(tmp_path):
    run_arena(replace(SMALL, contenders=("none", "qk-norm")), tmp_path, device="cpu")
    assert outdated_costs(tmp_path) == set()
    told(tmp_path, {"qk-norm": METHODS["qk-norm"].version - 1})
    assert outdated_costs(tmp_path) == {"qk-norm"}
    before = read_arena(tmp_path).set_index("contender").milliseconds
    run_arena(replace(SMALL, contenders=("qk-norm", "none")), tmp_path, device="cpu")
    timings = [timing["contenders"] for timing in json.loads((tmp_path / "cost.json").read_text())["timings"]]
    assert [set(timing) for timing in timings] == [{"none", "qk-norm"}, {"none", "qk-norm"}]
    after = read_arena(tmp_path).set_index("contender").milliseconds
    assert after["none"] == before["none"]
    assert after["qk-norm"] == timings[1]["qk-norm"]["milliseconds"] != before["qk-norm"]
    assert outdated_costs(tmp_path) == set()


def test_a_time_that_names_no_version_is_of_what_was_trained_there_but_locater_auto_s_of_an_older_one(tmp_path):
    """As in folders of before versions were written beside times."""
    run_arena(replace(SMALL, contenders=("none", "locater-auto", "qk-norm")), tmp_path, device="cpu")
    told(tmp_path, None)
    assert outdated_costs(tmp_path) == {"locater-auto"}
    shutil.rmtree(tmp_path / "qk-norm")  # which of its versions it was, nobody knows
    assert outdated_costs(tmp_path) == {"locater-auto", "qk-norm"}
    assert (read_arena(tmp_path).milliseconds > 0).all()


@pytest.mark.parametrize("content", ["{", '{"timings": [{"contenders": {"qk-norm": {"milliseconds": 1}}}]}', "[]"])
def test_a_damaged_file_of_costs_is_named(content, tmp_path):
    (tmp_path / "cost.json").write_text(content)
    with pytest.raises(LocaterError, match=r"cannot read .*cost.json: .*; remove it"):
        run_arena(replace(SMALL, contenders=("none",)), tmp_path, device="cpu")
