"""Alarms: what raises them, what does not, and that they come before the loss breaks."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zoo import VOCABULARY, build

from locater import LocaterError
from locater.measure.alarms import Alarms, Thresholds, alarms_of
from locater.measure.hf import ObserveCallback
from locater.measure.lightning import ObserveCallback as LightningCallback
from locater.measure.logs import AttentionLog, read_log
from locater.theory import attention_entropy, softmax

ROOT = Path(__file__).parent.parent.parent
AT = Thresholds()
LARGE = 2 * AT.logit


def line(step, share=0.9, logit=5.0, rank=0.9, module="a", keys=64):
    """Of a module of two heads, both as given unless a list is."""
    share, logit = (x if isinstance(x, list) else [x, x] for x in (share, logit))
    values = {"entropy_share": share, "max_logit": logit, "rank_residual": rank}
    return {"step": step, "module": module, "keys": keys, **values}


def raised(**series):
    """The alarms of a module whose columns are these, a value a step."""
    alarms = Alarms()
    steps = [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]
    return [alarm for step, values in enumerate(steps) for alarm in alarms.update(step, [line(step, **values)])]


def kinds(found):
    return [alarm.kind for alarm in found]


# ---------------------------------------------------------------- the rule


def test_entropy_that_falls_while_logits_are_large_is_an_entropy_collapse():
    low = 0.9 * AT.entropy * 0.8
    found = raised(share=[0.5, 0.8, *[low] * 6], logit=[0.6 * AT.logit] * 8)
    assert kinds(found) == ["entropy collapse"]
    (alarm,) = found
    assert (alarm.step, alarm.module, alarm.head) == (1 + AT.patience, "a", None)
    assert f"share is {low:.3f}" in alarm.reason
    assert "0.800 at step 1" in alarm.reason
    assert "since step 2" in alarm.reason


def test_the_reason_says_how_low_the_logits_allow_the_entropy_to_be():
    """Zhai's bound, by making the attention that attains it: one key ahead of the others by twice the largest logit."""
    at, keys, largest = Thresholds(logit=4.0), 64, 2.5
    alarms = Alarms(at)
    alarms.update(0, [line(0)])
    rows = [line(step, share=0.01, logit=largest, keys=keys) for step in range(1, 1 + at.patience)]
    found = [alarm for row in rows for alarm in alarms.update(row["step"], [row])]
    attention = softmax(np.eye(1, keys)[0] * 2 * largest)
    quoted = re.search(r"logits up to 2.5 allow (\S+) of the (\S+) nats of 64 keys", found[0].reason)
    assert float(quoted[1]) == pytest.approx(float(attention_entropy(attention)), rel=0.05)  # it has two digits
    assert float(quoted[2]) == pytest.approx(math.log(keys), rel=0.005)


def test_sharp_heads_are_no_collapse():
    few = [0.01, 0.9]  # one of two, with logits as large as you like: the mean stays
    assert not raised(share=[0.9, *[few] * 20], logit=[[0.9 * AT.logit, 3]] * 21)
    assert not raised(share=[0.9, *[0.05] * 20], logit=[0.4 * AT.logit] * 21)  # all of them, with small logits: sinks
    assert not raised(share=[0.1] * 20, logit=[0.9 * AT.logit] * 20)  # from the beginning, in a model trained before


def test_nothing_is_raised_by_attention_as_it_is_at_the_beginning():
    """Uniform, logits near 0 or all of them below it, every token alone (no share), no hidden states known."""
    assert not raised(share=[1.0] * 20, logit=[1e-6, -0.2] * 10)
    assert not raised(share=[[None, None]] * 20, logit=[0.1] * 20, rank=[None] * 20)


def test_the_logits_of_one_head_raise_an_alarm_that_names_it():
    found = raised(logit=[[0.1, 0.2], *[[3.0, LARGE]] * 5])
    assert kinds(found) == ["logit growth"]
    assert found[0].head == 1
    assert found[0].step == AT.patience
    assert f"head 1 has a logit of {LARGE:.4g}" in found[0].reason
    assert "was 0.2 at step 0" in found[0].reason


def test_logits_that_were_large_when_the_log_began_must_have_doubled():
    assert not raised(logit=[LARGE, *[1.9 * LARGE] * 9])
    assert kinds(raised(logit=[LARGE, *[2.1 * LARGE] * 9])) == ["logit growth"]


@pytest.mark.parametrize("wild", [None, math.nan, math.inf])
def test_logits_that_are_not_finite_raise_an_alarm_at_once(wild):
    found = raised(logit=[1.0, [1.0, wild], [1.0, wild]], share=[0.9, [0.9, None], [0.9, None]])
    assert [(alarm.step, alarm.kind, alarm.head) for alarm in found] == [(1, "logit growth", 1)]
    assert "not finite" in found[0].reason


