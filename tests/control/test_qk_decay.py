"""QK weight decay: W_Q and W_K decay by lr · decay a step, everything else as the optimizer has it."""

from __future__ import annotations

import copy

import pytest
import torch
from rivals import batch, loss_of, one_step, ready
from torch import nn
from transformers.optimization import Adafactor as Transformers

from locater import LocaterError
from locater.control import QKDecay
from locater.models import attentions

DECAY, OWN, RATE, STEPS = 0.9, 0.3, 0.05, 3


def is_qk(name):
    return name.endswith(("q_proj.weight", "k_proj.weight"))


def trained(model, optimizer, given, method=None):
    if method is not None:
        method.apply(model, optimizer)
    for _ in range(STEPS):
        one_step(model, optimizer, given)
    return model.state_dict()


def assert_same(found, expected):
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("decay", [0.0, DECAY])
@pytest.mark.parametrize("fused", [False, True])
def test_with_adamw_it_is_a_group_of_its_own(decay, fused):
    model, other, given = ready("llama"), ready("llama"), batch("llama")
    found = trained(
        model, torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=OWN, fused=fused), given, QKDecay(decay)
    )
    named = dict(other.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if is_qk(name)], "weight_decay": decay},
        {"params": [p for name, p in named.items() if not is_qk(name)]},
    ]
    assert_same(found, trained(other, torch.optim.AdamW(groups, lr=RATE, weight_decay=OWN), given))


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox", "bloom"])
def test_in_fused_layouts_it_is_for_the_query_and_key_rows(family):
    """Adam's update is the same with any decoupled decay: so rows go by one run or the other."""
    runs = {}
    given = batch(family)
    for name, (own, method) in {"found": (OWN, QKDecay(DECAY)), "own": (OWN, None), "ours": (DECAY, None)}.items():
        model = ready(family)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=own)
        if method is not None:
            method.apply(model, optimizer)
        one_step(model, optimizer, given)  # one: afterwards the gradients differ
        runs[name] = model
    for found, own, ours in zip(*(attentions(runs[name]) for name in ("found", "own", "ours")), strict=True):
        expected = own.query.tensor.detach().clone()
        for part in ("query", "key"):
            view = getattr(found, part).view
            view(expected).copy_(view(getattr(ours, part).tensor))
        torch.testing.assert_close(found.query.tensor.detach(), expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(found.query.bias_tensor, own.query.bias_tensor)  # biases are the optimizer's


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("maximize", [False, True])
def test_an_optimizer_that_adds_its_decay_to_the_gradient_adds_none_to_these(kind, maximize):
    model, other, given = ready("llama"), ready("llama"), batch("llama")
    settings = {"lr": RATE / 100, "maximize": maximize}
    found = trained(model, kind(model.parameters(), weight_decay=OWN, **settings), given, QKDecay(DECAY))
    named = dict(other.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if is_qk(name)], "weight_decay": 0.0},
        {"params": [p for name, p in named.items() if not is_qk(name)]},
    ]
    optimizer = kind(groups, weight_decay=OWN, **settings)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(other, given).backward()
        with torch.no_grad():
            for p in groups[0]["params"]:
                p.mul_(1 - settings["lr"] * DECAY)
        optimizer.step()
    assert_same(found, other.state_dict())


