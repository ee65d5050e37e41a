"""One rule, two hosts: what the arena measures is what a user attaches.

A member of the lab's stack, and the same decoder in Hugging Face's classes with the shipped method attached, train
alike.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from corpora import batch_at

from locater import control
from locater.lab import Config, Member, ModelConfig, Stack
from locater.lab.config import METHOD_NAMES

pytest.importorskip("transformers", reason="no transformers: pip install 'locater[hf]'")
from twins import Twin

MODEL = ModelConfig(width=16, ffn=32, layers=2, heads=2, tokens=8, norm="pre", dropout=0.0)
CONFIG = Config(model=MODEL, batch=6, steps=60, precision="fp64")
ROTARY = ("locater", "qk-norm", "qk-clip")  # those that rotary positions may make a difference to
PLAIN = Member("one", learning_rate=3e-2, decay=0.1)
SHIPPED = {
    "qk-norm": (2.0, lambda s: control.QKNorm(initial_gain=math.sqrt(s))),
    "softcap": (0.7, control.Softcap),
    "z-loss": (1e-2, control.ZLoss),
    "sigma-reparam": (0.0, lambda _: control.SigmaReparam("all")),
    "sigma-reparam-qk": (0.0, lambda _: control.SigmaReparam("qk")),
    "qk-clip": (0.3, control.QKClip),
    "qk-decay": (1.0, control.QKDecay),
    "locater-auto": (0.05, lambda s: control.DecoupledLocAteRMethod(change=s)),
    "locater": (0.0, lambda _: control.LocAteRMethod(scale_strength=1e-2, mean_strength=1e-1, target=2.0)),
}


@pytest.fixture(scope="module")
def unprotected(corpus):
    """How the same training ends without a method, by positions."""

    @functools.cache
    def trained(positions):
        stack = Stack(CONFIG.changed(positions=positions), [PLAIN], corpus, torch.device("cpu"))
        start = {name: value.clone() for name, value in stack.parameters(0).items()}
        for _ in range(50):
            stack.advance()
        return start, stack.parameters(0)

    return trained


def test_every_method_of_the_lab_is_compared_with_the_one_that_is_shipped():
    assert {*SHIPPED} == {*METHOD_NAMES, "locater"} - {"none"}


@pytest.mark.parametrize(
    ("method", "positions"),
    [
        *((method, "sines") for method in SHIPPED),
        *((name, "rotary") for name in SHIPPED if "locater" in name or name == "qk-norm"),
    ],
)
def test_a_member_of_a_stack_trains_as_a_hugging_face_model_with_the_shipped_method(
    corpus, unprotected, method, positions, full
):
    """50 steps in float64, weight decay included; a rate that carries some methods to their limits.

    A key's bias moves no softmax: with sines its gradient is rounding, of which Adam makes steps, and it is left out.
    """
    if positions == "rotary" and method != "locater-auto" and not full:
        pytest.skip("two seconds each: LOCATER_FULL=1, or make test-full")
    start, plain = unprotected(positions)
    found = trained_by_both(corpus, method, CONFIG.changed(positions=positions), start, steps=50)
    name = "layers.0.qkv.weight"
    assert (found[name] - plain[name]).norm() > 1e-3 * plain[name].norm()  # the method has acted


@pytest.mark.parametrize("positions", ["sines", "rotary"])
def test_so_it_does_on_sequences_that_are_longer_than_a_sample(corpus, positions):
    config = CONFIG.changed(positions=positions, tokens=100, batch=2)
    stack = Stack(config, [PLAIN], corpus, torch.device("cpu"))
    start = {name: value.clone() for name, value in stack.parameters(0).items()}
    for _ in range(10):
        stack.advance()
    found, plain = trained_by_both(corpus, "locater-auto", config, start, steps=10), stack.parameters(0)
    name = "layers.0.qkv.weight"
    assert (found[name] - plain[name]).norm() > 1e-3 * plain[name].norm()


def trained_by_both(corpus, method, config, start, steps):
    """The parameters that both hosts end with, after a comparison."""
    strength, shipped = SHIPPED[method]
    coupled = {"scale_strength": 1e-2, "mean_strength": 1e-1, "target": 2.0} if method == "locater" else {}
    member = replace(PLAIN, strength=strength, **coupled)
    config = config.changed(method="none" if method == "locater" else method)
    stack = Stack(config, [member], corpus, torch.device("cpu"))
    twin = Twin(config.model, len(corpus.words), "eager" if method == "softcap" else "sdpa")
    twin.load(start).train()
    trained = [p for p in twin.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=member.learning_rate, weight_decay=member.decay)
    applied = shipped(strength).apply(twin, optimizer)
    for step in range(steps):
        inputs, targets = (x[0].view(config.batch, config.model.tokens) for x in batch_at(stack, step))
        optimizer.zero_grad()
        twin.loss(inputs, targets).backward()
        optimizer.step()
        stack.advance()
    found = stack.parameters(0)
    assert found.keys() == twin.parts().keys()
    for name, value in found.items():
        there = twin.parameter(name)
        if config.model.positions == "sines" and name.endswith("qkv.bias"):
            value, there = (x.unflatten(0, (3, -1))[[0, 2]] for x in (value, there))
        torch.testing.assert_close(there, value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    applied.remove()
    return found
