"""`locater measure --predict`: what it writes is what `predict` gives for the same sequences."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers as tf
from test_measure_cli import ids_of, run, save_llama, save_tokenizer

from locater.measure import agreement, predict


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_llama(folder / "llama")
    save_tokenizer(folder / "llama", frame=False)
    (folder / "text.txt").write_text(" ".join(f"w{i}" for i in np.random.default_rng(0).integers(0, 40, 400)))
    return folder


def test_the_json_holds_the_predictions_of_the_sequences_that_were_read(place, tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = (place / "llama", "--text", place / "text.txt", "--length", 10, "--device", "cpu", "--json", out)
    assert run(*arguments, "--predict", "--plot", tmp_path / "pictures") == 0
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("general", "separable", "three-number", "rank correlation"))
    assert (tmp_path / "pictures" / "measure-predicted.png").exists()
    written = json.loads(out.read_text())
    model = tf.AutoModel.from_pretrained(place / "llama", dtype=torch.float32).eval()
    expected = predict(model, ids_of((place / "text.txt").read_text()).view(-1, 10).split(8))
    assert list(written["predicted"]) == [one.module for one in expected]
    for one in expected:
        found = written["predicted"][one.module]
        assert found["sequences"] == one.sequences == 20
        # the whole measurement and the prediction are two runs of one model
        np.testing.assert_allclose(found["measured"], one.measured, atol=1e-12)
        for law in ("general", "separable", "walk"):
            np.testing.assert_allclose(found[law], getattr(one, law), atol=1e-6)
        assert found["errors"] == pytest.approx(one.errors(), abs=1e-6)
        assert found["sampling_error"] == pytest.approx(one.sampling_error())
        (softmax,), (its_own,) = found["attention"], one.attention
        assert softmax["query"] == its_own.query == 9
        np.testing.assert_allclose(softmax["entropy"]["measured"], its_own.entropy, atol=1e-6)
        np.testing.assert_allclose(softmax["entropy"]["error"], its_own.entropy_error, atol=1e-6)
        np.testing.assert_allclose(softmax["weights"]["measured"], its_own.weights, atol=1e-6)
        for law, made in its_own.laws.items():
            np.testing.assert_allclose(softmax["entropy"][law], made.entropy, atol=1e-4)
            np.testing.assert_allclose(softmax["weights"][law], made.weights, atol=1e-4)
    rows = {row["law"]: row for row in written["entropy_agreement"]}
    for row in agreement(expected):
        assert rows[row.law]["median"] == pytest.approx(row.median, abs=1e-4)
    assert run(*arguments) == 0
    assert "predicted" not in json.loads(out.read_text())


def test_too_few_sequences_are_told_before_the_model_is_loaded(place, capsys):
    assert run(place / "llama", "--text", place / "text.txt", "--length", 60, "--device", "cpu", "--predict") == 0
    capsys.readouterr()
    (place / "short.txt").write_text(" ".join(["w1"] * 30))
    assert run(place / "llama", "--text", place / "short.txt", "--length", 10, "--predict") == 2
    told = capsys.readouterr().err
    assert "--predict needs at least 4 sequences" in told
    assert told.count("\n") == 1