def test_it_follows_the_learning_rate():
    model = ready("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    QKDecay(0.1).apply(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    for name, value in model.state_dict().items():
        factor = (1 - 0.05) * (1 - 0.025) if is_qk(name) else 1.0
        torch.testing.assert_close(value, factor * before[name], rtol=1e-12, atol=0)


def test_weights_without_a_gradient_and_frozen_ones_stay():
    model = ready("llama")
    frozen = model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    QKDecay(0.1).apply(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    frozen.grad = torch.zeros_like(frozen)
    optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_closure_decays_once_a_step():
    model, given = ready("llama"), batch("llama")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.0, max_iter=3)
    QKDecay(0.1).apply(model, optimizer)
    optimizer.param_groups[0]["lr"] = 1e-12  # no step to speak of, and a decay to see if it were taken thrice
    before = copy.deepcopy(model.state_dict())
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(model, given)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(calls) > 1
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("overflow", [False, True])
def test_a_step_that_a_grad_scaler_skips_inside_a_fused_optimizer_decays_nothing(overflow):
    model = ready("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    QKDecay(0.1).apply(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(overflow))
    optimizer.step()
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if is_qk(name))
    assert same == overflow


class Unknown(torch.optim.Optimizer):
    def __init__(self, params, weight_decay):
        super().__init__(params, {"lr": 0.1, "weight_decay": weight_decay})

    def step(self, closure=None):
        del closure


def test_an_optimizer_whose_decay_is_not_known_is_refused_unless_it_has_none():
    model = ready("llama")
    with pytest.raises(LocaterError, match="how Unknown applies its weight_decay is not known; set it to 0"):
        QKDecay(0.1).apply(model, Unknown(model.parameters(), 0.1))
    QKDecay(0.1).apply(model, Unknown(model.parameters(), 0.0))


def test_torchs_own_module():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2)
    before = model.in_proj_weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    QKDecay(0.1).apply(model, optimizer)
    model.in_proj_weight.grad = torch.zeros_like(model.in_proj_weight)
    optimizer.step()
    torch.testing.assert_close(model.in_proj_weight[:16], 0.95 * before[:16])
    assert torch.equal(model.in_proj_weight[16:], before[16:])


def test_a_decay_beyond_everything_leaves_nothing_and_turns_no_sign():
    model, given = ready("llama"), batch("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = {name: value.clone() for name, value in model.named_parameters() if is_qk(name)}
    QKDecay(5.0).apply(model, optimizer)
    loss_of(model, given).backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if is_qk(name)}
    optimizer.step()
    assert before
    for name, value in model.named_parameters():
        if is_qk(name):
            torch.testing.assert_close(value.detach(), -0.5 * gradients[name])


def test_an_optimizer_that_decays_everything_away_by_itself_is_named():
    model, given = ready("llama"), batch("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=2.0)
    QKDecay(0.1).apply(model, optimizer)
    loss_of(model, given).backward()
    with pytest.raises(LocaterError, match=r"learning rate of 0\.5 with a weight_decay of 2 leaves nothing"):
        optimizer.step()


class Adafactor(Unknown):
    """Of another library, with the name of one of torch's."""


def test_an_optimizer_is_known_by_its_class_and_not_by_its_name():
    model = ready("llama")
    others = [Transformers(model.parameters(), lr=0.1, relative_step=False, weight_decay=0.1)]
    for other in (*others, Adafactor(model.parameters(), 0.1)):
        with pytest.raises(LocaterError, match="how Adafactor applies its weight_decay is not known; set it to 0"):
            QKDecay(0.0).apply(model, other)
    for kind in (type("Mine", (torch.optim.AdamW,), {}), torch.optim.Adafactor):
        QKDecay(0.0).apply(model, kind(model.parameters(), lr=0.1, weight_decay=0.1)).remove()


def test_transformers_adafactor_as_its_trainer_makes_it_is_given_the_decay_that_it_has_not():
    runs = []
    for decay in (DECAY, 0.0):
        model, given = ready("llama"), batch("llama")
        optimizer = Transformers(model.parameters(), lr=RATE, scale_parameter=False, relative_step=False)
        before = copy.deepcopy(model.state_dict())
        QKDecay(decay).apply(model, optimizer)
        one_step(model, optimizer, given)
        runs.append(model.state_dict())
    for name, value in runs[0].items():
        expected = -RATE * DECAY * before[name] if is_qk(name) else torch.zeros_like(value)
        torch.testing.assert_close(value - runs[1][name], expected, rtol=1e-9, atol=1e-12)


def test_an_optimizer_that_makes_its_own_learning_rate_is_refused():
    model = ready("llama")
    with pytest.raises(LocaterError, match=r"this Adafactor has no learning rate .* lr is None"):
        QKDecay(0.1).apply(model, Transformers(model.parameters()))
    QKDecay(0.1).apply(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)))
