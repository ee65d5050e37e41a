"""What `DecoupledLocAteR` keeps from step to step and in checkpoints: the initial spread of every head."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from moving import ids_of, moved, run, same, sampled_logits, spread_of, weights
from zoo import build

from locater import LocAteR, LocaterError
from locater.control import DecoupledLocAteR
from locater.models import attentions


def test_a_state_that_is_loaded_holds_for_all_optimizers():
    torch.manual_seed(0)
    model = build("llama")
    known = attentions(model)
    two = [torch.optim.SGD([getattr(a, part).tensor for a in known], lr=1.0) for part in ("query", "key")]
    reg = DecoupledLocAteR(model, change=1e6, spread=1e-3).attach(two)
    run(model)
    moved(model, 0.0)
    for optimizer in two:
        optimizer.step()
    state = reg.state_dict()
    wide = {name: [[100.0 for _ in row] for row in value] for name, value in state["initial"].items()}
    reg.load_state_dict({**state, "initial": wide})
    moved(model, 1.0)
    for optimizer, part in zip(two, ("query", "key"), strict=True):
        weight = getattr(known[0], part).tensor
        expected = weight.detach() - weight.grad
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected)  # far below 100


def test_a_checkpoints_spread_is_that_of_the_first_sample_with_one():
    """Not of a single token, and though a schedule begins at 0."""
    torch.manual_seed(0)
    model = build("gpt2")
    with torch.no_grad():
        for attention in attentions(model):
            attention.query.weight.mul_(300.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model, change=1e6, schedule=lambda step: float(step > 2)).attach(optimizer)
    for tokens in (1, 12, 12, 12, 12):
        run(model, tokens)
        moved(model, 0.0)
        before = weights(model)
        optimizer.step()
        for name, value in weights(model).items():  # a step of zeros rounds, at most
            torch.testing.assert_close(value, before[name], rtol=1e-6, atol=1e-7)
    assert min(x for one in reg.state_dict()["initial"].values() for row in one for x in row) > 5


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_checkpoint_s_sharp_heads_stay_when_no_states_were_seen_before_the_first_step(family):
    """Attached between forward and step: what entered attention is not known yet, and made up tokens say nothing of
    how sharp its heads are."""
    torch.manual_seed(0)
    model = build(family)
    with torch.no_grad():
        for attention in attentions(model):
            attention.query.tensor.mul_(40)
    run(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model).attach(optimizer)
    before = weights(model)
    for _ in range(3):
        moved(model, 0.0)
        optimizer.step()
        assert same(weights(model), before)
        run(model)
    assert max(value for name, value in reg.measure().items() if name.endswith("/spread")) > 2 * reg.spread


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_warm_up_from_a_rate_of_zero_hides_no_head_s_initial_spread(every, parts):
    """Nor does another optimizer that has the other layers."""
    torch.manual_seed(0)
    model = build("llama")
    run(model)
    layers = model.model.layers
    held = [list(layers.parameters())] if parts == 1 else [list(layer.parameters()) for layer in layers]
    optimizers = [torch.optim.SGD(own, lr=0.0) for own in held]
    reg = DecoupledLocAteR(model, change=1e6, spread=1e6, every=every).attach(optimizers)
    run(model)
    moments = {a.module: spread_of(sampled_logits(reg, a).transpose(0, 1)) for a in attentions(model)}
    for rate in (0.0, 1.0, 1.0):
        moved(model, 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    for name, initial in reg.state_dict()["initial"].items():
        torch.testing.assert_close(torch.tensor(initial).flatten(), moments[name].float(), rtol=1e-4, atol=1e-5)
    assert reg.state_dict()["initial"].keys() == moments.keys()


@pytest.mark.parametrize("real", [1, 2, 12])
def test_a_first_batch_of_few_tokens_makes_no_head_s_limit(real):
    torch.manual_seed(0)
    model = build("llama")
    with torch.no_grad():
        for attention in attentions(model):
            attention.query.tensor.mul_(40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    DecoupledLocAteR(model).attach(optimizer)
    before, ids = weights(model), ids_of(model)
    for count in (real, 12, 12):
        mask = (torch.arange(12) < count).long().expand(4, 12)
        model.train()(input_ids=ids, attention_mask=mask)
        moved(model, 0.0)
        optimizer.step()
        assert same(weights(model), before)


def test_heads_are_looked_at_when_their_states_are_first_seen_whether_or_not_a_step_is_acted_on():
    """Their initial spread is that of the beginning."""
    torch.manual_seed(0)
    model = build("llama")
    run(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model, every=4).attach(optimizer)
    for step in range(3):
        if step:
            run(model)
        moved(model, 0.5 if step == 2 else 0.0, seed=step)
        if step == 1:
            expected = {a.module: spread_of(sampled_logits(reg, a).transpose(0, 1)) for a in attentions(model)}
        optimizer.step()
    for name, value in reg.state_dict()["initial"].items():
        torch.testing.assert_close(torch.tensor(value).flatten(), expected[name].float(), rtol=1e-4, atol=1e-5)


def test_a_state_of_a_model_that_is_partly_trained_goes_on():
    torch.manual_seed(0)
    model = build("llama")
    for p in model.model.layers[0].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    reg = DecoupledLocAteR(model).attach(optimizer)
    run(model)
    optimizer.step()
    state = reg.state_dict()
    assert state["initial"].keys() == {"model.layers.1.self_attn"}
    other = DecoupledLocAteR(model)
    other.load_state_dict(state)
    assert other.state_dict() == state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_goes_on_where_it_was(dtype):
    torch.manual_seed(0)
    model = build("gpt2").to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    reg = DecoupledLocAteR(model, change=0.2).attach(optimizer)
    run(model)
    optimizer.step()
    state = reg.state_dict()
    assert state["initial"].keys() == {"transformer.h.0.attn", "transformer.h.1.attn"}
    other = DecoupledLocAteR(copy.deepcopy(model))
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert other.step == 1
    assert other.change == 0.2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "another version of locater"),
        ({"initial": {"elsewhere": [[1.0]]}}, "its modules are others"),
        ({"initial": {"transformer.h.0.attn": [[1.0]], "transformer.h.1.attn": [[1.0]]}}, "has other heads"),
        ({"initial": {"transformer.h.0.attn": "much", "transformer.h.1.attn": 1}}, "are no numbers"),
        ({"initial": {"transformer.h.0.attn": [[math.nan]]}}, "are no numbers"),
        ({"initial": {"transformer.h.0.attn": [[math.inf]]}}, "not finite"),
        ({"initial": {"transformer.h.0.attn": [[-2.0]]}}, "or negative"),
        ({"step": "x"}, "its step is 'x'"),
        ({"step": -3}, "its step is -3"),
        ({"step": None}, "its step is None"),
        ({"initial": 5}, "its modules are others"),
        ({"spread": None}, "spread must be a positive, finite number"),
    ],
)
def test_another_state_is_refused_and_nothing_changed(change, words):
    model = build("gpt2")
    reg = DecoupledLocAteR(model)
    before = reg.state_dict()
    with pytest.raises(LocaterError, match=words):
        reg.load_state_dict({**before, **change})
    assert reg.state_dict() == before


@pytest.mark.parametrize(
    "state",
    [
        {"step": 3, "strength": 3.0, "target": None, "initial": {}, "version": 2},
        {"step": 3, "strength": 3.0, "target": None, "first": {}, "rule": 2},
        {"step": 3, "strength": 3.0, "target": None, "initial": {}},
    ],
)
def test_a_state_of_an_earlier_version_is_refused_with_what_to_do(state):
    with pytest.raises(LocaterError, match=r"another version of locater.*go on without it"):
        DecoupledLocAteR(build("gpt2")).load_state_dict(state)


def test_a_state_of_the_penalty_is_told_from_one_of_an_earlier_version():
    model = build("gpt2")
    with pytest.raises(LocaterError, match=r"not a state of DecoupledLocAteR.*of LocAteR, the penalty"):
        DecoupledLocAteR(model).load_state_dict(LocAteR(model, scale_strength=1.0, mean_strength=1.0).state_dict())


@pytest.mark.parametrize("state", [None, 5, {}, {"step": 3, "change": 0.1, "version": 3}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(LocaterError, match="not a state of DecoupledLocAteR"):
        DecoupledLocAteR(build("gpt2")).load_state_dict(state)