def test_tokens_that_stay_alike_are_a_rank_collapse_and_a_dip_is_not():
    low, n = 0.9 * AT.rank * 0.8, AT.rank_patience
    assert not raised(rank=[0.8, *[low] * (n - 1), *[0.5] * 20])
    found = raised(rank=[0.8, *[low] * n, *[0.5] * 20])
    assert kinds(found) == ["rank collapse"]
    assert found[0].step == n
    assert f"rank residual of {low:.2g}" in found[0].reason
    assert not raised(rank=[0.01] * 40)  # so from the beginning


def test_an_alarm_is_raised_again_only_when_it_had_ended():
    near = [1.1 * AT.logit, 0.9 * AT.logit] * 10  # about the threshold
    again = [LARGE] * AT.patience
    assert kinds(raised(logit=[*again, *near, *again])) == []  # it began with large ones
    assert kinds(raised(logit=[1.0, *again, *near, *again])) == ["logit growth"]
    well = [AT.logit / 4] * AT.patience
    assert kinds(raised(logit=[1.0, *again, *well, *again])) == ["logit growth"] * 2
    assert kinds(raised(logit=[1.0, *again, *well[1:], *again])) == ["logit growth"]


def test_half_way_is_enough_for_what_doubles_suddenly():
    half = 0.6 * AT.logit
    slowly = np.linspace(1, half, 60).tolist()
    assert not raised(logit=[*slowly, *[half] * 9])
    found = raised(logit=[*[0.2 * AT.logit] * 20, *[half] * 9])
    assert [(alarm.kind, alarm.step) for alarm in found] == [("logit growth", 19 + AT.patience)]
    assert f"twice {0.2 * AT.logit:.3g}, its median lately" in found[0].reason
    share = 1.5 * AT.entropy * 0.9
    quiet = 0.6 * AT.logit  # from the beginning, for logits to raise nothing
    assert not raised(share=[0.9, *np.linspace(0.9, share, 60)], logit=[quiet] * 61)
    found = raised(share=[*[0.9] * 20, *[share] * 9], logit=[quiet] * 29)
    assert [(alarm.kind, alarm.step) for alarm in found] == [("entropy collapse", 19 + AT.patience)]
    assert "half of its median lately, 0.9" in found[0].reason


def test_a_single_step_beyond_the_threshold_is_noise():
    assert AT.patience > 1
    assert not raised(logit=[1.0, 1.0, LARGE, 1.0] * 10)


def test_modules_are_watched_by_themselves():
    alarms = Alarms()
    for step in range(20):
        alarms.update(step, [line(step), line(step, module="b", logit=1.0 if step < 5 else LARGE)])
    assert [(alarm.module, alarm.step) for alarm in alarms.raised] == [("b", 4 + AT.patience)]


def test_a_step_that_is_not_after_the_last_begins_another_run():
    alarms = Alarms()
    for step in range(9):
        alarms.update(step, [line(step, logit=1.0 if step < 2 else LARGE)])
    assert len(alarms.raised) == 1
    alarms.update(0, [line(0, logit=LARGE)])  # which begins with large logits
    alarms.update(1, [line(1, logit=LARGE)])
    assert alarms.raised == []


def test_bad_input_is_told():
    row = line(0)
    del row["keys"]
    with pytest.raises(LocaterError, match="missing: keys"):
        Alarms().update(0, [row])
    with pytest.raises(LocaterError, match="missing: max_logit, rank_residual"):
        alarms_of(pandas.DataFrame([line(0)]).drop(columns=["max_logit", "rank_residual"]))
    with pytest.raises(LocaterError, match="logit must be positive, got -1"):
        Thresholds(logit=-1)
    with pytest.raises(LocaterError, match=r"patience must be a whole number, got 1\.5"):
        Thresholds(patience=1.5)
    with pytest.raises(LocaterError, match="rank_patience must be 1 or more, got 0"):
        Thresholds(rank_patience=0)
    with pytest.raises(LocaterError, match="alarms must be"):
        Alarms.of("loud")


number = st.one_of(st.none(), st.floats(1e-3, 1e3))
pair = st.lists(number, min_size=2, max_size=2)


