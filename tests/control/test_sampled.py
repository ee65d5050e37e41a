"""Which states `DecoupledLocAteR` keeps a sample of."""

from __future__ import annotations

import copy

import pytest
import torch
from moving import ids_of, moved, run, sampled_logits, spread_of, weights
from torch import nn
from zoo import build, recorded_logits

from locater.control import DecoupledLocAteR
from locater.control._sampled import _Sampler
from locater.control.rules.decoupled import SEQUENCES, TOKENS
from locater.models import attentions


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


def test_training_forwards_are_sampled_in_either_mode_and_no_others():
    """transformers loads models in evaluation mode; generation goes on in the mode of training, token by token."""
    model = build("gpt2")
    reg = DecoupledLocAteR(model).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model.eval()(input_ids=ids_of(model))
        model.train()(input_ids=ids_of(model))
    assert not reg._states.entered()
    model.eval()(input_ids=ids_of(model)).logits.sum().backward()
    before = [reg._states.of(attention).states for attention in attentions(model)]
    model.train().generate(ids_of(model)[:, :3], max_new_tokens=3, do_sample=False)
    assert all(reg._states.of(a).states is states for a, states in zip(attentions(model), before, strict=True))


@pytest.mark.compiled
def test_the_sample_is_what_entered_the_module_and_a_compiled_model_gives_the_same():
    torch.manual_seed(0)
    models = [build("llama").double()]  # whatever last bits compiled code has
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
