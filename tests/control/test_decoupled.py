"""LocAteR beside the optimizer, on real models: what a step may do to logits, and what is left alone."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn
from zoo import FAMILIES, build, inputs, recorded_logits

from interpreter import on_gpu
from locater import LocaterError
from locater.control import DecoupledLocAteR, QKClip, QKNorm, _bounded, decoupled
from locater.control._sampled import Sample, _Sampler
from locater.control.rules.decoupled import (
    SEQUENCES,
    TOKENS,
    Decoupled,
    initial_spread,
    logit_moments,
    sampled_positions,
)
from locater.models import attentions
from replaying import put_in_place_of_cuda

PLAIN = [name for name in FAMILIES if name not in ("t5",)]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def spread_of(logits):
    """The standard deviation of each query's logits over the keys up to it (…, n, n), pair by pair."""
    total, pairs = 0.0, 0
    for row in range(1, logits.shape[-1]):
        seen = logits[..., row, : row + 1].double()
        total = total + (seen - seen.mean(-1, keepdim=True)).square().sum(-1)
        pairs += row + 1
    return (total / pairs).mean(-1).sqrt()


def ids_of(model, batch=4, tokens=12):
    random = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (batch, tokens), generator=random)


def run(model, tokens=12):
    """A training forward, so that states are known."""
    ids = ids_of(model, tokens=tokens)
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    return ids


@torch.no_grad()
def sampled_logits(reg, attention):
    """(B, heads, n, n), on the states that entered last."""
    states, positions, _ = reg._states.of(attention)
    return attention.logits(states, positions=(positions, positions))


@torch.no_grad()
def moved(model, size, seed=0):
    """The gradients of SGD with a rate of 1 that moves every query and key weight by `size` at random."""
    random = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for attention in attentions(model):
        for one in (attention.query, attention.key):
            one.view(one.tensor.grad).copy_(size * torch.randn(one.shape, generator=random))


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


