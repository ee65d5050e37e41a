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


def patched(attention):
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def exchanged(attention):
    attention.q_proj = Doubled(attention.q_proj)


@pytest.mark.parametrize("change", [patched, exchanged])
def test_a_part_of_ones_own_is_named_and_the_others_are_read(change):
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED))
    change(model.model.layers[1].self_attn)
    whole = nn.ModuleDict({"first": model, "second": nn.MultiheadAttention(8, 2)})
    found = reading(whole)
    assert [site.name for _, site in found.sites] == ["first.model.layers.0.self_attn", "second"]
    (name, why), *others = found.unread.items()
    assert (name, others) == ("first.model.layers.1.self_attn", [])
    assert "with a forward of its own" in why


def test_a_scale_that_was_changed_after_the_model_was_built_is_read_as_it_is():
    model = randomised(tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)))
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.05
    assert worst(prove(model, {"input_ids": IDS})) < 1e-5
    assert set(scan(model)["logit_scale"]) == {0.05}


def test_heads_of_another_width_than_the_twins_are_refused():
    config = tf.BartConfig(
        d_model=96, encoder_attention_heads=12, decoder_attention_heads=8, encoder_layers=1, decoder_layers=1,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=VOCABULARY, max_position_embeddings=32,
    )  # fmt: skip
    found = {attention.module: attention.heads for attention in attentions(tf.BartModel(config))}
    assert set(found.values()) <= {12, 8}
    assert {name: heads for name, heads in found.items() if name.startswith("encoder")} in (
        {},
        {"encoder.layers.0.self_attn": 12},
    )


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
