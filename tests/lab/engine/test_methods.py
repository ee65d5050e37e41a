"""Each method of the arena does what it promises, and a stack of members trains as they would alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from corpora import batch_at
from torch.nn import functional

from locater import LocaterError
from locater.control.rules.sigma_reparam import spectral_norms
from locater.lab import Config, Member, ModelConfig, Stack
from locater.lab.config import METHOD_NAMES
from locater.lab.engine.methods import METHODS, Softcap, ZLoss
from locater.lab.engine.model import embed, hidden_states
from locater.measure import max_logits

MODEL = ModelConfig(width=16, ffn=32, layers=2, heads=2, tokens=8, norm="pre", dropout=0.0)
CONFIG = Config(model=MODEL, batch=6, steps=60, clip=1.0, warmup=4, final_rate=0.1, probe_blocks=8)
STRENGTHS = {
    "none": 0.0, "qk-norm": 2.0, "softcap": 5.0, "z-loss": 1e-2, "sigma-reparam": 0.0, "sigma-reparam-qk": 0.0,
    "qk-clip": 0.5, "qk-decay": 1.0, "locater-auto": 0.02,
}  # fmt: skip


def stack_of(method, corpus, *members, **changes):
    members = members or (Member("one", learning_rate=1e-2, strength=STRENGTHS[method]),)
    return Stack(CONFIG.changed(method=method, **changes), members, corpus, torch.device("cpu"))


def advanced(stack, steps):
    for _ in range(steps):
        stack.advance()
    return stack


def seen(stack, step=0):
    """Queries and keys of a training batch, as the attention compares them, layer by layer."""
    found = []
    inputs, _ = batch_at(stack, step)
    low = stack.body(stack.segments["body"].low)
    embedded = embed(stack.segments["embedding"].low, inputs)
    with torch.no_grad():
        hidden_states(
            low, embedded, stack.config.model, probe=lambda *x: found.append(x[3:]), method=stack.method.at_inference()
        )
    return found[:-1]


def test_every_method_has_a_name_a_config_takes():
    assert tuple(METHODS) == METHOD_NAMES
    assert set(STRENGTHS) == set(METHOD_NAMES)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_members_trained_stacked_equal_members_trained_alone(corpus, method):
    strength = STRENGTHS[method]
    members = [Member("a", 0, 1e-2, strength=strength), Member("b", 3, 3e-2, strength=1.5 * strength)]
    together = advanced(stack_of(method, corpus, *members, precision="fp64"), 12)
    for e, member in enumerate(members):
        alone = advanced(stack_of(method, corpus, member, precision="fp64"), 12)
        for name, value in together.parameters(e).items():
            other = alone.parameters(0)[name]
            if name.endswith("qkv.bias"):  # a key's bias moves no softmax: Adam makes steps of its gradient's rounding
                value, other = (x.unflatten(0, (3, -1))[[0, 2]] for x in (value, other))
            torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-9)
        assert together.measure()[e]["entropy"][0] == pytest.approx(alone.measure()[0]["entropy"][0], rel=2e-6)


@pytest.mark.parametrize("method", ["sigma-reparam", "locater-auto", "qk-clip"])
def test_a_run_goes_on_from_its_state_as_if_nothing_had_been(corpus, method):
    whole = advanced(stack_of(method, corpus), 10)
    half = advanced(stack_of(method, corpus), 5)
    state = {name: value.clone() for name, value in half.state().items()}
    resumed = stack_of(method, corpus)
    resumed.load_state(state)
    advanced(resumed, 5)
    assert resumed.measure() == whole.measure()


# ---------------------------------------------------------------------- what each promises


def test_qk_norm_bounds_logits_by_the_root_of_the_head_width_times_its_gains(corpus):
    stack = advanced(stack_of("qk-norm", corpus, Member("wild", learning_rate=0.3, strength=2.0)), 20)
    body = stack.body(stack.segments["body"].value)
    for layer, (q, k) in enumerate(seen(stack)):
        gains = body[f"layers.{layer}.q_gain"] * body[f"layers.{layer}.k_gain"]
        assert max_logits(q[0], k[0]).max() <= math.sqrt(MODEL.head_width) * gains.abs().max() * (1 + 1e-5)


def test_qk_norm_starts_with_its_strength(corpus):
    """Of unit gains and any weights, |logit| ≤ √K · strength, and equality is near for some pair."""
    stack = stack_of("qk-norm", corpus)
    body = stack.body(stack.segments["body"].value)
    torch.testing.assert_close(body["layers.1.q_gain"] * body["layers.1.k_gain"], torch.full((1, 8), 2.0))


@pytest.mark.parametrize("method", ["sigma-reparam", "sigma-reparam-qk"])
def test_the_spectral_norm_under_sigma_reparam_is_its_gamma(corpus, method):
    """Once the power iteration has settled; until then σ₁ is underestimated, and the norm is a little more."""
    stack = advanced(stack_of(method, corpus), 30)
    values = stack.body(stack.segments["body"].value)

    def ratios():
        for name, weight in stack.method.weights(values).items():
            gamma = values.get(name.removesuffix("weight") + "gamma")
            if gamma is not None and name.endswith(".weight"):
                parts = weight.unflatten(1, (3, -1))[:, : gamma.shape[1]] if "qkv" in name else weight[:, None]
                yield torch.linalg.matrix_norm(parts, ord=2) / gamma.abs()

    assert all((ratio >= 1 - 1e-5).all() for ratio in ratios())
    for _ in range(2000):
        stack.method.refresh(values)
    assert all(((ratio - 1).abs() < 1e-3).all() for ratio in ratios())


def test_sigma_reparams_gradient_is_that_of_the_quotient(corpus):
    stack = stack_of("sigma-reparam-qk", corpus, precision="fp64")
    values = {name: v.clone().requires_grad_() for name, v in stack.body(stack.segments["body"].value).items()}
    w, gamma = values["layers.0.qkv.weight"], values["layers.0.qkv.gamma"]
    up = torch.randn(w.shape, dtype=torch.float64)
    found = torch.autograd.grad((stack.method.weights(values)["layers.0.qkv.weight"] * up).sum(), (w, gamma))
    u, v = stack.method._vectors["layers.0.qkv"]
    parts = w.unflatten(1, (3, -1))
    sigma = spectral_norms(w, u, v)
    scaled = torch.cat([(gamma / sigma)[..., None, None] * parts[:, :2], parts[:, 2:]], dim=1).flatten(1, 2)
    expected = torch.autograd.grad((scaled * up).sum(), (w, gamma))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_sigma_reparam_starts_as_the_model_was(corpus):
    """γ is σ₁ of every matrix, so that nothing changes."""
    stack = stack_of("sigma-reparam", corpus, precision="fp64")
    values = stack.body(stack.segments["body"].value)
    w_q = values["layers.1.qkv.weight"][0, :16]
    assert float(values["layers.1.qkv.gamma"][0, 0]) == pytest.approx(float(torch.linalg.matrix_norm(w_q, 2)))
    for name, weight in stack.method.weights(values).items():
        torch.testing.assert_close(weight, values[name], rtol=1e-12, atol=1e-12)


def test_after_qk_clip_no_logit_exceeds_tau_on_the_batch_that_set_it(corpus):
    tau = 0.02
    stack = stack_of("qk-clip", corpus, Member("one", strength=tau))
    assert all(max_logits(q[0], k[0]).max() > 2 * tau for q, k in seen(stack))
    stack.forward_backward()
    values = stack.body(stack.segments["body"].value)
    stack.method.after_update(values, torch.ones(1), torch.ones(()))
    q, k = seen(stack)[0]  # later layers read other states then
    assert max_logits(q[0], k[0]).max() == pytest.approx(tau, rel=1e-4)
    assert (max_logits(q[0], k[0]).amax(0) <= tau * (1 + 1e-4)).all()


def test_qk_clip_leaves_heads_alone_whose_logits_are_below_tau_be_they_all_negative_or_no_numbers(corpus):
    stack = stack_of("qk-clip", corpus, Member("one", strength=1.0))
    values = stack.body(stack.segments["body"].value)
    before = {name: value.clone() for name, value in values.items()}
    for largest in (-3.0, 0.5, math.inf, math.nan):
        stack.method._largest.fill_(largest)
        stack.method.after_update(values, torch.ones(1), torch.ones(()))
    assert all(torch.equal(value, before[name]) for name, value in values.items())


def test_softcap_is_attention_with_capped_logits_and_none_with_a_high_cap():
    torch.manual_seed(0)
    q, k, v = (3 * torch.randn(2, 3, 2, 7, 8, dtype=torch.float64) for _ in range(3))
    caps = torch.tensor([2.0, 1e6], dtype=torch.float64)
    found = Softcap(MODEL, caps).attend(q, k, v, 8**-0.5).unflatten(0, (2, 3))
    s = 2 * torch.tanh(q[0] @ k[0].mT * 8**-0.5 / 2)
    s.masked_fill_(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
    torch.testing.assert_close(found[0], s.softmax(-1) @ v[0], rtol=1e-5, atol=1e-5)  # the softmax is float32's
    plain = functional.scaled_dot_product_attention(q[1], k[1], v[1], is_causal=True)
    torch.testing.assert_close(found[1], plain, rtol=1e-4, atol=1e-4)


def test_the_largest_logit_that_is_measured_under_softcap_is_the_capped_one(corpus):
    members = [Member(f"m{i}", learning_rate=0.3, strength=cap) for i, cap in enumerate((0.05, 5.0))]
    stack = advanced(stack_of("softcap", corpus, *members), 10)
    small, large = ([max(map(max, row["max_logit"]))] for row in stack.measure())
    assert small[0] <= 0.05 < large[0] <= 5.0


def test_z_loss_adds_the_gradient_of_its_penalty():
    torch.manual_seed(0)
    q, k = (torch.randn(2, 3, 2, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    strength = torch.tensor([0.1, 2.0], dtype=torch.float64)
    up = torch.randn(2, *q.shape, dtype=torch.float64)
    one, other = ZLoss(MODEL, strength).compare({}, 0, q, k)
    found = torch.autograd.grad((one * up[0] + other * up[1]).sum(), (q, k))
    s = (q @ k.mT * 8**-0.5).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
    penalty = (strength * s.logsumexp(-1).square().mean((1, 2, 3))).sum()
    expected = torch.autograd.grad((q * up[0] + k * up[1]).sum() + penalty, (q, k))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # it is computed in float32


def test_decay_shrinks_queries_and_keys_and_nothing_else(corpus):
    stack = stack_of("qk-decay", corpus)
    values = stack.body(stack.segments["body"].value)
    before = {name: value.clone() for name, value in values.items()}
    stack.method.before_update(values, torch.tensor([0.1]), torch.zeros(1), torch.ones(()))
    for name, value in values.items():
        parts, old = (x.unflatten(1, (3, -1)) if "qkv.weight" in name else x[:, None] for x in (value, before[name]))
        shrunk = 0.9 if "qkv.weight" in name else 1.0
        torch.testing.assert_close(parts[:, :2], shrunk * old[:, :2])
        assert torch.equal(parts[:, 2:], old[:, 2:])


# ---------------------------------------------------------------------- LocAteR beside the optimizer


def spreads(logits):
    """The standard deviation of a query's logits over the keys up to it (E, B, H, n, n), by head (H,)."""
    count = torch.arange(1, logits.shape[-1] + 1)[:, None]
    mean = logits.tril().sum(-1, keepdim=True) / count
    return ((logits - mean).tril().square().sum((-2, -1)) / (count.sum() - 1)).mean((0, 1)).sqrt()


