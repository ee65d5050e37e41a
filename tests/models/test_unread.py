"""Attention modules that are not read: named by scan, its file, the command and the report; and one's own reader."""

from __future__ import annotations

import json
import warnings

import pandas as pd
import pytest
import torch
import transformers as tf
from torch import nn
from zoo import GROUPED

from locater import LocaterError, scan
from locater.cli import main
from locater.models import Scan, registry, spectra
from locater.models.howto import ten_lines
from locater.models.unread import NO_SOFTMAX, in_words


class Own(nn.Module):
    """Two heads of four."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def logits(self, q, k):
        return q @ k.mT / 2

    def forward(self, x):
        q, k = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q_proj, self.k_proj))
        return self.logits(q, k).softmax(-1) @ k


class Squared(Own):
    def logits(self, q, k):
        return (q @ k.mT).square()


@pytest.fixture
def mixed():
    """One module that is read among three that are not."""
    return nn.ModuleDict({"layers": nn.ModuleList([Squared(), Own(), Squared(), Squared()])})


def test_scan_warns_once_and_has_the_reasons(mixed):
    with pytest.warns(UserWarning, match=r"^not read: layers.0, layers.2 and 1 other: .*q·k") as caught:
        table = scan(mixed)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert table["module"].unique().tolist() == ["layers.1"]
    assert list(table.attrs["unread"]) == ["layers.0", "layers.2", "layers.3"]
    with pytest.warns(UserWarning, match="not read: layers.0") as caught:
        assert len(list(spectra(mixed))) == 1
    assert caught[0].filename == __file__


def test_of_some_layers_the_unread_are_those_of_these_layers(mixed):
    assert Scan.of(mixed, layers=[1, 2]).unread.keys() == {"layers.2"}


def test_a_scan_says_it_without_a_warning_and_its_file_gives_it_back(mixed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = Scan.of(mixed)
    assert made.unread == made.table.attrs["unread"]
    read = Scan.from_json(json.loads(json.dumps(made.to_json())))
    assert read.unread == read.table.attrs["unread"] == made.unread
    old = {name: value for name, value in made.to_json().items() if name != "unread"}
    assert Scan.from_json(old).unread == {}


@pytest.mark.parametrize("wrong", [3, ["layers.0"], {"layers.0": 1}, "x"])
def test_a_file_whose_unread_are_no_reasons_is_refused(mixed, wrong):
    with pytest.raises(LocaterError, match="unread of the scan must be reasons by module"):
        Scan.from_json(Scan.of(mixed).to_json() | {"unread": wrong})


def test_layers_of_linear_attention_are_said_apart():
    linear = {f"layers.{n}.linear": NO_SOFTMAX for n in range(36)}
    assert in_words(linear) == ["36 layers compute no softmax over q·k"]
    assert in_words({"layers.0.linear": NO_SOFTMAX}) == ["1 layer computes no softmax over q·k"]
    several = in_words({"a": "why", "b": "another", **linear, "c": "why", "d": "why"})
    assert several == ["not read: a, b and 2 others: why (the first)", "36 layers compute no softmax over q·k"]
    assert in_words({"a": "why", "b": "why"}) == ["not read: a and b: why"]
    assert in_words({}) == []


@pytest.fixture
def hybrid(tmp_path):
    """A checkpoint with a layer of linear attention, and the live model."""
    torch.manual_seed(0)
    model = tf.MiniMaxForCausalLM(
        tf.MiniMaxConfig(
            **GROUPED, layer_types=["linear_attention", "full_attention"], head_dim=8, num_local_experts=2, block_size=4
        )
    )
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


def run(*words):
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return left.value.code


def test_live_from_disk_by_the_command_and_in_the_report_they_are_the_same(hybrid, capsys):
    model, folder = hybrid
    live, stored = Scan.of(model), Scan.of(folder)
    assert live.unread == stored.unread == {"model.layers.0.self_attn": NO_SOFTMAX}
    pd.testing.assert_frame_equal(live.table, stored.table)
    assert run("scan", folder, "--json", folder / "scan.json") == 0
    assert "1 layer computes no softmax over q·k" in capsys.readouterr().out
    content = json.loads((folder / "scan.json").read_text())
    assert content["unread"] == live.unread
    content["unread"] = {"vision.0.attn": "its logits <b>differ</b>", "vision.1.attn": "x"} | content["unread"]
    (folder / "scan.json").write_text(json.dumps(content))
    assert run("report", folder / "scan.json", "--out", folder / "report.html") == 0
    assert "not read: vision.0.attn and vision.1.attn: its logits" in (folder / "report.html").read_text()


# ---------------------------------------------------------------------- a reader of one's own


@pytest.fixture
def families(monkeypatch):
    monkeypatch.setattr(registry, "_FAMILIES", list(registry._FAMILIES))


@pytest.fixture
def unknown(tmp_path):
    """A checkpoint of a type that nobody knows: a layer of eight heads, each 64 wide."""
    from safetensors.torch import save_file

    folder = tmp_path / "mine"
    folder.mkdir()
    weights = {f"layers.0.attention.{name}.weight": torch.randn(512, 24) for name in ("query", "key")}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "my_type"}))
    return folder, weights


@pytest.mark.usefixtures("families")
def test_the_error_that_asks_for_a_family_shows_the_lines_and_they_work(unknown, tmp_path, capsys):
    folder, weights = unknown
    assert run("scan", folder) == 2
    sentence, blank, *lines = capsys.readouterr().err.splitlines()
    assert sentence.startswith("locater: ")
    assert "locater.models.register" in sentence
    assert blank == ""
    assert "\n".join(lines).strip() == ten_lines().strip()
    (tmp_path / "my_reader.py").write_text("\n".join(lines))
    assert run("scan", folder, "--reader", tmp_path / "my_reader.py", "--csv", tmp_path / "table.csv") == 0
    table = pd.read_csv(tmp_path / "table.csv")
    query, key = (w.double().unflatten(0, (8, 64)) for w in weights.values())
    traces = torch.einsum("hkd,hkd->h", query, key)
    torch.testing.assert_close(torch.tensor(table["trace"]), traces, rtol=1e-6, atol=1e-6)


def test_from_python_the_lines_are_a_note_of_the_error():
    with pytest.raises(LocaterError, match=r"locater\.models\.register") as caught:
        scan(nn.Linear(3, 3))
    assert caught.value.__notes__ == [ten_lines()]


@pytest.mark.usefixtures("families")
def test_a_reader_may_import_what_lies_beside_it(unknown, tmp_path):
    (tmp_path / "beside_the_reader.py").write_text(ten_lines())
    (tmp_path / "imports.py").write_text("import beside_the_reader")
    assert run("scan", unknown[0], "--reader", tmp_path / "imports.py") == 0
    assert not (tmp_path / "__pycache__" / "imports.pyc").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "--reader takes a Python file, and "),
        ("x = 1\nraise KeyError('heads')\n", "line 2 of reader.py fails: KeyError 'heads'"),
        ("x = (\n", "line 1 of reader.py fails: SyntaxError"),
        ("import no_such_module_anywhere\n", "line 1 of reader.py fails: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "line 1 of reader.py fails: SystemExit 3"),
        ("\0", "reader.py fails: SyntaxError"),
    ],
)
def test_a_reader_that_fails_is_one_sentence(tmp_path, monkeypatch, capsys, content, says):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "reader.py").write_text(content)
    assert run("scan", "model", "--reader", "reader.py") == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1
