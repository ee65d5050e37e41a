"""LocAteR in real trainers: Hugging Face's and Lightning's."""

from __future__ import annotations

import copy
import csv
import re
from pathlib import Path

import lightning
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from zoo import build

from locater import LocAteR, LocaterError
from locater.control import DecoupledLocAteR, QKClip
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


# ---------------------------------------------------------------------- both forms in Lightning

FORMS = {
    "penalty": lambda model: LocAteR(model, **strengths(), schedule=lambda step: 1 / (1 + step)),
    "decoupled": lambda model: DecoupledLocAteR(model, change=CHANGE),
}
both_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def train(module, folder, callbacks, **more):
    trainer = lightning_trainer(folder, callbacks, **more)
    trainer.fit(module, DataLoader(Text(), batch_size=BATCH))
    return trainer


def update(model, optimizers, step):
    ids = batch(step)
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    for one in optimizers:
        one.step()


def optimizers_of(model):
    """One for each layer, and one that holds no query or key weight."""
    parts = [*model.model.layers, torch.nn.ModuleList([model.model.embed_tokens, model.model.norm, model.lm_head])]
    return [torch.optim.SGD(part.parameters(), lr=RATE) for part in parts]


class Several(Module):
    def __init__(self, model):
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch, _):
        self.model.zero_grad()
        self.manual_backward(self.model(**batch).loss)
        for one in self.optimizers():
            one.step()

    def configure_optimizers(self):
        return optimizers_of(self.model)


@both_forms
def test_several_optimizers_in_lightning_train_as_those_it_is_attached_to_as_a_list(form, tmp_path):
    model = build("llama").train()
    expected = copy.deepcopy(model)
    optimizers = optimizers_of(expected)
    form(expected).attach(optimizers)
    for step in range(STEPS):
        update(expected, optimizers, step)
    reg = form(model)
    train(Several(model), tmp_path, [LightningCallback(reg)], max_steps=STEPS * len(optimizers))
    assert_same(model, expected)
    assert reg.step == STEPS


class Unfreezing(lightning.pytorch.callbacks.BaseFinetuning):
    """All but the head is frozen in the first epoch."""

    def freeze_before_training(self, module):
        self.freeze(module.model.model)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.model.model, optimizer, lr=RATE)


class Head(Module):
    def configure_optimizers(self):
        return torch.optim.SGD(self.model.lm_head.parameters(), lr=RATE)


@both_forms
def test_weights_that_lightning_unfreezes_later_are_held_from_then_on(form, tmp_path):
    model = build("llama").train()
    expected = copy.deepcopy(model)
    head = expected.lm_head.parameters()
    optimizer = torch.optim.SGD(head, lr=RATE)
    for step in range(2 * STEPS):
        if step == STEPS:
            optimizer.add_param_group({"params": list(expected.model.parameters())})
            form(expected).attach(optimizer)
        update(expected, [optimizer], step % STEPS)
    reg = form(model)
    with pytest.warns(UserWarning, match="all query and key weights are frozen"):
        train(Head(model), tmp_path, [LightningCallback(reg), Unfreezing()], max_steps=2 * STEPS)
    assert_same(model, expected)
    assert reg.step == STEPS


@both_forms
@pytest.mark.parametrize(
    ("module", "said"),
    [(Module, "this SGD holds none of the query and key weights"), (Several, "is held by none of the optimizers")],
)
def test_lightning_is_told_that_its_optimizers_hold_the_weights_of_another_model(form, module, said, tmp_path):
    with pytest.raises(LocaterError, match=said):
        train(module(build("llama")), tmp_path, [LightningCallback(form(build("llama")))])


class AnyOrder(Module):
    """Takes the batch of a step, also where Lightning begins its data again."""

    def training_step(self, _, __):
        ids = batch(self.trainer.global_step)
        return self.model(input_ids=ids, labels=ids).loss


@both_forms
def test_a_run_that_lightning_resumes_goes_on_as_if_it_had_not_been_stopped(form, tmp_path):
    model = build("llama").train()
    half, again = copy.deepcopy(model), copy.deepcopy(model)
    train(AnyOrder(model), tmp_path, [LightningCallback(form(model))])
    stopped = train(AnyOrder(half), tmp_path, [LightningCallback(form(half))], max_steps=2)
    stopped.save_checkpoint(tmp_path / "half.ckpt")
    callback = LightningCallback(form(again))
    trainer = lightning_trainer(tmp_path, [callback])
    trainer.fit(AnyOrder(again), DataLoader(Text(), batch_size=BATCH), ckpt_path=tmp_path / "half.ckpt")
    assert callback.regulariser.step == STEPS
    assert_same(again, model, tolerance=0)


