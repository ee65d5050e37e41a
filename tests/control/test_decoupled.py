"""LocAteR beside the optimizer, on real models."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from rotations import all_rotations, largest_product
from torch import nn
from zoo import FAMILIES, build

from locater import QK, LocaterError
from locater.control import DecoupledLocAteR, penalty_gradient
from locater.control.rules.decoupled import decoupled_step
from locater.models import attentions

MODELS = {
    **{name: lambda name=name: build(name) for name in FAMILIES},
    "multihead": lambda: nn.MultiheadAttention(12, 3),
}


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def grow(model, factor):
    """All queries, and so the square root of every scale."""
    for attention in attentions(model):
        attention.query.weight.mul_(factor)


@pytest.mark.parametrize("family", MODELS)
def test_a_small_step_is_the_gradient_of_the_penalty_for_every_family(family):
    """In float64, against autograd through d_model × d_model matrices."""
    torch.manual_seed(0)
    model = MODELS[family]().double()
    reg = DecoupledLocAteR(model, strength=1.0, target=1.5, growing_only=False)
    total = 0.0
    for attention in reg.attentions:
        qk, rope = attention.qk(), attention.rope
        scale = qk.dense().square().sum()
        if rope is not None:
            turned = qk.w_q.mT @ all_rotations(rope, qk.w_k)  # (N, …)
            scale = (scale + turned.square().sum() / len(turned)) / 2
        total = total + scale + (qk.dense().diagonal(dim1=-2, dim2=-1).sum(-1) - 1.5).square().sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(total, parameters, allow_unused=True)
    before, rate = [p.detach().clone() for p in parameters], 1e-8
    reg.step_(rate)
    for old, new, gradient in zip(before, parameters, expected, strict=True):
        moved = (old - new.detach()) / rate
        # damping, and what 1e-8 leaves of float64's digits
        torch.testing.assert_close(
            moved, torch.zeros_like(moved) if gradient is None else gradient, rtol=1e-4, atol=1e-5
        )


def test_shared_keys_collect_what_their_query_heads_ask():
    torch.manual_seed(0)
    w_q, w_k = torch.randn(2, 3, 4, 10).double(), torch.randn(2, 1, 4, 10).double()
    step, target = torch.full((1, 1), 1e-8).double(), torch.full((1, 1), 2.0).double()
    new_q, new_k = decoupled_step(QK(w_q, w_k), step, step, target)
    of_q, of_k = penalty_gradient(QK(w_q, w_k), step, step, target)
    torch.testing.assert_close((w_q - new_q) / 1e-8, of_q / 1e-8, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close((w_k - new_k) / 1e-8, of_k.sum(1, keepdim=True) / 1e-8, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rate", [1e-3, 1.0, 1e6])
def test_no_rate_however_large_raises_the_scale_of_shared_keys(rate):
    torch.manual_seed(0)
    qk = QK(torch.randn(2, 3, 4, 10).double(), torch.randn(2, 1, 4, 10).double())
    step, nothing = torch.full((1, 1), rate).double(), torch.zeros(1, 1).double()
    after = QK(*decoupled_step(qk, step, nothing, nothing))
    assert (after.scale().sum(1) <= qk.scale().sum(1)).all()


def test_where_nothing_grows_only_the_trace_is_held():
    torch.manual_seed(0)
    model = build("gpt2")
    reg = DecoupledLocAteR(model)
    still = DecoupledLocAteR(model, target=None)
    trace = {a.module: a.qk().trace() for a in attentions(model)}
    reg.step_(3e-4)
    for attention in attentions(model):
        goal = 2 / attention.scale
        assert ((attention.qk().trace() - goal).abs() < (trace[attention.module] - goal).abs()).all()
        assert goal == pytest.approx(2 * math.sqrt(attention.qk().w_q.shape[-2]))
    assert still.measure()["transformer.h.0.attn/growth"] == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("growing_only", [True, False])
def test_under_rotary_positions_the_trace_is_left_alone_unless_a_target_is_given(growing_only):
    """It is that of distance 0 alone. Where nothing grows, nothing moves."""
    torch.manual_seed(0)
    for target in (None, 3.0):
        model = build("llama")
        before = [attention.qk() for attention in attentions(model)]
        before = [QK(qk.w_q.detach().clone(), qk.w_k.detach().clone()) for qk in before]
        DecoupledLocAteR(model, target=target, growing_only=growing_only).step_(1e-3)
        for attention, old in zip(attentions(model), before, strict=True):
            new = attention.qk()
            if target is not None:
                assert ((new.trace() - 3).abs() < (old.trace() - 3).abs()).all()
            elif growing_only:
                # its scale is the first one, to the rounding of two ways to compute it
                torch.testing.assert_close(new.dense(), old.dense(), rtol=1e-6, atol=1e-7)
            else:
                assert (new.scale() < old.scale()).all()


def test_what_has_grown_is_shrunk_back():
    torch.manual_seed(0)
    model = build("gpt2")
    reg = DecoupledLocAteR(model)
    grow(model, 10)
    grown = [attention.qk().scale() for attention in reg.attentions]
    for _ in range(50):
        reg.step_(1e-2)
    for attention, before in zip(reg.attentions, grown, strict=True):
        assert (attention.qk().scale() < 0.7 * before).all()


def compared(attention, tokens=20_000):
    """E[(q · k)²] of independent tokens that have passed the norm, k about its mean where nothing turns it; where
    something does, the largest that turns can make it: (G, R)."""
    random = torch.Generator().manual_seed(0)
    norm = attention.input_norm
    x = norm(torch.randn(1, tokens, attention.qk().d_model, generator=random))
    nowhere = torch.zeros(tokens)
    q, k = (part[0] for part in attention.project(x, x, (nowhere, nowhere)))
    k = k - k.mean(-2, keepdim=True) if attention.rope is None else k
    gram_q, gram_k = q.mT @ q / tokens, k.mT @ k / tokens
    return (
        (gram_q * gram_k).sum((-2, -1)) if attention.rope is None else largest_product(attention.rope, gram_q, gram_k)
    )


@pytest.mark.parametrize(
    ("family", "what"),
    [
        (family, what)
        for family, lacks in {
            "gpt2": "",
            "llama": "bias shift",
            "gemma2": "bias shift",
            "gpt-neox": "",
            "qwen2": "shift",
        }.items()
        for what in ("queries", "gain", "bias", "shift")
        if what not in lacks.split()
    ],
)
@torch.no_grad()
def test_nothing_that_grows_carries_what_a_head_compares_beyond_three_times_its_first(family, what):
    torch.manual_seed(0)
    model = build(family)
    reg = DecoupledLocAteR(model)
    first = [compared(attention) for attention in reg.attentions]
    for attention in reg.attentions:
        norm = attention.input_norm
        grown = {
            "queries": attention.query.weight, "gain": norm.stored, "bias": attention.query.bias, "shift": norm.bias,
        }[what]  # fmt: skip
        grown.add_(10.0) if what in ("bias", "shift") else grown.mul_(100.0).add_(20.0 * (what == "gain"))
    reg.step_(1e-6)
    for attention, before in zip(reg.attentions, first, strict=True):
        most = 3 * before.clamp(min=1 / (8 * attention.scale**2))
        torch.testing.assert_close(compared(attention), most, rtol=0.05, atol=0.0)


@pytest.mark.parametrize("how", ["frozen", "nobody's", "rate 0"])
@pytest.mark.parametrize("family", ["qwen2", "gpt-neox", "gpt2"])
def test_a_bias_that_is_not_trained_stays_and_does_not_shrink_its_weight(family, how):
    torch.manual_seed(0)
    model = build(family)
    known = attentions(model)
    biases = {id(b): b for a in known for b in (a.query.bias_tensor, a.key.bias_tensor)}.values()
    rest = [p for p in model.parameters() if all(p is not bias for bias in biases)]
    groups = [{"params": rest}, {"params": list(biases), "lr": 0.0 if how == "rate 0" else 1e-4}]
    for bias in biases:
        bias.requires_grad_(how != "frozen")
    optimizer = torch.optim.SGD(groups[: 1 if how == "nobody's" else 2], lr=1e-4)
    DecoupledLocAteR(model).attach(optimizer)
    norms = [attention.query.weight.detach().norm() for attention in known]
    for bias in biases:
        nn.init.normal_(bias, std=5.0)
    before = [bias.detach().clone() for bias in biases]
    for _ in range(20):
        optimizer.step()
    for bias, old in zip(biases, before, strict=True):
        assert torch.equal(bias, old)
    for attention, norm in zip(known, norms, strict=True):
        assert attention.query.weight.norm() > 0.9 * norm


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_queries_that_begin_at_zero_are_given_the_trace_and_stay_finite(family):
    torch.manual_seed(0)
    model = build(family)
    with torch.no_grad():
        for attention in attentions(model):
            attention.query.weight.zero_()
    reg = DecoupledLocAteR(model, target=2 / attentions(model)[0].scale)  # with rotary positions there is no other
    for _ in range(20):
        reg.step_(1e-2)
    for attention in reg.attentions:
        qk = attention.qk()
        assert qk.w_q.isfinite().all()
        assert qk.w_k.isfinite().all()
        assert (qk.trace() > 0.5 / attention.scale).all()


def split(model, **key_options):
    """An optimizer with the keys in a group of their own."""
    keys = [attention.key.tensor for attention in attentions(model)]
    rest = [p for p in model.parameters() if all(p is not key for key in keys)]
    return torch.optim.SGD([{"params": rest}, {"params": keys, **key_options}], lr=0.1)


def stepped(model, optimizer):
    """The regulariser after one step without gradients, with a target, for heads that turn have none of their own."""
    reg = DecoupledLocAteR(model, target=3.0).attach(optimizer)
    optimizer.step()
    return reg


def test_queries_and_keys_in_two_groups_or_two_optimizers_move_as_in_one():
    torch.manual_seed(0)
    models = [build("llama")]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    stepped(models[0], torch.optim.SGD(models[0].parameters(), lr=0.1))
    stepped(models[1], split(models[1]))
    assert any((a != b).any() for a, b in zip(weights(models[0]).values(), weights(models[2]).values(), strict=True))
    for a, b in zip(weights(models[0]).values(), weights(models[1]).values(), strict=True):
        torch.testing.assert_close(a, b)
    keys = [attention.key.tensor for attention in attentions(models[2])]
    queries = [attention.query.tensor for attention in attentions(models[2])]
    two = [torch.optim.SGD(parameters, lr=0.1) for parameters in (queries, keys)]
    reg = DecoupledLocAteR(models[2])
    for optimizer in two:
        reg.attach(optimizer)
    for optimizer in 5 * two:
        optimizer.step()
    assert reg.step == 5


@pytest.mark.parametrize("how", ["rate 0", "nobody's"])
def test_keys_that_no_optimizer_moves_stay_as_they_are(how):
    torch.manual_seed(0)
    model = build("llama")
    keys = [attention.key.weight.detach().clone() for attention in attentions(model)]
    queries = [attention.query.tensor for attention in attentions(model)]
    before = [query.detach().clone() for query in queries]
    stepped(model, split(model, lr=0.0) if how == "rate 0" else torch.optim.SGD(queries, lr=0.1))
    for attention, q, k in zip(attentions(model), before, keys, strict=True):
        assert torch.equal(attention.key.weight, k)
        assert not torch.equal(attention.query.tensor, q)


@pytest.mark.parametrize("family", ["gptj", "llama"])
@pytest.mark.parametrize("frozen", ["query", "key"])
def test_the_limit_holds_where_one_factor_is_frozen(family, frozen):
    torch.manual_seed(0)
    model = build(family)
    for attention in attentions(model):
        getattr(attention, frozen).tensor.requires_grad_(False)
    reg = DecoupledLocAteR(model)
    first = [attention.qk().scale() for attention in reg.attentions]
    with torch.no_grad():
        for attention in reg.attentions:
            (attention.key if frozen == "query" else attention.query).weight.mul_(100)
    reg.step_(1e-6)
    for attention, before in zip(reg.attentions, first, strict=True):
        most = 3 * before.clamp(min=1 / (8 * attention.scale**2))
        assert (attention.qk().scale() <= most * (1 + 1e-3)).all()


def test_a_schedule_at_zero_lets_go_of_everything():
    torch.manual_seed(0)
    model = build("gpt2")
    reg = DecoupledLocAteR(model, schedule=lambda _: 0.0)
    grow(model, 100)
    before = weights(model)
    reg.step_(0.1)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), weights(model).values(), strict=True))
    with pytest.raises(LocaterError, match="the schedule gives nan at step 0"):
        DecoupledLocAteR(model, schedule=lambda _: math.nan).step_(0.1)
    with pytest.raises(LocaterError, match="schedule must be a function"):
        DecoupledLocAteR(model, schedule=5)


def test_a_loaded_state_moves_the_schedule_of_an_optimizer_that_is_attached():
    model = build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = DecoupledLocAteR(model).attach(optimizer)
    reg.load_state_dict({**reg.state_dict(), "step": 500})
    optimizer.step()
    assert reg.step == 501


def test_attached_it_steps_after_the_optimizer_at_its_rate_and_only_there():
    torch.manual_seed(0)
    model = build("gpt2")
    other = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    reg = DecoupledLocAteR(model).attach(optimizers[0])
    by_hand = DecoupledLocAteR(other)
    for m, optimizer in zip((model, other), optimizers, strict=True):
        m(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
        optimizer.step()
    by_hand.step_(0.1)
    for a, b in zip(weights(model).values(), weights(other).values(), strict=True):
        assert torch.equal(a, b)
    assert reg.step == 1
    reg.detach()
    before = weights(model)
    model.zero_grad()
    optimizers[0].step()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), weights(model).values(), strict=True))


def test_a_step_that_the_scaler_skips_moves_nothing():
    torch.manual_seed(0)
    model = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    DecoupledLocAteR(model).attach(optimizer)
    grow(model, 10)  # beyond the limit
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros((), requires_grad=True))
    before = weights(model)
    scaler.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), weights(model).values(), strict=True))


def test_frozen_queries_stay_and_their_keys_move():
    torch.manual_seed(0)
    model = build("llama")
    for attention in attentions(model):
        attention.query.tensor.requires_grad_(False)
    queries = [attention.query.weight.clone() for attention in attentions(model)]
    keys = [attention.key.weight.detach().clone() for attention in attentions(model)]
    DecoupledLocAteR(model, target=3.0).step_(1e-2)
    for attention, q, k in zip(attentions(model), queries, keys, strict=True):
        assert torch.equal(attention.query.weight, q)
        assert not torch.equal(attention.key.weight, k)


def test_a_resumed_run_remembers_the_initial_scales():
    torch.manual_seed(0)
    model = build("gpt2")
    reg = DecoupledLocAteR(model)
    grow(model, 3)
    resumed = DecoupledLocAteR(model)
    assert resumed.measure() != reg.measure()
    resumed.load_state_dict(reg.state_dict())
    assert resumed.measure() == pytest.approx(reg.measure())
    for wrong, words in (
        (DecoupledLocAteR(build("llama")).state_dict(), "its modules are others"),
        ({**reg.state_dict(), "initial": 3}, "its modules are others"),
        ({**reg.state_dict(), "initial": dict.fromkeys(reg.state_dict()["initial"], "a")}, "no numbers"),
        ({**reg.state_dict(), "initial": {name: [1.0] for name in reg.state_dict()["initial"]}}, "has other heads"),
        ({**reg.state_dict(), "version": 1}, "another version of locater"),
        ({key: value for key, value in reg.state_dict().items() if key != "version"}, "another version of locater"),
        ({"step": 3}, "it lacks initial, strength, target, version"),
        (None, "it lacks everything"),
    ):
        with pytest.raises(LocaterError, match=words):
            resumed.load_state_dict(wrong)
    before = {
        {"initial": "first", "version": "rule"}.get(name, name): value for name, value in reg.state_dict().items()
    }
    resumed.load_state_dict(before)  # as earlier versions named them


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"strength": -1}, "strength must be a finite number that is not negative, got -1"),
        ({"strength": "high"}, "strength must be a finite number"),
        ({"target": math.inf}, "target must be a finite number, got inf"),
        ({"target": True}, "target must be a finite number, got True"),
        ({"growing_only": "no"}, "growing_only must be true or false, got 'no'"),
    ],
)
def test_what_makes_no_sense_is_refused(more, words):
    with pytest.raises(LocaterError, match=words):
        DecoupledLocAteR(build("gpt2"), **more)


def test_an_optimizer_of_other_weights_is_refused():
    with pytest.raises(LocaterError, match="holds none of the query and key weights"):
        DecoupledLocAteR(build("gpt2")).attach(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.scale = 2, 0.5
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q, k = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q_proj, self.k_proj))
        return (self.scale * q @ k.mT).softmax(-1)


def test_no_two_modules_that_share_a_parameter_are_worked_on_at_once():
    """Sharing forms a chain: 0 and 1 have one W_K, 1 and 2 one W_Q."""
    model = nn.ModuleList(Projections() for _ in range(4))
    model[1].k_proj, model[2].q_proj = model[0].k_proj, model[1].q_proj
    groups = DecoupledLocAteR(model)._groups(lambda _: 0, None)
    members = sorted(sorted(one.module for one in group.members) for group in groups)
    assert members == [["0", "3"], ["1"], ["2"]]


def test_on_every_nth_step_it_acts_by_a_step_n_times_as_large():
    torch.manual_seed(0)
    model = build("gpt2")
    once = copy.deepcopy(model)
    DecoupledLocAteR(once).step_(3 * 1e-2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)  # without gradients it does nothing
    DecoupledLocAteR(model, every=3).attach(optimizer)
    before = weights(model)
    for step in range(1, 4):
        optimizer.step()
        wanted = before if step < 3 else weights(once)
        assert all(torch.equal(value, wanted[name]) for name, value in weights(model).items())


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_every_is_a_positive_whole_number(every):
    with pytest.raises(LocaterError, match="every must be a positive whole number"):
        DecoupledLocAteR(build("gpt2"), every=every)


def muon_and_adamw(model):
    """As people train: matrices by Muon, what is left by AdamW."""
    inside = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for p in model.parameters() if all(p is not one for one in inside)]
    return torch.optim.Muon(inside, lr=2e-2), torch.optim.AdamW(rest, lr=1e-3)


def test_optimizers_that_train_a_model_together_are_attached_to_in_one_call():
    torch.manual_seed(0)
    model = build("llama")
    muon, adamw = muon_and_adamw(model)
    reg = DecoupledLocAteR(model).attach([muon, adamw])
    twin = copy.deepcopy(model)
    alone = DecoupledLocAteR(twin)
    alone.load_state_dict(reg.state_dict())
    for one in (model, twin):
        grow(one, 3)
    alone.step_(2e-2)
    for optimizer in (muon, adamw):
        optimizer.step()
    after = weights(twin)
    assert all(torch.equal(value, after[name]) for name, value in weights(model).items())
    assert reg.step == 1
    reg.detach()
    muon.step()
    assert all(torch.equal(value, after[name]) for name, value in weights(model).items())


def test_optimizers_that_share_or_miss_weights_are_refused():
    model = build("llama")
    muon, adamw = muon_and_adamw(model)
    before = weights(model)
    for optimizers, words in (
        ([adamw], r"q_proj\.weight is held by none of the optimizers"),
        ([muon, torch.optim.SGD(model.parameters(), lr=1.0)], r"q_proj\.weight is held by 2 of the optimizers"),
        ([], "held by none"),
        ([muon, None], "expected a torch optimizer, got NoneType"),
    ):
        with pytest.raises(LocaterError, match=words):
            DecoupledLocAteR(model).attach(optimizers)
    muon.step()
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
