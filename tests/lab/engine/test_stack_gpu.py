"""On a GPU: what is replayed is what was computed, for every precision, and it is what the CPU computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from corpora import assert_close_metrics, three_members
from torch.nn import functional

from locater.lab import Config, ModelConfig, Stack
from locater.lab.engine.loss import loss_and_gradient, losses

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(width=32, ffn=32, layers=2, heads=2, tokens=16)
CONFIG = Config(model=MODEL, batch=8, steps=60)
MEMBERS = three_members(1e-3)


def trained(config, members, corpus, steps, device="cuda", recorded=True):
    stack = Stack(config, members, corpus, torch.device(device))
    if not recorded:
        stack._warm = -(10**9)
    for _ in range(steps):
        stack.advance()
    return stack


def same(a, b, **tolerance):
    for name, value in a.items():
        torch.testing.assert_close(value.cpu(), b[name].cpu(), **tolerance)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_replaying_gives_the_bits_of_computing(corpus, precision):
    config = replace(CONFIG, precision=precision)
    replayed, computed = (trained(config, MEMBERS, corpus, 30, recorded=flag) for flag in (True, False))
    assert replayed._graph is not None
    assert computed._graph is None
    same(replayed.state(), computed.state(), rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_going_on_from_a_state_gives_the_bits_of_never_stopping(corpus, precision):
    config = replace(CONFIG, precision=precision)
    whole = trained(config, MEMBERS, corpus, 40)
    half = trained(config, MEMBERS, corpus, 17).state()
    other = Stack(config, MEMBERS, corpus, torch.device("cuda"))
    other.load_state({name: value.cpu() for name, value in half.items()})
    for _ in range(23):
        other.advance()
    same(other.state(), whole.state(), rtol=0, atol=0)
    assert other.measure() == whole.measure()


def test_stacked_equals_alone(corpus):
    config = replace(CONFIG, model=replace(MODEL, dropout=0.0))
    together = trained(config, MEMBERS, corpus, 50)
    for e, member in enumerate(MEMBERS):
        alone = trained(config, [member], corpus, 50).parameters(0)
        for name, value in together.parameters(e).items():
            ours, theirs = value.cpu(), alone[name].cpu()
            if name.endswith("qkv.bias"):  # the keys' gradient is rounding, which Adam makes as large as any other
                ours, theirs = (bias.unflatten(0, (3, -1))[[0, 2]] for bias in (ours, theirs))
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_a_gpu_computes_what_a_cpu_computes(corpus):
    """Dropout included, whose masks do not depend on the device."""
    on_cpu, on_gpu = (trained(CONFIG, MEMBERS, corpus, 20, device) for device in ("cpu", "cuda"))
    assert_close_metrics(on_gpu.measure(), on_cpu.measure(), valid_loss=1e-4, scale=1e-3, entropy=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_single_precision(corpus, precision):
    exact = trained(CONFIG, MEMBERS, corpus, 60).measure()
    half = trained(replace(CONFIG, precision=precision), MEMBERS, corpus, 60).measure()
    assert_close_metrics(half, exact, valid_loss=4e-3, scale=2e-2)


def test_a_member_that_breaks_stops_and_the_others_go_on(corpus):
    wild = replace(MEMBERS[0], name="wild", learning_rate=1e30)
    config = replace(CONFIG, precision="bf16")
    record = trained(config, [wild, MEMBERS[2]], corpus, 20).measure()
    assert 1 <= record[0]["broke_at"] <= 20
    assert "broke_at" not in record[1]
    (alone,) = trained(config, [MEMBERS[2]], corpus, 20).measure()
    assert record[1]["valid_loss"] == pytest.approx(alone["valid_loss"], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [32, 128])
def test_the_fused_loss_is_the_one_of_float64(width, dtype):
    torch.manual_seed(0)
    members, tokens, words = 3, 200, 1000
    x = torch.randn(members, tokens, width, device="cuda").to(dtype)
    table = (torch.randn(members, words, width, device="cuda") * width**-0.5).to(dtype)
    targets = torch.randint(words, (members, tokens), device="cuda")
    weights = torch.rand(members, tokens, device="cuda") / tokens
    weights[:, ::7] = 0
    found = loss_and_gradient(x, table, targets, weights)
    wide = [t.double().requires_grad_() for t in (x, table)]
    each = functional.cross_entropy((wide[0] @ wide[1].mT).flatten(0, 1), targets.flatten(), reduction="none")
    expected = torch.autograd.grad((each.view(weights.shape) * weights).sum(), wide)
    torch.testing.assert_close(found.losses.double(), each.detach().view(weights.shape), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses(x, table, targets), found.losses, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip((found.x, found.table), expected, strict=True):
        # exponentials are rounded to bfloat16 before they are summed
        assert (ours - theirs).norm() < 2**-8 * theirs.norm()
        assert (ours - theirs).abs().max() < 2**-6 * theirs.abs().max()
