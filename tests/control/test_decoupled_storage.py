"""DecoupledLocAteR on weights that modules share, and on those that a step stores elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from moving import moved, run, sampled_logits, spread_of, weights
from zoo import build

from locater.control import DecoupledLocAteR, decoupled
from locater.models import attentions


class SetsData(torch.optim.Optimizer):
    """A step that gives parameters other storage, as hand-written ones do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data = p.data - p.grad


@pytest.mark.parametrize("together", [True, False])
def test_a_step_that_gives_weights_other_storage_is_bounded_just_as_well(monkeypatch, together):
    if not together:
        monkeypatch.setattr(decoupled, "stackable", lambda _: False)
    torch.manual_seed(0)
    models = [build("llama").double()]
    models.append(copy.deepcopy(models[0]))
    for model, optimizer in zip(models, (SetsData, lambda p: torch.optim.SGD(p, lr=1.0)), strict=True):
        stepping = optimizer(model.parameters())
        DecoupledLocAteR(model, spread=1.0).attach(stepping)
        for step in range(3):
            run(model)
            moved(model, 1.0, seed=step)
            stepping.step()
    for a, b in zip(weights(models[0]).values(), weights(models[1]).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shared", ["q_proj", "k_proj"])
def test_of_modules_that_share_one_weight_both_are_bounded(shared):
    torch.manual_seed(0)
    model = build("llama").double()
    first, second = (layer.self_attn for layer in model.model.layers)
    getattr(second, shared).weight = getattr(first, shared).weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model, spread=1e6).attach(optimizer)
    run(model)
    before = {a.module: sampled_logits(reg, a) for a in attentions(model)}
    moved(model, 0.3)
    optimizer.step()
    for attention in attentions(model):
        change = spread_of((sampled_logits(reg, attention) - before[attention.module]).transpose(0, 1))
        # the second has one weight to hold back, and what is left of the other's update comes on top
        assert (change < 0.21).all()
        assert reg.measure()[f"{attention.module}/change"] > 1
