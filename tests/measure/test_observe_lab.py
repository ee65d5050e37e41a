"""`observe` on the lab's stacks: the same numbers as two other ways to them, and a training that does not notice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from corpora import batch_at, write_corpus
from fairseq_like import LanguageModel

from locater import LocaterError, observe
from locater.lab import Config, Member, ModelConfig, Stack, load_corpus
from locater.measure.logs import AttentionLog, read_log

MODEL = ModelConfig(width=16, ffn=16, layers=2, heads=2, tokens=8, dropout=0.0)
MEMBERS = [
    Member("plain", seed=0, learning_rate=1e-2),
    Member("k0.5", seed=0, learning_rate=1e-2, scale_strength=1e-2, mean_strength=1e-1),  # a name with a dot
    Member("other", seed=3, learning_rate=3e-3),
]
# two ways to one number in float64, where rounding is 1e-16 and training has made it a thousand times larger at most
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
RECORDED = {
    "rtol": 6e-7,
    "atol": 1e-9,
}  # the lab's records have seven digits: off by 5e-7 of a number that begins with 1


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return load_corpus(write_corpus(tmp_path_factory.mktemp("corpus")), cache=tmp_path_factory.mktemp("cache"))


def stack_of(corpus, members=MEMBERS, model=MODEL, steps=0, **settings):
    config = Config(model=model, batch=6, steps=60, precision="fp64", **settings)
    stack = Stack(config, members, corpus, torch.device("cpu"))
    for _ in range(steps):
        stack.advance()
    return stack


def state_of(stack):
    """All that training carries on, and the last gradients."""
    gradients = {f"gradient.{name}": segment.gradient for name, segment in stack.segments.items()}
    return {name: value.clone() for name, value in (stack.state() | gradients | {"losses": stack.losses}).items()}


def last_batch(stack):
    """The number of the batch that ends an epoch: it is filled up with padding."""
    return -(-stack.train.count // 6) - 1


@pytest.mark.parametrize("norm", ["post", "none", "pre"])
def test_what_observe_sees_is_what_the_lab_records(corpus, norm):
    # the perplexity and the probe on the same blocks: every forward of a record is on them
    stack = stack_of(corpus, model=replace(MODEL, norm=norm), steps=20, probe_blocks=20, valid_blocks=20)
    with observe(stack) as seen:
        records = stack.measure()
    table, tokens = seen.table(), seen.tokens()
    assert (table["queries"] == 2 * 20 * 8).all()
    for record in records:
        rows = table[table["member"] == record["member"]]
        for name in ("entropy", "max_logit"):
            np.testing.assert_allclose(rows[name].to_numpy().reshape(2, 2), record[name], **RECORDED, err_msg=name)
        for layer in range(2):
            found = seen.rho(f"{record['member']}/layers.{layer}")
            np.testing.assert_allclose(found, record["rho"][layer], atol=1e-6)
        if norm != "pre":  # where attention reads a normalised copy of what the lab records
            residual = tokens[tokens["member"] == record["member"]]["rank_residual"]
            np.testing.assert_allclose(residual, record["rank_residual"][:2], **RECORDED)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_what_observe_sees_of_a_member_is_what_it_sees_of_the_same_model_in_torchs_modules(corpus, norm):
    model = replace(MODEL, norm=norm)
    stack = stack_of(corpus, model=model, steps=5)
    inputs, _ = batch_at(stack, 5)
    others = [LanguageModel(model, len(corpus.words), torch.float64).load(stack.parameters(e)) for e in range(3)]
    with observe(stack) as seen:
        stack.forward_backward()
    table, tokens = seen.table(), seen.tokens()
    for e, other in enumerate(others):
        with torch.no_grad(), observe(other) as expected:
            other(inputs[e].view(6, 8))
        for found, wanted in ((table, expected.table()), (tokens, expected.tokens())):
            rows = found[found["member"] == MEMBERS[e].name].drop(columns=["member", "module"])
            wanted = wanted.drop(columns="module")
            assert list(rows.columns) == list(wanted.columns)
            assert (rows["kind"] == "self").all()
            numbers = [name for name in wanted.columns if name != "kind"]
            np.testing.assert_allclose(rows[numbers], wanted[numbers], **CLOSE)


def test_a_stack_of_one_looks_like_any_other_model_and_a_member_does_not_notice_its_neighbours(corpus):
    together = stack_of(corpus, steps=3)
    with observe(together) as everybody:
        together.advance()
    for e, member in enumerate(MEMBERS):
        alone = stack_of(corpus, [member], steps=3)
        with observe(alone) as seen:
            alone.advance()
        table = seen.table()
        assert list(table.columns)[:4] == ["module", "layer", "head", "kind"]
        assert list(table["module"]) == ["layers.0", "layers.0", "layers.1", "layers.1"]
        rows = everybody.table()[everybody.table()["member"] == member.name]
        assert list(rows["module"]) == [f"{member.name}/{module}" for module in table["module"]]
        numbers = ["layer", "head", "entropy", "entropy_share", "max_logit", "logsumexp", "queries"]
        np.testing.assert_allclose(rows[numbers], table[numbers], **CLOSE)
        assert seen.rho("layers.1").shape == everybody.rho(f"{MEMBERS[e].name}/layers.1").shape == (2, 8)


@pytest.mark.parametrize(
    "model", [MODEL, replace(MODEL, dropout=0.1, norm="pre"), replace(MODEL, joint_qk=True, dropout=0.1)]
)
def test_training_is_bitwise_the_same(corpus, model):
    plain, watched = (stack_of(corpus, model=model) for _ in range(2))
    for _ in range(4):
        plain.advance()
    with observe(watched, every=2) as seen:
        for _ in range(4):
            watched.advance()
    for name, value in state_of(plain).items():
        assert torch.equal(value, state_of(watched)[name]), name
    assert (seen.table()["queries"] == 2 * 6 * 8).all()  # the first and the third


def test_padding_at_the_end_of_an_epoch_does_not_count(corpus):
    stack = stack_of(corpus)
    last = last_batch(stack)
    inputs, _ = batch_at(stack, last)
    real = (inputs != 1).sum(1)
    assert (real < inputs.shape[1]).any()
    stack._clock.fill_(last)
    with observe(stack) as seen:
        stack.forward_backward()
    by_member = seen.table().groupby("member", sort=False)["queries"].unique()
    assert [list(queries) for queries in by_member] == [[n] for n in real.tolist()]
    sequences = ((inputs != 1).view(3, -1, 8).sum(2) > 1).sum(1)
    assert (seen.tokens().groupby("member", sort=False)["sequences"].first() == sequences.tolist()).all()


def test_layers_may_be_chosen_and_the_end_leaves_nothing(corpus):
    stack = stack_of(corpus)

    def fail():
        stack.forward_backward()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), observe(stack, layers=[1], queries=[-1, 3]) as seen:
        fail()
    assert not stack._recorders
    assert set(seen.table()["layer"]) == {1}
    assert np.isnan(seen.rho("other/layers.1", 3)[:, 4:]).all()
    stack.forward_backward()  # is not seen
    assert (seen.table()["queries"] == 6 * 8).all()
    with pytest.raises(LocaterError, match=r"these are: plain/layers\.1, k0\.5/layers\.1, other/layers\.1$"):
        seen.rho("layers.1")
    with pytest.raises(LocaterError, match=r"some of \[0, 1\], got \[2\]"), observe(stack, layers=[2]):
        pass


def test_a_member_that_broke_is_not_a_number_and_the_others_are(corpus):
    stack = stack_of(corpus)
    with torch.no_grad():
        stack.parameters(1)["layers.0.fc1.weight"].fill_(torch.nan)
    with observe(stack) as seen:
        stack.forward_backward()
    later = seen.table()[seen.table()["layer"] == 1].set_index("member")
    assert later.loc["k0.5", ["entropy", "max_logit"]].isna().to_numpy().all()
    assert later.loc[["plain", "other"], ["entropy", "max_logit"]].notna().to_numpy().all()


def test_a_log_of_a_stack_has_a_line_a_member_and_layer(corpus, tmp_path):
    stack = stack_of(corpus)
    with AttentionLog(stack, every=2, file=tmp_path / "log.jsonl") as log:
        for step in range(4):
            with log.step(step):
                stack.advance()
    lines = read_log(tmp_path / "log.jsonl")
    assert list(lines["step"].unique()) == [0, 2]
    assert set(lines["module"]) == {f"{member.name}/layers.{layer}" for member in MEMBERS for layer in range(2)}
    assert lines["rank_residual"].notna().all()
