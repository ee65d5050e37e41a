"""Attention z-loss: its gradient against autograd of the definition, on every way attention is computed."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from rivals import ByHand, Joint, batch, gradients, loss_of, ready, softmax_inputs, stand_in_for_flash
from torch import nn

from locater import observe
from locater.control import QKClip, Softcap, ZLoss
from locater.control.rules.logsumexp import logsumexp
from locater.hooks import Call

STRENGTH = 0.3


def dense_logsumexp(call):
    """Through all logits at once."""
    q, k = call.q, call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if call.scale is None else call.scale)
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    tq, tk = s.shape[-2:]
    distance = torch.arange(tk) - torch.arange(tk - tq, tk)[:, None]
    if call.causal:
        s = s.masked_fill(distance > 0, -torch.inf)
    if call.window is not None:
        s = s.masked_fill(distance.abs() >= call.window, -torch.inf)
    if call.key_mask is not None:
        s = s.masked_fill(~call.key_mask[:, None, None], -torch.inf)
    if call.bias is not None:
        s = s.masked_fill(~call.bias, -torch.inf) if call.bias.dtype == torch.bool else s + call.bias
    if call.sinks is not None:
        s = torch.cat([s, call.sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    return s.logsumexp(-1)


SINKS = torch.tensor([-2.0, 0.0, 1.0, 3.0], dtype=torch.float64)


def call(**more):
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, h, t, 5, generator=generator, dtype=torch.float64) for h, t in ((4, 6), (2, 9)))
    return Call(q.requires_grad_(), k.requires_grad_(), **more)


CALLS = {
    "plain": lambda: call(),
    "causal, its own scale": lambda: call(causal=True, scale=0.7),
    "softcap": lambda: call(softcap=1.5, causal=True),
    "window": lambda: call(causal=True, window=3),
    "window on both sides": lambda: call(window=2),
    "padding": lambda: call(key_mask=torch.arange(9) > torch.tensor([[2], [4]])),
    "bias": lambda: call(bias=torch.linspace(-1, 1, 9, dtype=torch.float64)[None, None, None]),
    "hiding bias": lambda: call(bias=torch.arange(9) > torch.arange(6)[:, None, None, None].movedim(0, 2)),
    "sinks": lambda: call(causal=True, softcap=1.5, sinks=SINKS.clone().requires_grad_()),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("block", [1, 10**9])
def test_the_logsumexp_and_its_gradient_are_those_of_all_logits_at_once(name, block, monkeypatch):
    monkeypatch.setattr("locater.control.rules.logsumexp._CPU_LOGITS", block)  # a query at a time, or all
    one = CALLS[name]()
    weight = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    expected = dense_logsumexp(one)
    found = logsumexp(one)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    leaves = (one.q, one.k) if one.sinks is None else (one.q, one.k, one.sinks)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    got = torch.autograd.grad((found * weight).sum(), leaves)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


def test_the_gradient_is_that_of_finite_differences():
    one = call(causal=True, softcap=2.0)
    assert torch.autograd.gradcheck(lambda q, k: logsumexp(replace(one, q=q, k=k)), (one.q, one.k), fast_mode=True)


def test_a_query_that_sees_nothing_has_no_gradient():
    bias = torch.ones(2, 1, 6, 9, dtype=torch.bool)
    bias[0, :, 2] = False
    one = call(bias=bias)
    lse = logsumexp(one)
    assert (lse[0, :, 2] == -torch.inf).all()
    gradient = torch.autograd.grad(lse[lse > -torch.inf].sum(), one.q)[0]
    assert (gradient[0, :, 2] == 0).all()
    assert torch.isfinite(gradient).all()


# ---------------------------------------------------------------- in a model


def by_definition(model, given, queries=None):
    """Gradients of loss + strength · Σ mean lse², from the logits that softmax is given; `queries` (B, T) count."""
    with softmax_inputs() as logits:
        loss = loss_of(model, given)
    penalty = 0.0
    for s in logits:
        lse = s.logsumexp(-1).movedim(1, 2)
        penalty = penalty + (lse if queries is None else lse[queries]).square().mean()
    (loss + STRENGTH * penalty).backward()
    found = gradients(model)
    model.zero_grad()
    return found, STRENGTH * penalty.item()


def with_z_loss(model, given, **settings):
    handle = ZLoss(STRENGTH, **settings).apply(model)
    loss_of(model, given).backward()
    found, measured = gradients(model), handle.measure()["penalty"]
    handle.remove()
    model.zero_grad()
    return found, measured


def assert_same(found, expected, but=(), tolerance=1e-9):
    """In float64 but for the softmax of some families, which enters both sides alike."""
    assert found.keys() == expected.keys()
    largest = max(g.abs().max() for g in expected.values())
    for name, gradient in found.items():
        if not name.endswith(but):
            assert (gradient - expected[name]).abs().max() < tolerance * largest, name


def assert_as_defined(model, given, but=()):
    """The gradients, those of weights named in `but` apart, and what is measured."""
    expected, penalty = by_definition(model, given)
    found, measured = with_z_loss(model, given)
    assert_same(found, expected, but)
    assert measured == pytest.approx(penalty, rel=1e-9)


@pytest.mark.parametrize(
    "family",
    ["gpt2", "llama", "gpt-neox", "bert", "gemma2", "mistral", "gptj", "bloom", "falcon-new", "whisper", "vit"],
)
def test_the_gradient_of_a_model_is_that_of_loss_plus_penalty(family):
    assert_as_defined(ready(family), batch(family))


def test_t5s_position_bias_is_part_of_the_logsumexp_but_gets_no_gradient_from_it():
    # the biases, and nothing else: all else that leads to a logit leads there through q and k
    assert_as_defined(ready("t5"), batch("t5"), but=("relative_attention_bias.weight",))


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "falcon-new"])
def test_sdpa_has_the_gradient_of_eager(family):
    """sdpa keeps no logits, and has other masks."""
    eager, given = ready(family), batch(family)
    sdpa = copy.deepcopy(eager)
    sdpa.set_attn_implementation("sdpa")
    # llama's eager function takes its softmax in float32
    assert_same(with_z_loss(sdpa, given)[0], with_z_loss(eager, given)[0], tolerance=1e-6)


def test_flash_attention_with_sequences_packed_into_one_has_the_gradient_of_the_sequences(monkeypatch):
    model, lengths = ready("llama"), (5, 8)
    ids = batch("llama")["input_ids"][:1]
    with softmax_inputs() as logits:
        for one in ids.split(lengths, 1):
            loss_of(model, {"input_ids": one})
    layers = [torch.cat([s.logsumexp(-1) for s in logits[layer::2]], -1) for layer in range(2)]
    (STRENGTH * sum(lse.square().mean() for lse in layers)).backward()
    expected = gradients(model)
    model.zero_grad()
    stand_in_for_flash(monkeypatch, model)
    handle = ZLoss(STRENGTH).apply(model)
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    (0.0 * loss_of(model, {"input_ids": ids, "position_ids": places, "use_cache": False})).backward()
    found = {name: g for name, g in gradients(model).items() if name in expected}
    # llama's norms, and the softmax of its eager function, are in float32: 1e-7 in logits, ten times that in gradients
    assert_same(found, expected, tolerance=1e-5)
    handle.remove()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_does_not_count(implementation):
    model, given = ready("llama").float(), batch("llama")
    real = torch.ones_like(given["input_ids"])
    real[0, :4] = 0
    given["attention_mask"] = real
    expected, _ = by_definition(copy.deepcopy(model), given, queries=real.bool())
    model.set_attn_implementation(implementation)
    found, _ = with_z_loss(model, given)
    # padded queries see what eager and sdpa please, and that goes on to the loss; so differences are compared
    plain = {}
    for way in ("eager", implementation):
        model.set_attn_implementation(way)
        loss_of(model, given).backward()
        plain[way] = gradients(model)
        model.zero_grad()
    ours = {name: g - plain[implementation][name] for name, g in found.items()}
    assert_same(ours, {name: g - plain["eager"][name] for name, g in expected.items()}, tolerance=1e-5)  # float32


class Encoder(nn.Module):
    def __init__(self, batch_first, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=batch_first, bias=bias)

    def forward(self, x, **more):
        return self.attention(x, x, x, need_weights=True, **more)[0]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_torchs_own_module(batch_first, masked):
    model = Encoder(batch_first).double().train()
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x if batch_first else x.transpose(0, 1)
    more = {"attn_mask": torch.ones(5, 5).triu(1).bool()} if masked else {}
    with softmax_inputs() as logits:
        loss = model(x, **more).square().mean()
    (loss + STRENGTH * logits[0].logsumexp(-1).square().mean()).backward()
    expected = gradients(model)
    model.zero_grad()
    handle = ZLoss(STRENGTH).apply(model)
    model(x, **more).square().mean().backward()
    assert_same(gradients(model), expected)
    handle.remove()


@pytest.mark.parametrize("make", [ByHand, Joint])
def test_a_users_own_module_and_a_joint_matrix(make):
    model = make().double().train()
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with softmax_inputs() as logits:
        loss = model(x).square().mean()
    (loss + STRENGTH * logits[0].logsumexp(-1).square().mean()).backward()
    expected = gradients(model)
    model.zero_grad()
    ZLoss(STRENGTH).apply(model)
    model(x).square().mean().backward()
    assert_same(gradients(model), expected)


# ---------------------------------------------------------------- at work


def test_it_acts_where_gradients_are_recorded_in_either_mode_and_never_on_the_output():
    """transformers loads models in evaluation mode, and some train them there."""
    model, given = ready("llama"), batch("llama")
    plain = loss_of(model, given)
    handle = ZLoss(STRENGTH).apply(model)
    found = []
    for mode in (True, False):
        model.train(mode).zero_grad()
        loss = loss_of(model, given)
        assert torch.equal(loss, plain)
        loss.backward()
        found.append(gradients(model))
    assert_same(*found)
    before = handle.measure()
    with torch.no_grad():
        loss_of(model, {**given, "input_ids": given["input_ids"].flip(0, 1)})
    assert handle.measure() == before


@pytest.mark.parametrize("family", ["llama", "gptj", "nn.MultiheadAttention"])
def test_a_copy_is_left_alone(family):
    if family == "nn.MultiheadAttention":
        model, given = Encoder(True).double().train(), torch.randn(2, 5, 12, dtype=torch.float64)
    else:
        model, given = ready(family), batch(family)

    def gradients_of(model):
        (model(given).square().mean() if isinstance(given, torch.Tensor) else loss_of(model, given)).backward()
        return gradients(model)

    expected = gradients_of(copy.deepcopy(model))
    ZLoss(STRENGTH).apply(model)
    found = gradients_of(copy.deepcopy(model))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert any(not torch.equal(gradient, expected[name]) for name, gradient in gradients_of(model).items())


@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_evaluation_reads_no_call(family, monkeypatch):
    """That may wait for a device, in generation at every token."""
    model, given = ready(family), batch(family)
    ZLoss(STRENGTH).apply(model)
    for reader in ("of_interface", "of_logits"):
        monkeypatch.setattr(f"locater.hooks._calls.{reader}", lambda *_, **__: 1 / 0)
    with torch.no_grad():
        loss_of(model.eval(), given)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, given)


@pytest.mark.parametrize("inside", [True, False])
def test_an_observer_and_two_methods_intercept_one_module(inside):
    model, given = ready("gptj"), batch("gptj")
    expected, _ = by_definition(model, given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with observe(model) as alone:
        loss_of(model, given)
    if inside:
        methods = [ZLoss(STRENGTH).apply(model), QKClip(1e9).apply(model, optimizer)]
        with observe(model) as seen:
            loss_of(model, given).backward()
    else:
        with observe(model) as seen:
            methods = [QKClip(1e9).apply(model, optimizer), ZLoss(STRENGTH).apply(model)]
            loss_of(model, given).backward()
    assert torch.overrides._get_current_function_mode() is None
    assert_same(gradients(model), expected)
    optimizer.step()
    clip = next(method for method in methods if method.method.name == "QK-clip")
    assert max(clip.measure().values()) == pytest.approx(alone.table().max_logit.max(), rel=1e-6)
    assert seen.table().equals(alone.table())
    for method in methods:
        method.remove()


def test_an_interrupted_forward_leaves_nothing_that_listens():
    """torch calls no hook after an interrupt."""
    model, given = ready("gptj"), batch("gptj")
    expected, _ = by_definition(model, given)
    handle = ZLoss(STRENGTH).apply(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.transformer.h[0].attn.q_proj.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, given)
    hook.remove()
    loss_of(model, given).backward()
    assert_same(gradients(model), expected)
    assert torch.overrides._get_current_function_mode() is None
    handle.remove()


def test_a_scaled_loss_wants_its_scale_told():
    model, given = ready("llama"), batch("llama")
    expected, _ = by_definition(model, given)
    handle = ZLoss(STRENGTH, loss_scale=lambda: 0.25).apply(model)
    for _ in range(4):  # accumulated, the loss divided by four
        (loss_of(model, given) / 4).backward()
    assert_same(gradients(model), expected)
    handle.remove()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_gradient_checkpointing_changes_nothing(family, reentrant):
    model, given = ready(family), batch(family)
    expected, _ = with_z_loss(model, given)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found, _ = with_z_loss(model, {**given, "use_cache": False})
    # GPT-J multiplies queries and keys in float32, and without a cache from another layout: rounding of 1e-7 in logits
    assert_same(found, expected, tolerance=1e-5 if family == "gptj" else 1e-9)


def in_one_backward_and_in_two(model, given, losses):
    """Gradients of the sum of losses of one forward, and of one after the other."""
    found = []
    for apart in (False, True):
        parts = losses(model(**given).logits)
        for part in parts[:-1] if apart else ():
            part.backward(retain_graph=True)
        (parts[-1] if apart else sum(parts)).backward()
        found.append(gradients(model))
        model.zero_grad()
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_two_losses_of_one_forward_count_the_penalty_once(family, checkpointing):
    model, given = ready(family), {**batch(family), "use_cache": False}
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ZLoss(STRENGTH, loss_scale=2.0).apply(model)
    once, twice = in_one_backward_and_in_two(model, given, lambda y: (y.square().mean(), y.abs().mean()))
    assert_same(twice, once, tolerance=1e-6)  # norms and softmax are in float32
    assert not any(torch.equal(g, torch.zeros_like(g)) for g in once.values())


def test_forwards_that_are_backwarded_together_count_each():
    model, given = ready("llama"), batch("llama")
    expected, _ = with_z_loss(model, given)
    ZLoss(STRENGTH).apply(model)
    (loss_of(model, given) + loss_of(model, given)).backward()
    assert_same(gradients(model), {name: 2 * g for name, g in expected.items()})


@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_a_gradient_of_its_gradient_is_refused_by_torch(family):
    model, given = ready(family), batch(family)
    ZLoss(STRENGTH).apply(model)
    loss = loss_of(model, given)
    weight = model.get_input_embeddings().weight
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_with_a_softcap_it_is_of_the_capped_logits():
    model = ready("llama")
    Softcap(1.0).apply(model)
    assert_as_defined(model, batch("llama"))


def test_training_with_it_lowers_the_logsumexp():
    model, given = ready("llama"), batch("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = ZLoss(1.0).apply(model, optimizer)
    values = []
    for _ in range(20):
        optimizer.zero_grad()
        (0.0 * loss_of(model, given)).backward()
        values.append(handle.measure()["penalty"])
        optimizer.step()
    assert values[-1] < 0.5 * values[0]