@pytest.mark.parametrize("positions", ["sines", "rotary"])
def test_no_learning_rate_carries_the_logits_of_a_sample_beyond_the_bound(corpus, positions):
    """Those of the batch that an update was made of, with the weights after it."""
    stack = stack_of("locater-auto", corpus, Member("wild", learning_rate=0.3, strength=1e3), positions=positions)
    most = 0.0
    for _ in range(20):
        stack.advance()
        found = stack.method._heads(stack.body(stack.segments["body"].value)).logits(
            stack.method._states, stack.method._positions
        )
        for layer in range(2):
            spread = spreads(found[:, layer].transpose(1, 2))
            most = max(most, float(spread.max()))
    assert 4.0 < most < 4.9 * 1.001


@pytest.mark.parametrize("positions", ["sines", "rotary"])
def test_auto_holds_what_runs_away_without_it(corpus, positions):
    wild = {"learning_rate": 0.3}
    free = advanced(stack_of("none", corpus, Member("one", **wild), positions=positions), 40).measure()[0]
    auto = Member("one", strength=0.1, **wild)
    held = advanced(stack_of("locater-auto", corpus, auto, positions=positions), 40).measure()[0]
    assert max(map(max, held["max_logit"])) < 0.5 * max(map(max, free["max_logit"]))


