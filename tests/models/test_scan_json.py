"""Scan: every weight is read once, and the file it is written to gives it back, or says what is wrong with it."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from zoo import build

from locater import LocaterError, scan
from locater.cli import main
from locater.models import Scan, attentions


@pytest.fixture
def folder(tmp_path):
    build("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def reads(monkeypatch):
    """The names of the tensors that are read from safetensors."""
    import safetensors
    import transformers.modeling_utils  # noqa: F401 - it keeps the reader it finds, which must not be the spy

    names = []
    original = safetensors.safe_open

    class Spy:
        def __init__(self, *args, **kwargs):
            self.inner = original(*args, **kwargs)

        def __enter__(self):
            self.handle = self.inner.__enter__()
            return self

        def __exit__(self, *args):
            return self.inner.__exit__(*args)

        def keys(self):
            return self.handle.keys()

        def get_tensor(self, name):
            names.append(name)
            return self.handle.get_tensor(name)

    monkeypatch.setattr(safetensors, "safe_open", Spy)
    return names


def test_only_query_key_and_norm_tensors_are_read(folder, reads):
    scan(folder)
    assert reads
    assert all(name.endswith(("q_proj.weight", "k_proj.weight", "input_layernorm.weight")) for name in reads)


def test_table_eigenvalues_and_pictures_take_one_pass_over_the_weights(folder, reads, capsys):
    scan(folder)
    once = list(reads)
    reads.clear()
    with pytest.raises(SystemExit, match="0"):
        main(["scan", str(folder), "--json", str(folder / "scan.json"), "--plot", str(folder / "pictures")])
    assert reads == once
    assert len(list((folder / "pictures").iterdir())) == 4
    assert "8 heads in 2 attention modules" in " ".join(capsys.readouterr().out.split())


def test_a_scan_without_eigenvalues_computes_none(monkeypatch):
    monkeypatch.setattr("locater.qk.QK.eigenvalues", None)
    assert len(scan(build("llama"))) == 8


@pytest.mark.parametrize("name", ["llama", "gemma2", "whisper"])  # with RoPE, with a softcap, with cross-attention
def test_a_file_gives_the_scan_back(name):
    model = build(name)
    made = Scan.of(model, name="org/model", fold_norm=True, tokens=16)
    pd.testing.assert_frame_equal(made.table, scan(model, fold_norm=True, tokens=16))
    written = json.dumps(made.to_json(), allow_nan=False)
    read = Scan.from_json(json.loads(written))
    pd.testing.assert_frame_equal(read.table, made.table)
    assert (read.model, read.offset, read.average_offsets) == ("org/model", 0.0, None)
    assert (read.fold_norm, read.tokens) == (True, 16)
    assert list(read.eigenvalues) == [attention.module for attention in attentions(model)]
    for module, values in made.eigenvalues.items():
        np.testing.assert_allclose(read.eigenvalues[module], values, rtol=5.1e-6)  # six digits
    assert json.dumps(read.to_json()) == written


def test_the_sum_of_eigenvalues_is_the_trace():
    made = Scan.of(build("llama"))
    sums = np.concatenate([values.sum(1) for values in made.eigenvalues.values()])
    np.testing.assert_allclose(sums, made.table["trace"], atol=1e-6)
    assert made.model == "LlamaForCausalLM"


@pytest.fixture
def file():
    return Scan.of(build("llama"), name="org/model").to_json()


def test_a_file_without_eigenvalues_is_a_scan_too(file):
    del file["eigenvalues"]  # as the first versions wrote it
    read = Scan.from_json(file)
    assert read.eigenvalues == {}
    assert len(read.table) == 8


def test_a_file_from_before_softmax_is_a_scan_with_those_columns_empty(file):
    for row in file["heads"]:
        del row["attention_regime"], row["attention_entropy"]
    read = Scan.from_json(file)
    assert read.table["attention_regime"].tolist() == [""] * 8
    assert read.table["attention_entropy"].isna().all()
    assert Scan.from_json(json.loads(json.dumps(read.to_json()))).table.equals(read.table)


def test_a_row_without_softmax_leaves_the_others_as_they_are(file):
    expected = Scan.from_json(file).table
    for row, name in ((0, "attention_regime"), (3, "attention_entropy")):
        del file["heads"][row][name]
    read = Scan.from_json(file).table
    assert read["attention_regime"].tolist() == ["", *expected["attention_regime"][1:]]
    assert read["attention_entropy"].drop(3).equals(expected["attention_entropy"].drop(3))
    assert np.isnan(read["attention_entropy"][3])


MODULE = "model.layers.1.self_attn"
DAMAGES = {
    "no rows": (lambda f: f.update(heads=[]), "this is no scan: its heads must be a list of rows"),
    "a row that is none": (lambda f: f["heads"].insert(2, 7), "row 3 has no module; scan the model again"),
    "a row without a column": (lambda f: f["heads"][4].pop("xi"), "row 5 has no xi; scan the model again"),
    "a word for a number": (lambda f: f["heads"][1].update(xi="3"), "xi of row 2 must be a number or null, got '3'"),
    "a flag for a head": (lambda f: f["heads"][1].update(head=True), "head of row 2 must be a whole number, got True"),
    "a number for a flag": (lambda f: f["heads"][0].update(rope=1), "rope of row 1 must be true or false, got 1"),
    "a number for a name": (lambda f: f["heads"][0].update(module=1), "module of row 1 must be text, got 1"),
    "a number for a regime": (
        lambda f: f["heads"][2].update(attention_regime=1), "attention_regime of row 3 must be text, got 1",
    ),
    "a head of another row": (lambda f: f["heads"][5].update(head=-1), "head of row 6 must be 1, got -1"),
    "a lost row": (lambda f: f["heads"].pop(1), "head of row 2 must be 1, got 2"),
    "no offset": (lambda f: f.pop("offset"), "the scan has no offset"),
    "an offset that is none": (lambda f: f.update(offset=None), "offset of the scan must be a number, got None"),
    "eigenvalues that are none": (lambda f: f.update(eigenvalues=[1]), "eigenvalues of model.layers.0.self_attn must"),
    "a module without": (lambda f: f["eigenvalues"].pop(MODULE), f"eigenvalues of {MODULE} must be pairs of numbers"),
    "ragged ones": (lambda f: f["eigenvalues"][MODULE][0].pop(), f"eigenvalues of {MODULE} must be pairs"),
    "triples": (lambda f: f["eigenvalues"].update({MODULE: [[[1, 2, 3]]] * 4}), f"eigenvalues of {MODULE} must"),
    "a head without": (lambda f: f["eigenvalues"][MODULE].pop(), f"eigenvalues of {MODULE} .* each of 4 heads"),
    "words": (lambda f: f["eigenvalues"].update({MODULE: [[["a", "b"]]] * 4}), f"eigenvalues of {MODULE} must"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_refused_in_a_sentence_that_names_the_row(name, file):
    change, says = DAMAGES[name]
    change(file)
    with pytest.raises(LocaterError, match=f"^{says}") as raised:
        Scan.from_json(file)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [None, [], {}, {"heads": 3}, {"heads": [{"entropy": 1, "max_logit": 2}]}])
def test_what_is_no_scan_is_not_recognised(value):
    assert not Scan.recognises(value)
    with pytest.raises(LocaterError, match="this is no scan"):
        Scan.from_json(value)