@both_forms
def test_nothing_stays_attached_after_fits_in_lightning_also_those_that_fail(form, tmp_path):
    class Failing(Module):
        def training_step(self, batch, index):
            if index == 2:
                raise KeyError(index)
            return super().training_step(batch, index)

    model = build("llama")
    callback = LightningCallback(form(model))
    trainers = [train(Module(model), tmp_path, [callback]) for _ in range(2)]
    failed = lightning_trainer(tmp_path, [callback])
    with pytest.raises(KeyError):
        failed.fit(Failing(model), DataLoader(Text(), batch_size=BATCH))
    assert not callback.regulariser._attached
    assert not any(module._forward_pre_hooks for module in model.modules())
    for trainer in (*trainers, failed):
        (optimizer,) = trainer.optimizers
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize(
    ("module", "options", "steps"),
    [(Module, {}, 2 * STEPS), (Module, {"accumulate_grad_batches": 2}, 6), (Several, {}, 6 * STEPS)],
    ids=["plain", "accumulated", "several optimizers"],
)
def test_lightning_writes_the_penalty_of_the_step_it_names(module, options, steps, tmp_path):
    """The penalty that is added in this step. The last of two epochs ends between two lines."""
    model = build("llama")
    reg = LocAteR(model, **strengths())
    penalties = {}

    class Spy(lightning.Callback):
        def on_before_optimizer_step(self, trainer, *_):
            penalties.setdefault(trainer.fit_loop.epoch_loop._batches_that_stepped, reg.measure()["penalty"])

    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    every = {"logger": logger, "log_every_n_steps": 2, "max_steps": steps, **options}
    train(module(model), tmp_path, [Spy(), LightningCallback(reg)], **every)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        written = {int(row["step"]): float(row["locater/penalty"]) for row in csv.DictReader(file)}
    assert list(written) == [step for step in penalties if step % 2 == 1]
    assert written == pytest.approx({step: penalties[step] for step in written}, rel=1e-6)
    assert len(set(penalties.values())) == len(penalties)


class Pair(Module):
    """Two models that are alike, trained together."""

    def __init__(self, model, other):
        super().__init__(model)
        self.other = other

    def training_step(self, batch, _):
        return self.model(**batch).loss + self.other(**batch).loss


def test_two_models_in_one_lightning_module_keep_states_and_logs_of_their_own(tmp_path):
    first, second = build("llama"), build("llama")
    regs = [LocAteR(first, **strengths()), LocAteR(second, scale_strength=0.5, mean_strength=0)]
    trainer = fit(Pair(first, second), tmp_path, [LightningCallback(reg) for reg in regs])
    logged = trainer.logged_metrics
    assert {"locater/model/penalty", "locater/other/penalty"} < logged.keys()
    assert logged["locater/model/penalty"] != logged["locater/other/penalty"]
    trainer.save_checkpoint(tmp_path / "both.ckpt")

    first, second = build("llama"), build("llama")
    others = [LocAteR(one, scale_strength=0, mean_strength=0) for one in (second, first)]  # in another order
    again = lightning_trainer(tmp_path, [LightningCallback(reg) for reg in others])
    again.fit(Pair(first, second), DataLoader(Text(), batch_size=BATCH), ckpt_path=tmp_path / "both.ckpt")
    assert [one.scale_strength for one in others] == [0.5, strengths()["scale_strength"]]


@both_forms
def test_lightning_takes_one_form_of_a_model_once_and_both_beside_each_other(form, tmp_path):
    model = build("llama")
    with pytest.raises(LocaterError, match=r"another LocAteRCallback holds a \w+ of this model already"):
        train(Module(model), tmp_path, [LightningCallback(form(model)) for _ in range(2)])
    train(Module(model), tmp_path, [LightningCallback(each(model)) for each in FORMS.values()])


@pytest.mark.parametrize("callback", [LocAteRCallback, LightningCallback], ids=["Hugging Face", "Lightning"])
@pytest.mark.parametrize("wrong", [QKClip(), LocAteR, None], ids=["QKClip", "the class", "nothing"])
def test_a_callback_takes_nothing_else(callback, wrong):
    said = f"LocAteRCallback takes a LocAteR(model, …) or a DecoupledLocAteR(model), got {type(wrong).__name__}"
    with pytest.raises(LocaterError, match=f"^{re.escape(said)}$"):
        callback(wrong)