def test_the_sample_is_what_entered_the_model_s_own_attention():
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model).attach(optimizer)
    ids = run(model)
    with torch.no_grad(), recorded_logits(model) as recorded:
        model(input_ids=ids)
    for attention in attentions(model):
        states, _, logits = recorded[attention.module]
        torch.testing.assert_close(reg._states.of(attention).states, states[:SEQUENCES])
        seen = logits > -1e30
        torch.testing.assert_close(attention.logits(states)[seen], logits[seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [2, 64, 65, 200, 4096])
def test_a_sample_is_of_the_whole_sequence(tokens):
    """Near offsets and far ones; with no token twice."""
    found = sampled_positions(tokens)
    assert len(found) == min(tokens, TOKENS)
    assert found[0] == 0
    assert found[-1] == tokens - 1
    assert (found.diff() > 0).all()
    assert (found.diff() == 1).sum() >= min(tokens - 1, 56)
    assert found.diff().max() <= 1 + tokens / 7


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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "distilbert"])
def test_padding_is_not_sampled(family, side):
    model = build(family)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    reg = DecoupledLocAteR(model).attach(torch.optim.SGD(model.parameters(), lr=1.0))
    ids = ids_of(model)
    model.train()(input_ids=ids)
    plain = [reg._states.of(attention).states for attention in attentions(model)]
    padding, order = torch.zeros(4, 20, dtype=torch.long), 1 if side == "right" else -1
    mask = torch.cat([torch.ones_like(ids), padding][::order], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(input_ids=torch.cat([ids, padding][::order], 1), attention_mask=mask, position_ids=positions)
    for attention, alone in zip(attentions(model), plain, strict=True):
        states, positions, tokens = reg._states.of(attention)
        assert tokens == 32
        assert positions.tolist() == [12 * i // 32 for i in range(32)]  # as many as of 32 tokens
        torch.testing.assert_close(states, alone[:, positions], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "rows", "distinct"),
    [
        ([512, 512, 512], (0, 1), 64),  # as if there were no mask
        ([24, 512, 30], (1, 1), 64),  # the others are too short to say as much
        ([144, 20, 100], (0, 2), 64),
        ([72, 36, 8], (0, 1), 64),
        ([24, 24, 3], (0, 1), 24),
        ([0, 0, 0], (0, 1), 64),  # no mask is meant so
        ([7, 2, 1], None, 0),  # too few to say anything
    ],
)
def test_of_padded_sequences_the_longest_are_sampled_from_their_first_token_to_their_last(lengths, rows, distinct):
    x = torch.arange(3.0)[:, None, None] * 1000 + torch.arange(512.0)[:, None].expand(512, 2)
    real = torch.arange(512) < torch.tensor(lengths)[:, None]
    module = nn.Identity().train()
    sampler = _Sampler()
    sampler(module, (x,), {"attention_mask": real.long()})
    states, positions, tokens = sampler.last
    assert tokens == 512
    if rows is None:
        assert states.isnan().all()
        return
    longest = max(lengths) or 512
    assert positions[-1] == longest - 1
    for row, own in zip(rows, states, strict=True):
        found, length = own[:, 0] - 1000 * row, lengths[row] or 512
        assert (found.diff() >= 0).all()
        assert found[0] == 0
        assert found[-1] == (longest - 1) * length // longest
        assert len(found.unique()) >= (min(distinct, length) if length == longest else min(distinct, length) // 2)


def causal(size):
    return torch.ones(size, size, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((causal(20),), {}),  # a module of one's own
        ((), {"attention_mask": causal(20)}),
        ((torch.arange(20).expand(4, 20),), {}),  # positions
        ((), {"key_padding_mask": torch.zeros(20, 4, dtype=torch.bool)}),
        ((torch.zeros(20, 20),), {}),
        ((), {"attention_mask": "none"}),
    ],
)
def test_what_is_no_mask_of_padding_is_not_taken_for_one(args, kwargs):
    sampler = _Sampler()
    sampler(nn.Identity().train(), (torch.randn(4, 20, 2), *args), kwargs)
    assert sampler.last.positions.tolist() == list(range(20))


def test_of_packed_sequences_the_longest_document_is_sampled():
    """Softmax compares tokens of one document alone, and positions begin anew with each."""
    model = build("llama")
    reg = DecoupledLocAteR(model).attach(torch.optim.SGD(model.parameters(), lr=1.0))
    ids, lengths = ids_of(model, batch=2, tokens=20), (4, 11, 5)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, 20)
    model.train()(input_ids=ids, position_ids=positions, use_cache=False)
    packed = [reg._states.of(attention) for attention in attentions(model)]
    model(input_ids=ids[:, 4:15], use_cache=False)
    alone = [reg._states.of(attention).states for attention in attentions(model)]
    for (states, at, _), own in zip(packed, alone, strict=True):
        assert at.tolist() == [11 * i // 20 for i in range(20)]
        torch.testing.assert_close(states, own[:, at], rtol=1e-4, atol=1e-5)
    model(input_ids=ids, position_ids=torch.arange(20).expand(2, 20))
    assert reg._states.of(attentions(model)[0]).positions.tolist() == list(range(20))


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


def test_the_rule_says_what_the_logits_say():
    """Three moments give the spread after any part of an update, and the change itself."""
    torch.manual_seed(0)
    before, after = torch.randn(2, 5, 3, 7, 7, dtype=torch.float64).unbind(0)
    found = logit_moments(before, after)
    torch.testing.assert_close(found[..., 0].sqrt(), spread_of(before))
    torch.testing.assert_close(found[..., 2].sqrt(), spread_of(after - before))
    for keep in (0.0, 0.3, 1.0):
        both = found[..., 0] + keep * (2 * found[..., 1] + keep * found[..., 2])
        torch.testing.assert_close(both.sqrt(), spread_of(before + keep * (after - before)))


@pytest.mark.parametrize("tokens", [64, 1024, 16_384])
def test_the_default_spread_is_where_softmax_keeps_a_quarter_of_its_entropy(tokens):
    """Of normal, independent logits."""
    normal, independent = torch.Generator().manual_seed(0), 2_000
    logits = Decoupled.spread * torch.randn(independent, tokens, generator=normal)
    sampled = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert 0.24 < float(sampled.mean()) / math.log(tokens) < 0.28


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("acts", [(True, True), (True, False), (False, True), (False, False)])
def test_factors_shrink_logits_to_the_bound(shared, acts):
    moments = torch.tensor([[[25.0, 0.0, 0.0], [4.0, 0.0, 0.0], [100.0, 0.0, 0.0]]])
    keep, q, k = Decoupled(0.1, 2.5).factors(moments, torch.zeros(1, 3), acts=acts, shared_keys=shared)
    assert (keep == 1).all()
    spread = moments[..., 0].sqrt() * q * k
    if any(acts):
        assert (spread <= 2.5 + 1e-6).all()
    else:
        assert (q == 1).all()
        assert (k == 1).all()
    if not (shared and not acts[0]):
        torch.testing.assert_close(q * k, torch.tensor([[0.5, 1.0, 0.25]]) if any(acts) else torch.ones(1, 3))
    released = Decoupled(0.1, 2.5).factors(moments, torch.zeros(1, 3), 1e-9, acts=acts, shared_keys=shared)
    assert all((one == 1).all() for one in released)


@pytest.mark.parametrize("every", [1, 5])
def test_heads_that_started_sharp_are_shrunk_by_no_more_than_updates_may_change_them(every):
    """How sharp they were is known of one batch alone."""
    moments = torch.tensor([[[25.0, 0.0, 0.0], [3.05**2, 0.0, 0.0], [25.0, 0.0, 0.0]]])
    initial = torch.tensor([[3 / 2**0.5, 3 / 2**0.5, 1.0]])
    _, q, k = Decoupled(0.1, 2.5).factors(moments, initial, every=every)
    torch.testing.assert_close(moments[..., 0].sqrt() * q * k, torch.tensor([[5 - every * 0.1, 3.0, 2.5]]))


def test_of_samples_that_are_made_up_only_the_change_counts():
    """Their product is NaN, on all ranks if on one, since so is its mean."""
    moments = torch.tensor([[[100.0, math.nan, 0.04], [100.0, math.nan, 1e-4], [100.0, math.nan, math.inf]]])
    keep, q, k = Decoupled(0.1, 2.5).factors(moments, -torch.ones(1, 3))
    torch.testing.assert_close(keep, torch.tensor([[0.5, 1.0, 0.0]]))
    assert (q * k == 1).all()
    assert (initial_spread(moments, -torch.ones(1, 3)) == -1).all()


@pytest.mark.parametrize(("every", "kept"), [(1, 0.9), (5, 0.5), (10, 0.0), (1000, 0.0)])
def test_acting_on_every_nth_update_takes_back_for_all_n_but_no_more_than_one(every, kept):
    moments = torch.tensor([[[0.0, 0.0, (0.1 / 0.9) ** 2]]])
    assert float(Decoupled(0.1).keep(moments, every=every)) == pytest.approx(kept, abs=1e-6)


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


def test_without_states_the_norms_gain_of_now_counts():
    torch.manual_seed(0)
    model = build("llama").eval()  # nothing is sampled
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model, change=1e-3, spread=1e6).attach(optimizer)
    moved(model, 1e-3)
    optimizer.step()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.mul_(5.0)
    before = {a.module: sampled_logits(reg, a) for a in attentions(model)}
    moved(model, 1e-2)
    optimizer.step()
    for attention in attentions(model):
        change = sampled_logits(reg, attention) - before[attention.module]
        assert (spread_of(change.transpose(0, 1)) < 1.1e-3).all()


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


