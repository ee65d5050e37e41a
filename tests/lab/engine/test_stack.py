"""Stacked members train as they would alone; LocAteR and precision do what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from corpora import assert_close_metrics, batch_at, blocks_at, three_members
from fairseq_like import LanguageModel

from locater import QK, LocaterError
from locater.control import penalty_gradient
from locater.lab import Config, ModelConfig, Stack, members_for
from locater.lab.engine.stack import TokenBlocks

MODEL = ModelConfig(width=16, ffn=16, layers=2, heads=2, tokens=8)
CONFIG = Config(model=MODEL, batch=6, steps=60)
MEMBERS = three_members(1e-2)


def trained(config, members, corpus, steps):
    stack = Stack(config, members, corpus, torch.device("cpu"))
    for _ in range(steps):
        stack.advance()
    return stack


def but_the_keys_bias(name, value):
    """Its gradient is zero, since softmax does not see what all keys share: rounding, which Adam makes a full step."""
    return value.unflatten(0, (3, -1))[[0, 2]] if name.endswith("qkv.bias") else value


@pytest.mark.parametrize(("dropout", "tied"), [(0.0, False), (0.1, False), (0.1, True)])
def test_members_trained_stacked_equal_members_trained_alone(corpus, dropout, tied):
    config = replace(CONFIG, model=replace(MODEL, dropout=dropout, tied=tied), precision="fp64")
    together = trained(config, MEMBERS, corpus, 50)
    for e, member in enumerate(MEMBERS):
        alone = trained(config, [member], corpus, 50)
        for name, value in together.parameters(e).items():
            found, expected = (but_the_keys_bias(name, each) for each in (value, alone.parameters(0)[name]))
            # rounding of 1e-16 in gradients, which Adam divides by their size: as small as 1e-5 of the largest
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        (there,), here = alone.measure(), together.measure()[e]
        assert here["valid_loss"] == pytest.approx(
            there["valid_loss"], rel=2e-6
        )  # records have seven digits, off by 5e-7 each
        assert here["trace"][0] == pytest.approx(there["trace"][0], rel=2e-6, abs=1e-9)


def test_fifty_steps_are_those_of_pytorch_with_adamw_and_the_penalty_in_the_loss(corpus):
    """Data order, loss, penalty, optimizer: all of it, against autograd, nn.MultiheadAttention and torch.optim."""
    config = replace(CONFIG, model=replace(MODEL, dropout=0.0), precision="fp64")
    stack = Stack(config, MEMBERS[1:2], corpus, torch.device("cpu"))
    member = MEMBERS[1]
    other = LanguageModel(config.model, len(corpus.words), torch.float64).load(stack.parameters(0))
    optimizer = torch.optim.AdamW(other.parameters(), lr=member.learning_rate, weight_decay=member.decay)
    for step in range(50):
        inputs, targets = (a[0].view(6, 8) for a in batch_at(stack, step))
        penalty = torch.zeros((), dtype=torch.float64)
        for layer in other.layers:
            w_q, w_k, _ = (w.unflatten(0, (2, 8)) for w in layer.attention.in_proj_weight.chunk(3))
            qk = QK(w_q, w_k)
            penalty = penalty + member.scale_strength * qk.scale().sum()
            penalty = penalty + member.mean_strength * (qk.trace() - member.target).square().sum()
        optimizer.zero_grad()
        (other.loss(inputs, targets) + penalty).backward()
        optimizer.step()
        stack.advance()
    for name, (parameter, rows) in other.names().items():
        found, expected = stack.parameters(0)[name], parameter.detach()[rows]
        torch.testing.assert_close(*(but_the_keys_bias(name, each) for each in (found, expected)), rtol=1e-9, atol=1e-9)


def test_the_penalty_gradient_is_autograds():
    w_q, w_k = (torch.randn(3, 2, 4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    strengths = [torch.rand(3, 1, dtype=torch.float64) for _ in range(3)]
    qk = QK(w_q, w_k)
    penalty = (strengths[0] * qk.scale() + strengths[1] * (qk.trace() - strengths[2]).square()).sum()
    expected = torch.autograd.grad(penalty, (w_q, w_k))
    for found, wanted in zip(penalty_gradient(qk, *strengths), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_every_epoch_takes_every_block_once_in_an_order_of_the_members_own(corpus):
    stack = Stack(CONFIG, MEMBERS, corpus, torch.device("cpu"))
    count = stack.train.count
    steps = -(-count // CONFIG.batch)
    orders = []
    for epoch in range(2):
        taken = torch.cat([blocks_at(stack, epoch * steps + i) for i in range(steps)], dim=1)
        for e in range(len(MEMBERS)):
            assert sorted(taken[e].tolist()) == [*range(count), *[count] * (steps * CONFIG.batch - count)]
        orders.append(taken)
    assert (orders[0][0] == orders[0][1]).all()  # one seed, one order
    assert not (orders[0][0] == orders[0][2]).all()
    assert not (orders[0][0] == orders[1][0]).all()


def test_blocks_are_the_corpus_own(corpus):
    blocks = TokenBlocks(corpus.splits["train"], 8, torch.device("cpu"))
    assert blocks.count == corpus.blocks("train", 8)
    chosen = [0, 3, blocks.count - 1, -1]
    inputs, targets = blocks(torch.tensor([[0, 3, blocks.count - 1, blocks.count]]))
    expected = corpus.batch("train", chosen, 8)
    kept = torch.from_numpy(expected[1]).flatten() != 1
    assert (targets[0] == torch.from_numpy(expected[1]).flatten()).all()
    assert (inputs[0][kept] == torch.from_numpy(expected[0]).flatten()[kept]).all()


def test_a_member_that_breaks_stops_and_the_others_go_on(corpus):
    wild = replace(MEMBERS[0], name="wild", learning_rate=1e30)
    stack = trained(CONFIG, [wild, MEMBERS[2]], corpus, 10)
    record = stack.measure()
    assert 1 <= record[0]["broke_at"] <= 10
    assert "broke_at" not in record[1]
    alone = trained(CONFIG, [MEMBERS[2]], corpus, 10)
    torch.testing.assert_close(stack.parameters(1)["output"], alone.parameters(0)["output"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_single_precision(corpus, precision):
    members = [replace(member, learning_rate=1e-3) for member in MEMBERS]
    exact = trained(CONFIG, members, corpus, 40).measure()
    half = trained(replace(CONFIG, precision=precision), members, corpus, 40).measure()
    # a product of bfloat16 numbers is off by at most 2⁻⁷ of itself, and the loss by much less
    assert_close_metrics(half, exact, valid_loss=4e-3, scale=2e-2)


def test_an_overflow_under_fp16_is_skipped_and_halves_that_members_loss_scale(corpus):
    stack = Stack(replace(CONFIG, precision="fp16"), MEMBERS, corpus, torch.device("cpu"))
    stack.loss_scale[1] = 2.0**40
    before = stack.parameters(1)["output"].clone()
    stack.advance()
    assert stack.updates.tolist() == [1, 0, 1]
    assert stack.loss_scale.tolist() == [128.0, 2.0**39, 128.0]
    assert (stack.parameters(1)["output"] == before).all()
    assert stack.broke_at.tolist() == [-1, -1, -1]


def test_what_is_measured_is_what_a_plain_computation_gives(corpus):
    config = replace(CONFIG, probe_blocks=16, valid_blocks=20)
    stack = trained(config, MEMBERS[:1], corpus, 20)
    (record,) = stack.measure()
    model = LanguageModel(replace(MODEL, dropout=0.0), len(corpus.words)).load(stack.parameters(0)).eval()
    inputs, targets = (torch.from_numpy(a) for a in corpus.batch("valid", range(20), 8))
    with torch.no_grad():
        assert record["valid_loss"] == pytest.approx(float(model.loss(inputs, targets)), rel=1e-5)
        probed = inputs[:16]
        x = 4 * model.embedding(probed) + model.positions
        mask = torch.triu(torch.full((8, 8), -torch.inf), 1)
        for i, layer in enumerate(model.layers):
            centred = x - x.mean(1, keepdim=True)
            assert record["rank_residual"][i] == pytest.approx(
                float((centred.norm(dim=(1, 2)) / x.norm(dim=(1, 2))).mean()), rel=1e-4
            )
            _, weights = layer.attention(x, x, x, attn_mask=mask, average_attn_weights=False)
            entropy = torch.special.entr(weights).sum(-1).mean((0, 2))
            assert record["entropy"][i] == pytest.approx(entropy.tolist(), rel=1e-4)
            omega = weights[:, :, -1].log()  # logits up to a constant, which z does not see
            z = (1 + omega - omega.mean(-1, keepdim=True)) / 8
            share = ((z >= 0) & (z <= 1)).double().mean(0)
            assert torch.tensor(record["rho"][i]).sub(share).abs().max() <= 1 / 16 + 1e-6  # one sequence on the edge
            x = layer(x, mask)


def test_a_batch_larger_than_the_text_is_refused(corpus):
    with pytest.raises(LocaterError, match="larger than the training text"):
        Stack(replace(CONFIG, batch=100_000), MEMBERS, corpus, torch.device("cpu"))


def test_readings_of_the_paper_are_strengths():
    config = Config()
    (figures,) = members_for(config, [0.1], learning_rate=1e-3)
    assert (figures.mean_strength, figures.scale_strength) == (100 / 4096, 0.1 / 4096)
    (printed,) = members_for(config, [0.1], learning_rate=1e-3, reading="printed")
    assert (printed.mean_strength, printed.scale_strength) == (0.1, 100.0)
    (none,) = members_for(config, [None], learning_rate=1e-3)
    assert (none.mean_strength, none.scale_strength) == (0, 0)
    with pytest.raises(LocaterError, match="figures, trace-mean, scale-sum, printed"):
        members_for(config, [0.1], learning_rate=1e-3, reading="tea leaves")
