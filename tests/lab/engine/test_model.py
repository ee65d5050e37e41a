"""The lab's model is fairseq's: same loss, same gradients, same start."""

from __future__ import annotations

import math

import pytest
import torch
from corpora import batch_at, write_corpus
from fairseq_like import LanguageModel

from locater import LocaterError
from locater.lab import Config, Member, ModelConfig, Stack, load_corpus
from locater.lab.engine.model import body_shapes, embed, hidden_states, initial, positions

CONFIGS = {
    "post": ModelConfig(width=16, ffn=24, layers=2, tokens=8),
    "pre": ModelConfig(width=16, ffn=24, layers=2, tokens=8, norm="pre"),
    "none": ModelConfig(width=16, ffn=24, layers=1, tokens=8, norm="none"),
    "heads": ModelConfig(width=24, ffn=16, layers=2, heads=3, tokens=8),
    "tied": ModelConfig(width=16, ffn=24, layers=1, tokens=8, tied=True),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    return load_corpus(folder, cache=tmp_path_factory.mktemp("cache"))


def stack_of(model, corpus, members=1, **settings):
    config = Config(model=model, batch=6, steps=10, **settings)
    people = [Member(f"m{seed}", seed=seed, learning_rate=1e-3) for seed in range(members)]
    return Stack(config, people, corpus, torch.device("cpu"))


@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_and_every_gradient_are_those_of_the_transcription(kind, corpus):
    from dataclasses import replace

    model = replace(CONFIGS[kind], dropout=0.0)
    stack = stack_of(model, corpus, members=2)
    found = stack.forward_backward()
    for e in range(2):
        other = LanguageModel(model, len(corpus.words)).load(stack.parameters(e))
        inputs, targets = (a[e].view(6, 8) for a in batch_at(stack, 0))
        loss = other.loss(inputs, targets)
        loss.backward()
        torch.testing.assert_close(found[e], loss.detach(), rtol=1e-5, atol=1e-6)
        gradients = {name: s.gradient[e] for name, s in stack.segments.items() if name != "body"}
        gradients |= {name: g[e] for name, g in stack.body(stack.segments["body"].gradient).items()}
        for name, (parameter, rows) in other.names().items():
            expected = parameter.grad[rows]
            gap = (gradients[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
            assert gap < 1e-5, name
            if name.endswith("qkv.bias"):  # the keys' is zero: softmax does not see a shift of all logits
                assert gradients[name].chunk(3)[1].abs().max() < 1e-7


def test_a_model_that_trains_w_qk_itself_is_the_one_with_its_factors(corpus):
    from dataclasses import replace

    model = replace(CONFIGS["heads"], dropout=0.0, layers=1)
    parts = stack_of(model, corpus)
    joint = stack_of(replace(model, joint_qk=True), corpus)
    values, whole = parts.parameters(0), joint.parameters(0)
    with torch.no_grad():
        for name in whole:
            if name in values:
                whole[name].copy_(values[name])
        values["layers.0.qkv.bias"][:48].zero_()
        w_q, w_k, w_v = values["layers.0.qkv.weight"].unflatten(0, (3, 3, 8))
        whole["layers.0.qk.weight"].copy_(w_q.mT @ w_k)
        whole["layers.0.v.weight"].copy_(w_v.flatten(0, 1))
        whole["layers.0.v.bias"].copy_(values["layers.0.qkv.bias"][48:])
    torch.testing.assert_close(joint.forward_backward(), parts.forward_backward(), rtol=1e-5, atol=1e-6)
    for name in ("trace", "scale", "trace_square"):
        torch.testing.assert_close(joint._spectrum()[name], parts._spectrum()[name], rtol=1e-4, atol=1e-5)


def test_parameters_start_as_fairseq_draws_them():
    model = ModelConfig(width=128, ffn=128, layers=1)
    start = initial(model, 33_280, seed=0)
    assert sum(value.numel() for value in start.values()) == 8_619_264  # read off fairseq
    xavier = math.sqrt(6 / 256)
    uniform = {  # largest magnitude of a uniform distribution
        "qkv.weight": xavier / math.sqrt(2),
        "out.weight": xavier,
        **{f"{name}.{kind}": 128**-0.5 for name in ("fc1", "fc2") for kind in ("weight", "bias")},
        "qkv.bias": 128**-0.5,
    }
    for name, bound in uniform.items():
        value = start["layers.0." + name]
        assert value.abs().max() <= bound
        # the standard deviation of n draws of a uniform law spreads by a factor of about sqrt(0.2/n)
        spread = 5 * math.sqrt(0.2 / value.numel())
        assert value.std(correction=0) == pytest.approx(bound / math.sqrt(3), rel=spread), name
    assert start["layers.0.out.bias"].abs().max() == 0
    assert (start["layers.0.attention_norm.weight"] == 1).all()
    for table in ("embedding", "output"):
        rows = start[table][4:]
        assert rows.std() == pytest.approx(128**-0.5, rel=5 * math.sqrt(0.5 / rows.numel()))
    assert (start["embedding"][1] == 0).all()
    assert (start["output"][1] != 0).any()


def test_positions_are_sines_then_cosines_counted_from_two():
    table = positions(5, 8).double()
    for t in range(5):
        for j in range(4):
            angle = (t + 2) * 10_000 ** (-j / 3)
            assert table[t, j] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[t, 4 + j] == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("method", ["none", "qk-norm"])
def test_rotary_positions_turn_queries_and_keys_as_llama_does(corpus, method):
    """In blocks of one token each that is repeated, all differ by their turns alone, QK-norm's gains or no."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    model = ModelConfig(width=16, ffn=16, layers=1, heads=2, tokens=8, positions="rotary", norm="pre", method=method)
    stack = stack_of(model, corpus)
    body, table = stack.body(stack.segments["body"].value), stack.segments["embedding"].value
    for name, value in body.items():
        if name.endswith("_gain"):  # no longer alike for the two coordinates of a pair
            value.copy_(torch.linspace(0.5, 2.0, value.shape[-1]).expand_as(value))
    found = []
    inputs = torch.arange(4, 10).repeat_interleave(8)[None]
    with torch.no_grad():
        hidden_states(body, embed(table, inputs), model, probe=lambda *x: found.append(x[3:]), method=stack.method)
    q, k = (x[0] for x in found[0])  # (B, H, T, K)
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=16, num_attention_heads=2))
    cos, sin = rotary(q, torch.arange(8)[None])
    expected = apply_rotary_pos_emb(q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k), cos, sin)
    for turned, other in zip((q, k), expected, strict=True):
        torch.testing.assert_close(turned, other)
    assert (q[:, :, 0] - q[:, :, 4]).abs().amax(-1).min() > 1e-2


def test_no_token_sees_what_comes_after_it(corpus):
    stack = stack_of(CONFIGS["post"], corpus)
    inputs, _ = batch_at(stack, 0)
    other = inputs.clone()
    other[:, 5::8] = 4 + (other[:, 5::8] + 1) % 20
    body = stack.body(stack.segments["body"].value)
    x, y = (
        hidden_states(body, embed(stack.segments["embedding"].value, i), stack.config.model) for i in (inputs, other)
    )
    same = (x == y).all(-1).view(-1, 8)
    assert same[:, :5].all()
    assert not same[:, 5].any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"width": 15}, "even"),
        ({"width": 2}, "at least 4"),
        ({"heads": 3}, "multiple of heads"),
        ({"norm": "sandwich"}, "post, pre, none"),
        ({"positions": "learned"}, "sines, rotary"),
        ({"positions": "rotary", "joint_qk": True}, "leave joint_qk out"),
        ({"width": 20, "heads": 4, "positions": "rotary"}, "even width, got 5"),
        ({"dropout": 1.0}, r"\[0, 1\)"),
        ({"layers": 0}, "whole number"),
        ({"tokens": 2.5}, "whole number"),
    ],
)
def test_a_model_that_cannot_be_is_refused(change, says):
    with pytest.raises(LocaterError, match=says):
        ModelConfig(**{"width": 16, "ffn": 16, **change})


def test_shapes_and_start_name_the_same_parameters():
    for model in CONFIGS.values():
        start = initial(model, 20, seed=1)
        body = {name: tuple(value.shape) for name, value in start.items() if name not in ("embedding", "output")}
        assert body == body_shapes(model)