def test_keys_of_another_width_see_independent_tokens():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, kdim=12, vdim=12, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model, change=1e-3).attach(optimizer)
    x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 12)
    model(x, y, y)[0].sum().backward()
    assert not reg._states.entered()
    optimizer.step()
    assert reg.measure()["/change"] > 0


def test_a_saved_model_takes_no_sample_along(tmp_path):
    model = build("gpt2")
    reg = DecoupledLocAteR(model).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    run(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    hooks = [hook for module in loaded.modules() for hook in module._forward_pre_hooks.values()]
    assert hooks
    assert all(hook.last is None for hook in hooks)
    reg.detach()
    assert not reg._states.entered()  # nor are they held


def test_an_optimizer_without_a_rate_is_bounded_too():
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    DecoupledLocAteR(model).attach(optimizer)
    optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(lr=1e-3))
    optimizer.param_groups[0]["lr"] = None  # as transformers' Adafactor has it
    run(model)
    optimizer.step()


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


def test_gradients_of_single_samples_leave_no_states_behind():
    """Under torch.func's transforms states are no tensors of their own."""
    model = build("gpt2").train()
    reg = DecoupledLocAteR(model).attach(torch.optim.SGD(model.parameters(), lr=1.0))
    ids = ids_of(model)

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, kwargs={"input_ids": row[None]}).logits.square().mean()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="same")
    each(dict(model.named_parameters()), ids)
    assert not reg._states.entered()


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


