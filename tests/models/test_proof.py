"""Read by proof: parts are found in a twin, and what cannot be rebuilt from parts is refused."""

from __future__ import annotations

import copy

import pandas as pd
import pytest
import torch
import transformers as tf
from torch import nn
from zoo import GROUPED, SMALL, VOCABULARY, build

from locater import LocAteR, scan
from locater.errors import LocaterError
from locater.models import attentions, prove
from locater.models import twin as twins
from locater.models.registry import reading

IDS = torch.arange(40).remainder(VOCABULARY).view(2, 20)
SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}


def worst(table: pd.DataFrame) -> float:
    """The largest difference, as a share of the range."""
    return float((table["difference"] / table["range"]).max())


def randomised(model: nn.Module) -> nn.Module:
    twins.randomise(model, seed=3)
    return model.eval()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", **SCALED},
        {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.4, **SCALED},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED},
        {"rope_type": "longrope", **LONG, **SCALED},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ],
    ids=lambda rope: f"{rope['rope_type']}-{len(rope)}",
)
def test_rotary_embeddings_that_are_scaled_are_read_at_any_length(rope, tmp_path):
    config = tf.LlamaConfig(**{**GROUPED, "max_position_embeddings": 16}, rope_parameters=rope)
    model = randomised(tf.LlamaForCausalLM(config))
    for length in (6, 20):  # within the original length, and beyond it
        assert worst(prove(model, {"input_ids": IDS[:, :length]})) < 1e-5
    model.save_pretrained(tmp_path)
    pd.testing.assert_frame_equal(scan(tmp_path, offset=-3), scan(model, offset=-3))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "t5", "modernbert", "phi3", "bloom"])
def test_the_proof_on_a_twin_and_on_the_model_itself(name):
    model = randomised(build(name))
    batch = {"input_ids": IDS}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = IDS[:, :9]
    for table in (prove(model), prove(model, batch)):
        assert worst(table) < 1e-4
        assert set(table["reason"]) == {""}
        assert set(table["module"]) == {attention.module for attention in attentions(model)}


def test_the_model_itself_is_not_run():
    model = build("llama")
    model.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    assert len(scan(model)) == 8


@pytest.mark.parametrize(
    ("config", "stray"),
    [
        (tf.LlamaConfig, {"partial_rotary_factor": 0.5}),
        (tf.MistralConfig, {"partial_rotary_factor": 0.5}),
        (tf.ModernBertConfig, {"num_key_value_heads": 2}),
    ],
)
def test_settings_that_a_model_ignores_are_not_believed(config, stray):
    small = {**SMALL, "pad_token_id": 0} if config is tf.ModernBertConfig else GROUPED
    plain, odd = (randomised(tf.AutoModel.from_config(config(**{**small, **more}))) for more in ({}, stray))
    pd.testing.assert_frame_equal(scan(odd, offset=-2), scan(plain, offset=-2))


class Gated(tf.LlamaForCausalLM):
    """A class of a user's own, whose attention is not what its base's is."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.q_proj = Doubled(layer.self_attn.q_proj)


class Doubled(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x).square()


def test_what_no_part_explains_is_refused_with_the_reason():
    model = Gated(tf.LlamaConfig(**GROUPED))
    with pytest.raises(
        LocaterError, match=r"self_attn is not read: no outputs of .*q_proj\.linear\.weight are as long"
    ):
        scan(model)


def test_a_module_that_is_not_read_is_named_and_the_others_are_read():
    text = {**SMALL, "num_key_value_heads": 4}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**text))
    model.model.layers[1].self_attn.q_proj = Doubled(model.model.layers[1].self_attn.q_proj)
    whole = nn.ModuleDict({"first": model, "second": nn.MultiheadAttention(8, 2)})
    found = reading(whole)
    assert [site.name for _, site in found.sites][-1] == "second"


def test_uses_of_a_shared_module_have_rows_each():
    config = {**SMALL, "embedding_size": 16, "num_hidden_layers": 6, "num_hidden_groups": 2}
    model = tf.AlbertModel(tf.AlbertConfig(**config))
    table = scan(model)
    assert table["layer"].tolist() == [layer for layer in range(6) for _ in range(4)]
    assert table["module"].nunique() == 6
    assert len(LocAteR(model, scale_strength=1.0, mean_strength=1.0).attentions) == 2


def test_a_twin_has_the_classes_of_its_model_and_none_of_its_weights():
    model = build("qwen3")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attentions(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(torch.get_rng_state(), state)