@given(st.lists(st.tuples(st.sampled_from("ab"), pair, pair, number), max_size=30))
def test_a_log_as_a_whole_has_the_alarms_of_its_steps_in_turn(tmp_path_factory, drawn):
    file = tmp_path_factory.mktemp("log") / "a.jsonl"
    at = Thresholds(patience=1, rank_patience=2, rank=0.5, entropy=0.5, logit=10)
    alarms, raised = Alarms(at), []
    alarms.tell = raised.append
    found = []
    with open(file, "w") as log:
        for step, (module, share, logit, rank) in enumerate(drawn):
            row = line(step, share, logit, rank, module)
            found += alarms.update(step, [row])
            log.write(json.dumps(row) + "\n")
    assert alarms_of(read_log(file), at) == found == raised == alarms.raised


# ---------------------------------------------------------------- beside training


@pytest.fixture(scope="module")
def benchmark():
    """benchmarks/alarms.py, whose models and whose breaks of the loss these are."""
    spec = importlib.util.spec_from_file_location("benchmark_alarms", ROOT / "benchmarks" / "alarms.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_run_is_silent_while_healthy_and_told_of_its_collapse_before_its_loss_breaks(tmp_path, benchmark):
    """A small model on real text, on a seed the benchmark does not use; its queries' rate grows from step 400 on."""
    plan = benchmark.Plan("pre", "queries", 0.3, seed=benchmark.FIRST_SEED + 6)
    trainer = benchmark.Trainer(plan, layers=2, width=64)
    trainer.run(plan, range(benchmark.FORK + 130), benchmark.Text(), tmp_path / "a.jsonl")
    broken = benchmark.rise(trainer.losses, benchmark.RISE)
    first = {alarm.kind: alarm.step for alarm in reversed(alarms_of(read_log(tmp_path / "a.jsonl")))}
    assert trainer.losses[benchmark.FORK] < 0.5 * trainer.losses[0]
    assert first.keys() == {"logit growth", "entropy collapse"}
    assert benchmark.FORK < first["logit growth"] < broken
    assert benchmark.FORK < first["entropy collapse"] < broken


# ---------------------------------------------------------------- in logs and trainers


@pytest.fixture
def broken():
    """A model whose second layer has no finite logits."""
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(torch.nan)
    return model


IDS = torch.arange(3, 10)[None] % VOCABULARY


def test_a_log_tells_alarms_and_its_lines_stay_the_same(tmp_path, broken):
    raised = []
    for name, alarms in (("a", raised.append), ("b", Alarms())):
        log = AttentionLog(broken, every=1, file=tmp_path / name, alarms=alarms)
        for step in range(3):
            with log.step(step):
                broken(input_ids=IDS)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert [(alarm.step, alarm.kind, alarm.module) for alarm in raised] == [
        (0, "logit growth", "model.layers.1.self_attn")
    ]
    assert log.alarms == raised == alarms_of(read_log(tmp_path / "a"))
    assert set(read_log(tmp_path / "a")["keys"]) == {IDS.shape[1]}


def test_alarms_are_warnings_in_pythons_logging_unless_someone_is_told(tmp_path, broken, caplog):
    with caplog.at_level(logging.WARNING), AttentionLog(broken, file=tmp_path / "a.jsonl").step(0):
        broken(input_ids=IDS)
    assert [record.getMessage() for record in caplog.records] == [
        "step 0, model.layers.1.self_attn: logit growth: the logits of head 0 are not finite"
    ]


def test_a_log_that_is_gone_on_with_does_not_tell_again(tmp_path, broken):
    file, raised = tmp_path / "a.jsonl", []
    for steps in (range(2), range(2, 4)):
        log = AttentionLog(broken, every=1, file=file, alarms=raised.append)
        for step in steps:
            with log.step(step):
                broken(input_ids=IDS)
    assert len(raised) == 1
    assert log.alarms == raised == alarms_of(read_log(file))


def test_trainers_callbacks_tell_alarms_and_remember_them(tmp_path, broken):
    raised = []
    callback = ObserveCallback(every=1, file=tmp_path / "a.jsonl", alarms=raised.append)
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    callback.on_train_begin(None, state, None, model=broken)
    callback.on_step_begin(None, state, None)
    broken(input_ids=IDS)
    callback.on_step_end(None, state, None)
    callback.on_train_end(None, state, None)
    assert callback.alarms == raised
    assert kinds(raised) == ["logit growth"]
    callback = LightningCallback(every=1, file=tmp_path / "b.jsonl", alarms=raised.append)
    trainer = SimpleNamespace(global_step=0, is_global_zero=True)
    callback.on_train_start(trainer, broken)
    callback.on_train_batch_start(trainer, broken, None, 0)
    broken(input_ids=IDS)
    callback.on_train_batch_end(trainer, broken, None, None, 0)
    callback.on_train_end(trainer, broken)
    assert callback.alarms == raised[1:]
    assert kinds(raised) == ["logit growth"] * 2
