"""Modules that are worked on together, one by one and recorded; what of their weights is written, and what is kept."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from moving import Projections, moved, run, same, sampled_logits, spread_of, weights
from torch import nn
from zoo import build

from interpreter import on_gpu
from locater.control import DecoupledLocAteR, _bounded, decoupled
from locater.control._sampled import Sample
from locater.control.rules.decoupled import sampled_positions
from locater.models import attentions
from replaying import put_in_place_of_cuda


def test_what_is_taken_back_is_a_part_of_the_update_of_each_head():
    torch.manual_seed(0)
    model = build("gpt2")
    run(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    DecoupledLocAteR(model, change=1e-3, spread=1e6).attach(optimizer)
    run(model)
    moved(model, 0.05)
    before = weights(model)
    optimizer.step()
    for attention in attentions(model):
        for one in (attention.query, attention.key):
            old = one.view({id(p): before[name] for name, p in model.named_parameters()}[id(one.tensor)])
            share = (one.weight - old) / -one.view(one.tensor.grad)  # (G, R, K, D)
            own = share.flatten(2).mean(-1)
            assert (own > 0).all()
            assert (own < 1).all()
            torch.testing.assert_close(share, own[..., None, None].expand_as(share), rtol=1e-2, atol=1e-3)


def watched_modules(monkeypatch):
    """All `Modules` that are made from now on and not forgotten."""
    made = weakref.WeakSet()

    class Watched(_bounded.Modules):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            made.add(self)

    monkeypatch.setattr(decoupled, "Modules", Watched)
    return made


def test_samples_of_changing_shape_and_weights_leave_nothing_behind(monkeypatch):
    torch.manual_seed(0)
    made = watched_modules(monkeypatch)
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    DecoupledLocAteR(model).attach(optimizer)

    def step(tokens=12):
        run(model, tokens)
        optimizer.step()
        gc.collect()
        assert all(not one._old and not one._before for one in made)
        return len(made)

    assert [step(tokens) for tokens in (2, 5, 9, 17)] == [1] * 4
    query = attentions(model)[0].query.tensor.requires_grad_(False)
    assert step() == 2  # the layers are trained differently now
    query.requires_grad_(True)
    model.to(torch.float64)
    assert step() == 1


def test_plans_of_earlier_steps_are_freed_at_once(monkeypatch):
    """Not when Python next looks for cycles: they may hold copies of all query and key weights."""
    torch.manual_seed(0)
    made = watched_modules(monkeypatch)
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    reg = DecoupledLocAteR(model).attach(optimizer)
    gc.disable()
    try:
        for tokens in (2, 5, 9):
            run(model, tokens)
            optimizer.step()
            assert len(made) == 1
        reg.detach()
        assert len(made) == 0
    finally:
        gc.enable()


def test_a_weight_that_is_both_the_query_and_the_key_is_written_once():
    """Its share of an update that is kept is that of two weights that are equal."""
    kept = []
    for tied in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList([Projections()])
        if tied:
            model[0].k_proj = model[0].q_proj
        else:
            model[0].k_proj.load_state_dict(model[0].q_proj.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        DecoupledLocAteR(model, change=1e-2, spread=1e6).attach(optimizer)
        torch.manual_seed(1)
        model.train()[0](torch.randn(2, 9, 8))
        gradient = 0.1 * torch.randn(8, 8)
        for p in model.parameters():
            p.grad = gradient.clone() if p.ndim == 2 else torch.zeros_like(p)
        before = model[0].q_proj.weight.detach().clone()
        optimizer.step()
        kept.append((before - model[0].q_proj.weight.detach()) / gradient)
    torch.testing.assert_close(kept[0], kept[1], rtol=1e-3, atol=1e-5)


def test_parameters_that_take_the_place_of_others_in_an_optimizer_are_noticed():
    torch.manual_seed(0)
    model = build("llama")
    query = attentions(model)[0].query.tensor
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    DecoupledLocAteR(model, change=1e-6, spread=1e-3).attach(optimizer)
    run(model)
    optimizer.step()
    held = optimizer.param_groups[0]["params"]
    held[next(i for i, p in enumerate(held) if p is query)] = nn.Parameter(torch.zeros(1))
    moved(model, 0.1)
    before = query.detach().clone()
    optimizer.step()
    assert torch.equal(query, before)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_norm_s_gains_are_not_held_against_the_weights(monkeypatch, stacked):
    """They may be trained at any rate: what they do to logits is not what W_Q and W_K do."""
    if not stacked:
        monkeypatch.setattr(decoupled, "stackable", lambda _: False)
    torch.manual_seed(0)
    model = build("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model).attach(optimizer)
    run(model)
    moved(model, 1e-4)
    for attention in attentions(model):
        attention.query_norm.stored.grad = torch.full_like(attention.query_norm.stored, -2.0)
    expected = {name: p.detach() - p.grad for name, p in model.named_parameters()}
    optimizer.step()
    assert same(weights(model), expected)
    assert max(value for name, value in reg.measure().items() if name.endswith("/change")) < 0.1


def test_layers_that_share_their_weights_are_bounded_once():
    torch.manual_seed(0)
    model = build("llama")
    for part in ("q_proj", "k_proj"):
        setattr(model.model.layers[1].self_attn, part, getattr(model.model.layers[0].self_attn, part))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model, change=1e-3).attach(optimizer)
    run(model)
    first = attentions(model)[0]
    before = sampled_logits(reg, first)
    moved(model, 2e-3)
    optimizer.step()
    found = spread_of((sampled_logits(reg, first) - before).transpose(0, 1))
    assert 0.9e-3 < found.max() < 1.02e-3


def test_biases_go_with_their_weights():
    torch.manual_seed(0)
    model = build("qwen2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    DecoupledLocAteR(model, change=1e-4, spread=1e6).attach(optimizer)
    run(model)
    moved(model, 0.1)
    attention = attentions(model)[0]
    attention.query.bias_tensor.grad.fill_(1.0)
    before = attention.query.bias_tensor.detach().clone()
    optimizer.step()
    assert ((attention.query.bias_tensor - before).abs() < 0.5).all()
    assert ((attention.query.bias_tensor - before).abs() > 0).all()


def test_no_two_modules_that_share_a_parameter_are_worked_on_at_once():
    """Sharing forms a chain: 0 and 1 have one W_K, 1 and 2 one W_Q."""
    model = nn.ModuleList(Projections() for _ in range(4))
    model[1].k_proj, model[2].q_proj = model[0].k_proj, model[1].q_proj
    groups = DecoupledLocAteR(model)._groups(lambda _: 0, None)
    members = sorted(sorted(one.module for one in group.members) for group in groups)
    assert members == [["0", "3"], ["1"], ["2"]]


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt-neox", "qwen2"])
def test_modules_together_have_the_logits_they_have_alone(monkeypatch, family, stacked):
    torch.manual_seed(0)
    monkeypatch.setattr(_bounded, "_SMALL", 1 << 30 if stacked else 0)
    known = attentions(build(family))
    at = sampled_positions(100)
    samples = [Sample(torch.randn(2, len(at), known[0].qk().d_model), at, 100) for _ in known]
    together = _bounded.Modules(known, -torch.ones(len(known), *known[0].query.shape[:2]), lambda _: True)
    together.begin(samples)
    together.measure()
    for one, sample, found in zip(known, samples, together._logits(*together._before), strict=True):
        alone = one.logits(sample.states, positions=(at, at)).detach()  # (B, heads, n, n)
        torch.testing.assert_close(found.flatten(0, 1), alone.transpose(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3", "gemma3"])
def test_modules_together_make_the_steps_they_make_alone(monkeypatch, family):
    torch.manual_seed(0)
    models = [build(family)]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    for index, model in enumerate(models):
        monkeypatch.setattr(_bounded, "_SMALL", 1 << 30 if index else 0)
        if index == 2:
            monkeypatch.setattr(decoupled, "stackable", lambda _: False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        DecoupledLocAteR(model, change=1e-2, spread=0.3).attach(optimizer)
        model.eval()  # no dropout
        for step in range(3):
            moved(model, 0.1, seed=step)
            optimizer.step()
    for other in models[1:]:
        for a, b in zip(weights(models[0]).values(), weights(other).values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.bitwise  # dispatch modes both
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_steps_can_be_replayed(monkeypatch, family, every):
    """As a CUDA graph does, on the tensors of the step that was recorded, and without asking for a number."""

    class Recorded(_bounded.Modules):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self._on_device = self._recorded = True

    torch.manual_seed(0)
    models = [build(family)]
    models.append(copy.deepcopy(models[0]))
    put_in_place_of_cuda(monkeypatch)
    for index, model in enumerate(models):
        if index:
            monkeypatch.setattr(decoupled, "Modules", Recorded)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        reg = DecoupledLocAteR(model, change=0.02, spread=0.5, every=every).attach(optimizer)
        for step in range(9):
            torch.manual_seed(step)  # of dropout
            run(model, 12 if family == "gpt2" else 70 + 10 * (step % 3))  # of which 64 are sampled, at other positions
            moved(model, 0.05 * (1 + step % 3), seed=step)
            optimizer.step()
        graphs = [len(one._graphs) for plan in reg._plans for one, _ in plan.work]
        assert graphs == ([0] if index == 0 else [4 + (every > 1 and family == "qwen3")])
    for a, b in zip(weights(models[0]).values(), weights(models[1]).values(), strict=True):
        torch.testing.assert_close(a, b)


@on_gpu
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_recorded_steps_are_those_that_are_not(monkeypatch, family):
    """On a GPU: the same kernels, replayed; the first two steps are not recorded yet."""
    torch.manual_seed(0)
    models = [build(family).cuda()]
    models.append(copy.deepcopy(models[0]))
    for index, model in enumerate(models):
        monkeypatch.setattr(_bounded, "_SMALL", (1 << 30) * index)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        reg = DecoupledLocAteR(model, change=0.03, spread=1.0).attach(optimizer)
        for step in range(8):
            torch.manual_seed(step)
            ids = torch.randint(0, 50, (4, 16), device="cuda")
            optimizer.zero_grad()
            model.eval()(input_ids=ids, labels=ids).loss.backward()  # no dropout
            optimizer.step()
        assert reg._states.entered()
    for a, b in zip(weights(models[0]).values(), weights(models[1]).values(), strict=True):
        # products of half precision are summed in another order
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
