"""`locater init`: what a model starts as, from its configuration."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest

from locater import LocaterError, theory
from locater.cli import main
from locater.models.initial import initial
from locater.theory import depth_law, trainability

SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip


@pytest.fixture
def here(capfd, monkeypatch, tmp_path):
    """The command in a folder of its own, where config.json is `SMALL`."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(["init", *arguments])
        return subprocess.CompletedProcess(arguments, leaving.value.code, *capfd.readouterr())

    return call


def test_it_prints_what_the_library_computes(here):
    answer = json.loads(here("config.json", "--tokens", "24", "--json", "-").stdout)
    made = initial(SMALL, "here")
    found = trainability(made.transformer, made.gram(24))
    for name in ("entropy", "cosine", "rank_residual", "signal", "size"):
        np.testing.assert_allclose(answer[name], getattr(found.law, name), rtol=1e-12)
    assert answer["uniform"] == list(found.uniform) == list(range(5))
    assert answer["mends"] == {"gain": pytest.approx(found.gain), "branch": None, "depth": None}
    shown = here(".", "--tokens", "24").stdout
    assert "llama, 5 layers, width 64, 4 heads of 16; 24 tokens" in shown
    assert "Attention starts uniform in every layer" in shown
    assert f"A gain of {found.gain:.3g} on the logits mends attention" in shown
    assert f"{found.law.entropy[0]:.4g}" in shown


def test_what_it_says_to_do_mends_it(here, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"num_hidden_layers": 40}))
    sick = json.loads(here("config.json", "--tokens", "24", "--branch", "30", "--json", "-").stdout)
    assert sick["alike_from"] is not None
    assert any("Tokens are alike" in sentence for sentence in sick["sentences"])
    factors = {"--branch": 30 * sick["mends"]["branch"], "--gain": sick["mends"]["gain"]}
    words = [str(word) for pair in factors.items() for word in pair]
    well = json.loads(here("config.json", "--tokens", "24", *words, "--json", "-").stdout)
    assert well["alike_from"] is None
    assert well["uniform"] == []
    assert well["sentences"] == ["Attention starts neither uniform nor frozen, and tokens stay different."]


def test_frozen_layers_are_named(here):
    said = here("config.json", "--gain", "1e5", "--tokens", "24").stdout
    assert "Attention starts frozen in every layer" in said


def test_norms_of_queries_and_keys_are_what_is_to_be_changed_where_there_are_some(here, tmp_path):
    config = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "qwen3.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "head_dim": 16}))
    done = here("qwen3.json", "--gain", "0.1")
    assert "the gains of the query and key norms each times" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 1},
        {"model_type": "gpt2", "n_embd": 64, "n_head": 1},
        {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4, "initializer_range": 1e3},
        {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4, "initializer_range": 9e5},
    ],
)
def test_what_is_no_number_is_null(here, tmp_path, config):
    small = {"hidden_size": 64, "num_hidden_layers": 2, "n_layer": 2}
    (tmp_path / "config.json").write_text(json.dumps(small | config))
    answer = json.loads(here("config.json", "--tokens", "8", "--json", "-").stdout)
    assert None not in answer["entropy"] + answer["entropy_error"]
    assert (answer["mends"]["gain"] is None) == (config["model_type"] == "bert")  # of which no gain mends anything


@pytest.mark.parametrize(("layers", "tokens"), [(128, 128), (129, 64), (1000, 32)])
def test_deep_models_are_looked_at_with_fewer_tokens(here, tmp_path, monkeypatch, layers, tokens):
    def called(_, gram, **__):
        raise LocaterError(f"a Gram matrix of {gram.shape[-1]} tokens")

    monkeypatch.setattr(theory, "trainability", called)
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"num_hidden_layers": layers}))
    assert f"a Gram matrix of {tokens} tokens" in here("config.json").stderr


def test_a_branch_with_a_norm_behind_it_is_made_smaller_by_that(here, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "olmo2", "num_hidden_layers": 2}))
    said = " ".join(here("config.json", "--branch", "30", "--similarity", "0.8", "--tokens", "16").stdout.split())
    assert "The gains of the norms behind attention and MLP times" in said


def test_gemma_s_norms_whose_weights_start_at_zero_have_gains_of_one_more(here, tmp_path):
    """A factor on these weights would change nothing."""
    config = SMALL | {"model_type": "gemma3_text", "num_hidden_layers": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = " ".join(here("config.json", "--branch", "30", "--similarity", "0.8", "--tokens", "16").stdout.split())
    assert "The gains (1 + weight) of the norms behind attention and MLP times" in said
    said = " ".join(here("config.json", "--gain", "0.1", "--tokens", "16").stdout.split())
    assert "the gains (1 + weight) of the query and key norms each times" in said


def test_the_diagram_is_drawn_and_written(here, tmp_path):
    for name in ("diagram.png", "diagram.svg"):
        done = here("config.json", "--tokens", "16", "--plot", name, "--json", "out.json")
        assert done.returncode == 0
        assert (tmp_path / name).stat().st_size > 1000
    over = json.loads((tmp_path / "out.json").read_text())["diagram"]
    shape = len(over["branch"]), len(over["gain"])
    assert np.shape(over["entropy_share"]) == np.shape(over["cosine"]) == shape
    made = initial(SMALL, "here")
    law = depth_law(made.transformer, made.gram(16), gain=over["gain"][3], branch=over["branch"][2], heads=4)
    assert over["cosine"][2][3] == pytest.approx(float(law.cosine[-1]))
    falling = np.diff(over["entropy_share"][0])
    assert (falling <= 1e-9).all()  # a larger gain has less entropy


@pytest.mark.parametrize(
    ("change", "words", "says"),
    [
        ({"model_type": "resnet"}, (), "how a model of type 'resnet' starts is not known here"),
        ({"num_hidden_layers": 0}, (), "num_hidden_layers must be a whole number from 1 to 1,000, got 0"),
        ({"num_hidden_layers": 10**4}, (), "num_hidden_layers must be a whole number from 1 to 1,000, got 10000"),
        ({}, ("--tokens", "1"), "tokens must be at least 2, got 1"),
        ({}, ("--tokens", "5000"), "--tokens must be at most 1,024 for this model, got 5,000: that would take minutes"),
        ({"num_hidden_layers": 500}, ("--tokens", "512"), "--tokens must be at most "),
        ({}, ("--gain", "-1"), "gain must be a positive number of at most 1e9, got -1"),
        ({}, ("--branch", "nan"), "branch must be a positive number of at most 1e9, got nan"),
        ({}, ("--similarity", "1"), "similarity must be a cosine from 0 to below 1, got 1"),
        ({}, ("--plot", "nowhere/a.png"), "there is no folder nowhere"),
        ({}, ("--plot", "a.jpeg"), "--plot takes a .png or an .svg file, got a.jpeg"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(here, tmp_path, change, words, says):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | change))
    done = here("config.json", *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_a_name_that_is_nothing_is_refused(here):
    done = here("./nothing.json")
    assert done.returncode == 2
    assert "nothing.json" in done.stderr