# ---------------------------------------------------------------------- schedule


def test_the_learning_rate_rises_to_what_it_is_and_falls_along_a_cosine(corpus):
    stack = stack_of("none", corpus, steps=24)
    factors = []
    for step in range(24):
        stack._clock.fill_(step)
        factors.append(float(stack._schedule()))
    assert factors[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert factors[13] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert factors[23] == pytest.approx(0.1)


def test_a_constant_rate_is_the_default(corpus):
    stack = stack_of("none", corpus, warmup=0, final_rate=1.0)
    stack._clock.fill_(17)
    assert float(stack._schedule()) == 1.0


def test_a_clipped_gradient_has_at_most_the_norm(corpus):
    norms = []
    for clip in (None, 1e-3):
        stack = stack_of("none", corpus, clip=clip)
        stack.forward_backward()
        stack.update()
        norms.append(math.sqrt(sum(float(s.gradient.square().sum()) for s in stack.segments.values())))
    assert norms[0] > 0.1
    assert norms[1] == pytest.approx(1e-3, rel=1e-4)


def test_methods_are_released_in_the_last_part_of_training(corpus):
    stack = stack_of("locater-auto", corpus, steps=20, release=0.25)
    holds = []
    for step in range(20):
        stack._clock.fill_(step)
        holds.append(float(stack._strength_factor()))
    assert holds[:16] == pytest.approx([1.0] * 16)
    assert holds[16:] == pytest.approx([0.8, 0.6, 0.4, 0.2])


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "magic"}, "method must be one of none, qk-norm"),
        ({"method": "qk-clip", "joint_qk": True}, "qk-clip acts on queries and keys apart"),
        ({"method": "z-loss", "precision": "fp16"}, "train it in bf16 or fp32"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"clip": "much"}, "clip must be a finite number"),
        ({"final_rate": 2.0}, "final_rate must be a number from 0 to 1"),
        ({"release": -1}, "release must be a number from 0 to 1"),
        ({"warmup": 1.5}, "warmup must be a whole number"),
        ({"unit": "syllables"}, "unit must be one of words, bytes"),
        ({"details": 1}, "details must be true or false"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, words):
    with pytest.raises(LocaterError, match=words):
        CONFIG.changed(**changes)


def test_a_members_strength_must_be_a_number():
    with pytest.raises(LocaterError, match="strength must be a finite number that is not negative"):
        replace(Member("one"), strength=math.nan)