def test_in_evaluation_states_are_not_sampled():
    model = build("gpt2")
    reg = DecoupledLocAteR(model).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model.eval()(input_ids=ids_of(model))
    assert not reg._states.entered()
    run(model)
    assert reg._states.entered()


# ---------------------------------------------------------------------- which states


@pytest.mark.compiled
def test_the_sample_is_what_entered_the_module_and_a_compiled_model_gives_the_same():
    torch.manual_seed(0)
    models = [build("llama")]
    models.append(copy.deepcopy(models[0]))
    for index, model in enumerate(models):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1)
        DecoupledLocAteR(model).attach(optimizer)
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if index else model
        ids = ids_of(model)
        for _ in range(4):
            optimizer.zero_grad()
            called.train()(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    for a, b in zip(weights(models[0]).values(), weights(models[1]).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.compiled
def test_a_model_that_was_compiled_before_is_sampled_too(full):
    if not full:
        pytest.skip("four seconds: LOCATER_FULL=1, or make test-full")
    model = build("llama")
    ids = ids_of(model)
    compiled = torch.compile(model.train(), backend="aot_eager")
    compiled(input_ids=ids, labels=ids).loss.backward()
    reg = DecoupledLocAteR(model).attach(torch.optim.SGD(model.parameters(), lr=1e-3))
    compiled(input_ids=ids, labels=ids).loss.backward()
    assert reg._states.entered()


def test_without_states_tokens_are_independent_and_the_bounds_hold_for_them():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg = DecoupledLocAteR(model, change=1e-3, spread=1e6).attach(optimizer)
    x = reg._states.of(reg.attentions[0]).states
    assert x.shape == (SEQUENCES, TOKENS, 12)
    assert float(x.std()) == pytest.approx(1, abs=0.05)
    (attention,) = attentions(model)
    before = attention.logits(x).detach()
    moved(model, 2e-3)
    optimizer.step()
    found = spread_of((attention.logits(x) - before).detach().transpose(0, 1))
    assert (found < 1.02e-3).all()
    assert (found > 0.9e-3).any()


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


# ---------------------------------------------------------------------- settings and state


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


@pytest.mark.parametrize("state", [None, 5, {}, {"step": 3, "change": 0.1, "version": 3}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(LocaterError, match="not a state of DecoupledLocAteR"):
        DecoupledLocAteR(build("gpt2")).load_state_dict(state)


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
            for module in model.modules():  # states enter in training alone
                module.training = True
            with torch.no_grad(), torch.random.fork_rng(["cuda"]):
                model(input_ids=ids)
            optimizer.step()
        assert reg._states.entered()
    for a, b in zip(weights(models[0]).values(), weights(models[1]).values(), strict=True):
        # products of half precision are summed in another order
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
