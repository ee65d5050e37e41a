"""Logs of attention in real training: they hold what observe gives, and the training does not notice."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from zoo import build

from interpreter import on_gpu
from locater import LocaterError, observe
from locater.measure.hf import ObserveCallback
from locater.measure.lightning import ObserveCallback as LightningCallback
from locater.measure.logs import AttentionLog, read_log
from trainers import BATCH, RATE, STEPS, InOrder, Module, Text, batch, lightning_trainer

HEADS, STATES = ("entropy", "entropy_share", "max_logit"), ("rank_residual", "effective_rank", "mean_cosine")

# trainers warn about what a small test does not need: few workers, no logger, short epochs
pytestmark = pytest.mark.filterwarnings("ignore")


def by_hand(model, every=1):
    """A plain loop, and by step what observe gives in it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    found = {}
    for step in range(STEPS):
        ids = batch(step)
        optimizer.zero_grad()
        with observe(model) as seen:
            loss = model(input_ids=ids, labels=ids).loss
        if step % every == 0:
            found[step] = seen
        loss.backward()
        optimizer.step()
    return found


def assert_log_is(file, found, prefix=""):
    """The log holds the very numbers of the observations."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    modules = list(dict.fromkeys(next(iter(found.values())).table()["module"]))
    assert [(line["step"], line["module"]) for line in lines] == [(s, prefix + m) for s in found for m in modules]
    for line in lines:
        seen, module = found[line["step"]], line["module"].removeprefix(prefix)
        heads, tokens = (table[table["module"] == module] for table in (seen.table(), seen.tokens()))
        for name in HEADS:
            assert line[name] == list(heads[name]), (line["step"], module, name)
        for name in STATES:
            assert line[name] == tokens[name].item(), (line["step"], module, name)


def assert_same(model, other):
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def assert_left_alone(model):
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # gpt2 has dropout
def test_a_log_of_the_hugging_face_trainer_is_what_observe_gives(tmp_path, name):
    model = build(name).train()
    found = by_hand(copy.deepcopy(model), every=2)
    without = copy.deepcopy(model)
    torch.manual_seed(0)
    InOrder(without, tmp_path, []).train()
    torch.manual_seed(0)
    InOrder(model, tmp_path, [ObserveCallback(every=2, file=tmp_path / "a.jsonl")]).train()
    assert_same(model, without)
    assert_left_alone(model)
    if name == "llama":
        assert_log_is(tmp_path / "a.jsonl", found)


def test_the_forwards_of_an_accumulated_update_are_averaged(tmp_path):
    model = build("llama").train()
    ids = torch.cat([batch(0), batch(1)])
    twin = copy.deepcopy(model).train()
    with observe(twin) as seen:
        twin(input_ids=ids)
    more = {"gradient_accumulation_steps": 2, "data": Text(2 * STEPS * BATCH)}
    InOrder(model, tmp_path, [ObserveCallback(file=tmp_path / "a.jsonl")], **more).train()
    log = read_log(tmp_path / "a.jsonl")
    assert set(log["step"]) == {0}
    got = np.concatenate(log["entropy"].to_list())
    np.testing.assert_allclose(got, seen.table()["entropy"], rtol=1e-5)  # float32 in other batches


def test_a_trainer_that_fails_leaves_the_model_to_close(tmp_path):
    class Fails(InOrder):
        def compute_loss(self, *args, **kwargs):
            super().compute_loss(*args, **kwargs)
            raise ZeroDivisionError

    model, callback = build("llama"), ObserveCallback(file=tmp_path / "a.jsonl")
    with pytest.raises(ZeroDivisionError):
        Fails(model, tmp_path, [callback]).train()
    callback.close()
    assert_left_alone(model)
    assert not (tmp_path / "a.jsonl").exists()


# ---------------------------------------------------------------- Lightning


def fit(module, folder, callbacks, validate=False, **more):
    loader = DataLoader(Text(), batch_size=BATCH)
    lightning_trainer(folder, callbacks, **more).fit(module, loader, loader if validate else None)


@pytest.mark.parametrize("inner", [False, True])
def test_a_log_of_lightning_is_what_observe_gives(tmp_path, inner):
    model = build("llama").train()
    found = by_hand(copy.deepcopy(model), every=2)
    without = copy.deepcopy(model)
    fit(Module(without), tmp_path, [])
    callback = LightningCallback(every=2, file=tmp_path / "a.jsonl", model=model if inner else None)
    fit(Module(model), tmp_path, [callback], validate=True, val_check_interval=1)
    assert_same(model, without)
    assert_left_alone(model)
    assert_log_is(tmp_path / "a.jsonl", found, prefix="" if inner else "model.")


def test_an_exception_in_lightning_leaves_the_model_as_it_was(tmp_path):
    class Fails(Module):
        def training_step(self, batch, index):
            super().training_step(batch, index)
            raise ZeroDivisionError

    model = build("llama")
    with pytest.raises(ZeroDivisionError):
        fit(Fails(model), tmp_path, [LightningCallback(file=tmp_path / "a.jsonl")])
    assert_left_alone(model)
    assert not (tmp_path / "a.jsonl").exists()


# ---------------------------------------------------------------- plain loops


def train(model, log, steps=range(STEPS)):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in steps:
        ids = batch(step)
        optimizer.zero_grad()
        with log.step(step):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()


def test_a_plain_loop_logs_what_observe_gives(tmp_path):
    model = build("llama").train()
    other = copy.deepcopy(model)
    found = by_hand(other, every=2)
    with AttentionLog(model, every=2, file=tmp_path / "a.jsonl") as log:
        train(model, log)
    assert_same(model, other)
    assert_log_is(tmp_path / "a.jsonl", found)


def test_steps_between_are_not_observed(tmp_path):
    model = build("llama")
    log = AttentionLog(model, every=3, file=tmp_path / "a.jsonl")
    with log.step(1) as seen:
        assert seen is None
        assert_left_alone(model)
    with log.step(4) as seen:  # 3 never began
        model(input_ids=batch(0))
        assert seen is not None
    with log.step(5) as seen:
        assert seen is None
    assert set(read_log(tmp_path / "a.jsonl")["step"]) == {4}


def test_a_run_that_goes_on_replaces_the_steps_it_makes_again_and_a_torn_line(tmp_path):
    file = tmp_path / "a.jsonl"
    model = build("llama").train()
    whole = copy.deepcopy(model)
    train(whole, AttentionLog(whole, every=1, file=tmp_path / "whole.jsonl"))
    train(model, AttentionLog(model, every=1, file=file), range(3))
    kept = copy.deepcopy(model)
    train(model, AttentionLog(model, every=1, file=file), range(3, 4))
    with open(file, "ab") as torn:  # a process killed while it wrote
        torn.write(b'{"step":4,"module":"model.la')
    assert len(read_log(file)) == 8
    train(kept, AttentionLog(kept, every=1, file=file), range(3, STEPS))
    assert file.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_an_exception_in_a_step_writes_nothing_and_leaves_the_model_as_it_was(tmp_path):
    model = build("llama")
    log = AttentionLog(model, file=tmp_path / "a.jsonl")
    model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)  # attention has run by then
    with pytest.raises(ZeroDivisionError), log.step(0):
        model(input_ids=batch(0))
    model.lm_head._forward_pre_hooks.clear()
    assert_left_alone(model)
    assert not (tmp_path / "a.jsonl").exists()


def test_numbers_that_are_not_finite_are_null(tmp_path):
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(torch.nan)
    with AttentionLog(model, file=tmp_path / "a.jsonl").step(0):
        model(input_ids=batch(0))
    first, second = (json.loads(line, parse_constant=None) for line in open(tmp_path / "a.jsonl"))  # noqa: SIM115
    assert None not in first["entropy"]
    assert set(second["max_logit"]) == {None}


def test_tensorboard_shows_every_module(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = build("llama")
    with AttentionLog(model, every=2, file=tmp_path / "a.jsonl", tensorboard=tmp_path / "board") as log:
        train(model, log)
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    lines = read_log(tmp_path / "a.jsonl")
    for module, rows in lines.groupby("module"):
        shown = board.Scalars(f"attention/max_logit/{module}")
        assert [event.step for event in shown] == [0, 2, 4]
        np.testing.assert_allclose([event.value for event in shown], [max(x) for x in rows["max_logit"]], rtol=1e-6)
        residual = [event.value for event in board.Scalars(f"attention/rank_residual/{module}")]
        np.testing.assert_allclose(residual, rows["rank_residual"], rtol=1e-6)


def test_bad_input_is_told_before_training(tmp_path):
    model = build("llama")
    with pytest.raises(LocaterError, match="every must be"):
        AttentionLog(model, every=0)
    with pytest.raises(LocaterError, match="there is no folder"):
        AttentionLog(model, file=tmp_path / "absent" / "a.jsonl")
    with pytest.raises(LocaterError, match="nothing to write to"):
        AttentionLog(model, file=None)
    with pytest.raises(LocaterError):
        AttentionLog(torch.nn.Linear(2, 2))
    (tmp_path / "notes.txt").write_text("mine\n")
    with (
        pytest.raises(LocaterError, match=r"line 1 of .* is no line of a log"),
        AttentionLog(model, file=tmp_path / "notes.txt").step(0),
    ):
        model(input_ids=batch(0))
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


@on_gpu
def test_on_a_gpu_a_step_is_written_when_the_next_begins_or_the_log_is_closed(tmp_path):
    """Its numbers are those that observe gives, and nothing waits for them meanwhile."""
    model, file = build("llama").cuda(), tmp_path / "log.jsonl"
    ids = torch.randint(60, (2, 12), device="cuda")
    tables = []
    with AttentionLog(model, every=1, file=file) as log:
        for step in range(3):
            assert len(read_log(file)["step"].unique()) == step - 1 if step > 1 else True
            waits = "default" if step == 0 else "error"  # at first kernels are compiled
            with log.step(step) as seen:
                model(input_ids=ids)
                torch.cuda.set_sync_debug_mode(waits)
            torch.cuda.set_sync_debug_mode("default")
            tables.append((seen.table(), seen.tokens()))
    rows = read_log(file)
    assert sorted(rows["step"].unique()) == [0, 1, 2]
    for step, (heads, tokens) in enumerate(tables):
        found = rows[rows["step"] == step]
        for name in ("entropy", "entropy_share", "max_logit"):
            assert [x for row in found[name] for x in row] == pytest.approx(heads[name].tolist())
        for name in ("rank_residual", "effective_rank", "mean_cosine"):
            assert found[name].tolist() == pytest.approx(tokens[name].tolist())
        assert set(found["keys"]) == {12}
