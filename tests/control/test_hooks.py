"""LocAteR in real trainers: Hugging Face's and Lightning's."""

from __future__ import annotations

import copy

import lightning
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from zoo import build

from locater import LocAteR
from locater.control import DecoupledLocAteR
from locater.control.hf import LocAteRCallback
from locater.control.lightning import LocAteRCallback as LightningCallback
from trainers import BATCH, RATE, STEPS, InOrder, Module, Text, batch, lightning_trainer

# trainers warn about what a small test does not need: few workers, no logger, short epochs
pytestmark = pytest.mark.filterwarnings("ignore")


def strengths():
    return {"scale_strength": 0.02, "mean_strength": 0.03, "target": 1.5}


def by_hand(model, clip=None, penalised=True):
    """Loss plus penalty in a plain loop; what the trainers should amount to."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    reg = LocAteR(model, **strengths())
    for step in range(STEPS):
        ids = batch(step)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        (loss + reg.penalty() if penalised else loss).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_same(model, other, tolerance=1e-5):
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def hf_trainer(model, reg, folder):
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):  # noqa: ARG002
            seen.append(dict(logs))

    trainer = InOrder(model, folder, [Reporter()])
    LocAteRCallback(reg).add_to(trainer)
    return trainer, seen


def test_the_hugging_face_trainer_trains_on_loss_plus_penalty_and_logs(tmp_path):
    model = build("llama")
    expected = by_hand(copy.deepcopy(model).train())
    reg = LocAteR(model, **strengths())
    trainer, reported = hf_trainer(model, reg, tmp_path)
    trainer.train()
    assert_same(model, expected)
    assert reg.step == STEPS
    logged = [entry for entry in trainer.state.log_history if "locater/penalty" in entry]
    assert len(logged) >= STEPS
    assert logged[STEPS - 1]["locater/penalty"] == pytest.approx(reg.penalty().item(), rel=1e-4)
    assert any(key.endswith("layers.1.self_attn/scale") for key in logged[0])
    assert reported[0].keys() >= {"locater/penalty", "loss"}
    # detached at the end: another step changes nothing through LocAteR
    assert not reg._attached


def fit(module, folder, callbacks, **more):
    """The trainer, which logs every step, once it has trained."""
    logger = lightning.pytorch.loggers.CSVLogger(folder)
    trainer = lightning_trainer(folder, callbacks, logger=logger, log_every_n_steps=1, **more)
    trainer.fit(module, DataLoader(Text(), batch_size=BATCH))
    return trainer


@pytest.mark.parametrize("clip", [None, 0.5])
def test_lightning_trains_on_loss_plus_penalty_clipped_together(tmp_path, clip):
    model = build("llama").train()
    expected = by_hand(copy.deepcopy(model), clip=clip)
    reg = LocAteR(model, **strengths())
    trainer = fit(Module(model), tmp_path, [LightningCallback(reg)], gradient_clip_val=clip)
    assert_same(model, expected)
    assert reg.step == STEPS
    assert "locater/penalty" in trainer.logged_metrics


def test_attaching_to_lightnings_optimizer_works_too_although_backward_runs_inside_its_step(tmp_path):
    model = build("llama").train()
    expected = by_hand(copy.deepcopy(model))
    reg = LocAteR(model, **strengths())

    class Attached(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            reg.attach(optimizer)
            return optimizer

    fit(Attached(model), tmp_path, [])
    assert_same(model, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_in_lightning_does_not_scale_the_penalty(tmp_path, fused):
    """A fused optimizer's gradients are still scaled where the callback acts."""
    from lightning.pytorch.plugins import MixedPrecision

    class Quiet(Module):
        def training_step(self, batch, _):
            return 0.0 * self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE, fused=fused)

    model = build("llama").train()
    reg = LocAteR(model, **strengths())
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(expected.parameters(), lr=RATE)
    other = LocAteR(expected, **strengths()).attach(optimizer)
    optimizer.step()
    assert other.step == 1
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    trainer = lightning_trainer(tmp_path, [LightningCallback(reg)], max_steps=1, plugins=[plugin])
    trainer.fit(Quiet(model), DataLoader(Text(), batch_size=BATCH))
    assert_same(model, expected)


def test_lightning_checkpoints_carry_the_step():
    reg = LocAteR(build("llama"), **strengths())
    reg.step = 7
    other = LightningCallback(LocAteR(build("llama"), scale_strength=0, mean_strength=0))
    other.load_state_dict(LightningCallback(reg).state_dict())
    assert other.regulariser.step == 7
    assert other.regulariser.scale_strength == reg.scale_strength


# ---------------------------------------------------------------------- the decoupled form

CHANGE = 1e-4  # so small that every step is bounded


def decoupled_by_hand(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    DecoupledLocAteR(model, change=CHANGE).attach(optimizer)
    for step in range(STEPS):
        ids = batch(step)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model


def test_the_hugging_face_trainer_makes_the_decoupled_steps(tmp_path):
    model = build("llama").train()
    expected = decoupled_by_hand(copy.deepcopy(model))
    reg = DecoupledLocAteR(model, change=CHANGE)
    trainer, seen = hf_trainer(model, reg, tmp_path)
    trainer.train()
    assert_same(model, expected)
    assert any("locater/model.layers.0.self_attn/change" in logs for logs in seen)
    assert not reg._attached


def test_lightning_makes_the_decoupled_steps(tmp_path):
    model = build("llama").train()
    expected = decoupled_by_hand(copy.deepcopy(model))
    callback = LightningCallback(DecoupledLocAteR(model, change=CHANGE))
    fit(Module(model), tmp_path, [callback])
    assert_same(model, expected)
    assert callback.regulariser.step == STEPS
