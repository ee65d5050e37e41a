"""LocAteR beside the optimizer, on real models: what a step may do to logits, and what is left alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from moving import ids_of, moved, run, same, sampled_logits, spread_of, weights
from zoo import FAMILIES, build, inputs, recorded_logits

from locater import LocaterError
from locater.control import DecoupledLocAteR, QKClip, QKNorm, decoupled
from locater.models import attentions

PLAIN = [name for name in FAMILIES if name not in ("t5",)]


# ---------------------------------------------------------------------- the bounds


@pytest.mark.parametrize("size", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt-neox", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("together", [True, False])
def test_no_step_moves_a_heads_logits_by_more_than_the_bound(monkeypatch, family, size, together):
    """Though logits follow the weights to first order alone, and with QK-norm saturate."""
    if not together:
        monkeypatch.setattr(decoupled, "stackable", lambda _: False)
    torch.manual_seed(0)
    model = build(family).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model, change=0.1, spread=1e6).attach(optimizer)
    run(model)
    before = {a.module: sampled_logits(reg, a) for a in attentions(model)}
    moved(model, size)
    optimizer.step()
    changes = [spread_of((sampled_logits(reg, a) - before[a.module]).transpose(0, 1)) for a in attentions(model)]
    found = torch.cat(changes)
    normalised = family in ("qwen3", "gemma3")
    # a norm is looked through three times, which is too few for a step a hundred times the weights
    assert (found < (0.15 if normalised and size > 1 else 0.101)).all()
    if size == 0.1:
        assert found.max() > 0.095  # and no less
    whole = [value for name, value in reg.measure().items() if name.endswith("/change")]
    assert max(whole) > 0.5  # before it was bounded


def test_an_update_that_moves_late_tokens_alone_is_bounded():
    """Words that come late have embeddings in coordinates which early ones have not, and only those of the weights are
    moved."""
    torch.manual_seed(0)
    model = build("llama").double()
    embeddings, vocabulary = model.get_input_embeddings().weight, model.config.vocab_size
    with torch.no_grad():
        embeddings[: vocabulary // 2, :8] = 0
        embeddings[vocabulary // 2 :, 8:] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    DecoupledLocAteR(model, change=1e-3, spread=1e6).attach(optimizer)
    ids = torch.randint(vocabulary // 2, (2, 192))
    ids[:, 64:] += vocabulary // 2
    with recorded_logits(model) as recorded:
        model.train()(input_ids=ids)
    moved(model, 0.1)
    first = attentions(model)[0]
    for one in (first.query, first.key):
        one.view(one.tensor.grad)[..., 8:] = 0
    states = recorded[first.module][0].detach()
    before = first.logits(states).detach()
    optimizer.step()
    change = (first.logits(states).detach() - before).transpose(0, 1)
    assert (change[..., :64, :64] == 0).all()
    found = spread_of(change)  # of all 192 tokens; 64 of them were sampled
    assert (found < 1.2e-3).all()
    assert (found > 0.8e-3).any()


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_no_spread_of_logits_is_beyond_the_bound(family):
    """One that starts beyond it may grow by √2, however large a step is."""
    torch.manual_seed(0)
    model = build(family)
    with torch.no_grad():
        for attention in attentions(model):
            attention.query.weight.mul_(3.0)
    for spread in (1e-3, 1e6):
        one = copy.deepcopy(model)
        optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
        reg = DecoupledLocAteR(one, change=1e6, spread=spread).attach(optimizer)
        run(one)
        states = {a.module: reg._states.of(a).states for a in attentions(one)}
        first = {a.module: spread_of(a.logits(states[a.module]).detach().transpose(0, 1)) for a in attentions(one)}
        moved(one, 1.0)
        optimizer.step()
        for attention in attentions(one):
            found = spread_of(attention.logits(states[attention.module]).detach().transpose(0, 1))
            most = 2**0.5 * first[attention.module]
            if spread < 1:
                torch.testing.assert_close(found, torch.minimum(found, most), rtol=1e-3, atol=0.0)
                assert (found > 0.99 * most).any()
            else:
                assert (found > 2 * most).any()
        assert reg.measure()


# ---------------------------------------------------------------------- what is left alone


@pytest.mark.parametrize("family", PLAIN)
def test_within_the_bounds_not_a_bit_is_changed(family):
    torch.manual_seed(0)
    models = [build(family)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-6) for model in models]
    DecoupledLocAteR(models[0], change=10.0, spread=1e3).attach(optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(1)
        out = model.train()(**inputs(family))
        next(iter(out.values())).float().square().mean().backward()
        optimizer.step()
    assert same(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("frozen", ["query", "key"])
@pytest.mark.parametrize("how", ["frozen", "rate 0", "nobody's"])
def test_what_no_optimizer_moves_stays_as_it_is(frozen, how):
    torch.manual_seed(0)
    model = build("llama")
    still = [getattr(attention, frozen).tensor for attention in attentions(model)]
    rest = [p for p in model.parameters() if all(p is not one for one in still)]
    groups = [{"params": rest}, {"params": still, "lr": 0.0 if how == "rate 0" else 1.0}]
    for p in still:
        p.requires_grad_(how != "frozen")
    optimizer = torch.optim.SGD(groups[: 1 if how == "nobody's" else 2], lr=1.0)
    DecoupledLocAteR(model, change=1e-3, spread=1e-3).attach(optimizer)
    run(model)
    moved(model, 0.1)
    for p in still:
        p.grad = None
    before = weights(model)
    optimizer.step()
    for attention in attentions(model):
        assert torch.equal(getattr(attention, frozen).tensor, before[f"{attention.module}.{frozen[0]}_proj.weight"])
        other = "key" if frozen == "query" else "query"
        assert not torch.equal(getattr(attention, other).tensor, before[f"{attention.module}.{other[0]}_proj.weight"])


@pytest.mark.parametrize("spoilt", ["states before", "weights after"])
def test_what_is_not_finite_is_not_written(spoilt):
    """A sample that is not finite says nothing; an update that makes logits so is taken back."""
    torch.manual_seed(0)
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model).attach(optimizer)
    run(model)
    moved(model, 1e-4)
    query = attentions(model)[0].query.tensor
    if spoilt == "states before":
        reg._states._samples["model.layers.0.self_attn"].last.states[0, 0, 0] = math.inf
        expected = query.detach() - query.grad
    else:
        query.grad[0, 0] = math.inf
        expected = query.detach().clone()
    optimizer.step()
    first = attentions(model)[0].query.shape[2]  # the first head's rows
    assert all(p.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(query[:first], expected[:first])


def test_a_qk_norm_that_is_applied_later_is_seen():
    torch.manual_seed(0)
    model = build("llama")
    with torch.no_grad():
        for attention in attentions(model):
            attention.query.weight.mul_(100.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model, change=1e6, spread=3.0).attach(optimizer)
    norm = QKNorm(gain=False).apply(model)
    run(model)
    moved(model, 0.0)
    before = weights(model)
    optimizer.step()
    assert same(before, weights(model))  # the spread is the norm's
    assert max(value for name, value in reg.measure().items() if name.endswith("/spread")) < 4
    norm.remove()
    optimizer.step()
    assert max(value for name, value in reg.measure().items() if name.endswith("/spread")) > 4


def test_an_optimizer_without_a_rate_is_bounded_too():
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    DecoupledLocAteR(model).attach(optimizer)
    optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(lr=1e-3))
    optimizer.param_groups[0]["lr"] = None  # as transformers' Adafactor has it
    run(model)
    optimizer.step()


def test_a_step_that_the_scaler_skips_moves_nothing():
    torch.manual_seed(0)
    model = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    DecoupledLocAteR(model, spread=1e-3).attach(optimizer)
    run(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros((), requires_grad=True))
    before = weights(model)
    scaler.step(optimizer)
    assert same(before, weights(model))


@pytest.mark.parametrize("first", [True, False])
def test_what_other_methods_do_to_weights_is_no_part_of_the_step(first):
    """QK-clip scales heads down by more than any step may move them; whichever of the two is applied first."""
    torch.manual_seed(0)
    models = [build("llama") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    limits = []
    for index, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
        if index and not first:
            DecoupledLocAteR(model, change=1e-4, spread=1e6).attach(optimizer)
        QKClip(threshold=0.05).apply(model, optimizer)
        if index and first:
            DecoupledLocAteR(model, change=1e-4, spread=1e6).attach(optimizer)
        run(model)
        optimizer.step()
        limits.append(weights(model))
    assert not same(limits[0], weights(build("llama")))
    for name, value in limits[0].items():
        torch.testing.assert_close(value, limits[1][name], rtol=1e-6, atol=1e-9)


def test_a_schedule_at_zero_lets_go_of_everything():
    torch.manual_seed(0)
    model = build("gpt2")
    free = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    DecoupledLocAteR(model, change=1e-6, spread=1e-6, schedule=lambda _: 0.0).attach(optimizer)
    run(model)
    moved(model, 0.1)
    optimizer.step()
    moved(free, 0.1)
    torch.optim.SGD(free.parameters(), lr=1.0).step()
    assert same(weights(model), weights(free))
    reg = DecoupledLocAteR(model, schedule=lambda _: math.nan).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(LocaterError, match="the schedule gives nan at step 0"):
        next(iter(reg._attached.values()))._entry.optimizer().step()
    with pytest.raises(LocaterError, match="schedule must be a function"):
        DecoupledLocAteR(model, schedule=5)


def test_detached_it_does_nothing_and_keeps_no_hook():
    torch.manual_seed(0)
    model = build("gpt2")
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model, change=1e-6).attach(optimizer)
    assert [len(module._forward_pre_hooks) for module in model.modules()] != hooks
    reg.detach()
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    moved(model, 0.1)
    before = weights(model)
    optimizer.step()
    assert not same(before, weights(model))
    assert reg.step == 0


def test_keys_that_are_normalised_leave_the_shrinking_to_the_queries():
    """LocAteR on top of QK-norm of the keys alone."""
    torch.manual_seed(0)
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    QKNorm(queries=False).apply(model, optimizer)
    DecoupledLocAteR(model, change=1e6, spread=1e-2).attach(optimizer)
    run(model)
    before = weights(model)
    moved(model, 0.0)
    optimizer.step()  # the first: what the heads start with may stay
    assert same(before, weights(model))
    moved(model, 1.0)
    with torch.no_grad():
        unbounded = {a.module: a.query.weight - a.query.view(a.query.tensor.grad) for a in attentions(model)}
        keys = {a.module: a.key.weight - a.key.view(a.key.tensor.grad) for a in attentions(model)}
    optimizer.step()
    for attention in attentions(model):
        torch.testing.assert_close(attention.key.weight, keys[attention.module])
        assert (attention.query.weight.abs() < unbounded[attention.module].abs()).all()


# ---------------------------------------------------------------------- optimizers


def muon_and_adamw(model):
    """As people train: matrices by Muon, what is left by AdamW."""
    inside = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for p in model.parameters() if all(p is not one for one in inside)]
    return torch.optim.Muon(inside, lr=2e-1), torch.optim.AdamW(rest, lr=1e-3)


def test_optimizers_that_train_a_model_together_are_attached_to_in_one_call():
    torch.manual_seed(0)
    model = build("llama")
    muon, adamw = muon_and_adamw(model)
    reg = DecoupledLocAteR(model, change=1e-3).attach([muon, adamw])
    run(model)
    before = {a.module: sampled_logits(reg, a) for a in attentions(model)}
    for optimizer in (muon, adamw):
        optimizer.step()
    for attention in attentions(model):
        change = sampled_logits(reg, attention) - before[attention.module]
        assert (spread_of(change.transpose(0, 1)) < 1.1e-3).all()
    assert reg.step == 1
    reg.detach()
    before = weights(model)
    muon.step()
    assert not same(before, weights(model))


def test_queries_and_keys_in_two_optimizers_are_each_bounded():
    torch.manual_seed(0)
    model = build("llama")
    known = attentions(model)
    two = [torch.optim.SGD([getattr(a, part).tensor for a in known], lr=1.0) for part in ("query", "key")]
    reg = DecoupledLocAteR(model, change=1e-3).attach(two)
    for _ in range(5):
        run(model)
        moved(model, 0.1)
        for optimizer in two:
            before = {a.module: sampled_logits(reg, a) for a in known}
            optimizer.step()
            for a in known:
                change = sampled_logits(reg, a) - before[a.module]
                assert (spread_of(change.transpose(0, 1)) < 1.1e-3).all()
    assert reg.step == 5


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
    assert same(weights(model), before)


def test_a_closure_is_evaluated_as_ever():
    torch.manual_seed(0)
    model = build("llama")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=3)
    reg = DecoupledLocAteR(model, change=1e-4).attach(optimizer)
    ids = ids_of(model)

    def closure():
        optimizer.zero_grad()
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    closure()
    before = {a.module: sampled_logits(reg, a) for a in attentions(model)}
    states = {a.module: reg._states.of(a).states.clone() for a in attentions(model)}
    optimizer.step(closure)
    for attention in attentions(model):
        change = attention.logits(states[attention.module]).detach() - before[attention.module]
        assert (spread_of(change.transpose(0, 1)) < 1.1e-4).all()


# ---------------------------------------------------------------------- settings and logs


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_every_is_a_positive_whole_number(every):
    with pytest.raises(LocaterError, match="every must be a positive whole number"):
        DecoupledLocAteR(build("gpt2"), every=every)


@pytest.mark.parametrize("name", ["change", "spread"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "much", True])
def test_bounds_are_positive_numbers(name, value):
    with pytest.raises(LocaterError, match=f"{name} must be a positive, finite number"):
        DecoupledLocAteR(build("gpt2"), **{name: value})


def test_on_every_nth_step_alone_it_acts():
    torch.manual_seed(0)
    model = build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model, change=1e-6, every=3).attach(optimizer)
    run(model)
    for step in range(1, 7):
        moved(model, 0.05)
        before = weights(model)
        optimizer.step()
        query = attentions(model)[0].query
        whole = before["transformer.h.0.attn.c_attn.weight"] - query.tensor.grad
        assert torch.equal(query.tensor, whole) == (step % 3 != 0)
    assert reg.step == 6


def test_logs_have_what_the_last_step_did():
    torch.manual_seed(0)
    model = build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model, change=1e-3).attach(optimizer)
    assert {name.rsplit("/")[-1] for name in reg.measure()} == {"trace", "scale"}
    run(model)
    moved(model, 0.1)
    optimizer.step()
    found = reg.measure()
    assert {name.rsplit("/")[-1] for name in found} == {"trace", "scale", "change", "spread"}
    assert found["transformer.h.0.attn/change"] > 1e-3  # before it was bounded
