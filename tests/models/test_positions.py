"""Positions that act through queries and keys: parts found in a twin hold in a model of another size and length."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch
import transformers as tf

from locater.errors import LocaterError
from locater.models import GridKeys, QueryGain, attentions, prove
from locater.models import twin as twins

WIDE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 40}
SOUND = torch.randn(2, 90, 16, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(60, (2, 45), generator=torch.Generator().manual_seed(0))
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 9}


def growing() -> tuple[torch.nn.Module, dict]:
    config = tf.Llama4TextConfig(
        **WIDE, num_key_value_heads=3, head_dim=8, vocab_size=60, intermediate_size_mlp=40, num_local_experts=2,
        no_rope_layers=[1, 0], floor_scale=7, attn_scale=0.3, attn_temperature_tuning=True,
    )  # fmt: skip
    return tf.Llama4TextModel(config), {"input_ids": IDS}


def growing_latent() -> tuple[torch.nn.Module, dict]:
    config = tf.AutoConfig.for_model(
        "mistral4", **WIDE, **LATENT, vocab_size=60, n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1,
        moe_intermediate_size=16, num_key_value_heads=6, rope_parameters={**YARN, "llama_4_scaling_beta": 0.4},
    )  # fmt: skip
    return tf.AutoModel.from_config(config), {"input_ids": IDS}


def sines() -> tuple[torch.nn.Module, dict]:
    config = tf.AutoConfig.for_model(
        "parakeet_encoder", **WIDE, num_key_value_heads=6, subsampling_conv_channels=8, num_mel_bins=16
    )
    model = tf.AutoModel.from_config(config)
    return model, {"input_features": SOUND.repeat(1, 4, 1)}  # an eighth of its frames are left


def table() -> tuple[torch.nn.Module, dict]:
    """With the distances of its default configuration, which are not the same to the left and to the right."""
    config = tf.AutoConfig.for_model("wav2vec2-bert", **WIDE, feature_projection_input_dim=16, add_adapter=False)
    return tf.AutoModel.from_config(config), {"input_features": SOUND}


def grid() -> tuple[torch.nn.Module, dict]:
    config = tf.AutoConfig.for_model(
        "sam_vision_model", hidden_size=48, num_hidden_layers=2, num_attention_heads=6, mlp_dim=40, image_size=48,
        patch_size=8, window_size=4, global_attn_indexes=[1], output_channels=8,
    )  # fmt: skip
    image = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    return tf.AutoModel.from_config(config), {"pixel_values": image}


def buckets() -> tuple[torch.nn.Module, dict]:
    """More than a short decoder fills, so that those of both directions would be like those of one."""
    config = tf.T5Config(
        vocab_size=60, d_model=48, d_kv=8, num_layers=1, num_heads=6, d_ff=40, relative_attention_num_buckets=128,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = IDS.repeat(1, 3)
    return tf.T5Model(config), {"input_ids": ids, "decoder_input_ids": ids}


def latent_norms() -> tuple[torch.nn.Module, dict]:
    """Whose eps is the model's, and counts where latents are small."""
    config = tf.AutoConfig.for_model(
        "glm5_next_text", **WIDE | {"num_hidden_layers": 4}, **LATENT | {"qk_rope_head_dim": 0}, vocab_size=60,
        num_key_value_heads=6, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, index_topk=64,
        moe_intermediate_size=16, index_head_dim=16, index_n_heads=2, linear_head_dim=8, linear_num_heads=3,
        index_kpool=4, rms_norm_eps=1e-4, pad_token_id=0,
        layer_types=["full_attention", "linear_attention", "full_attention", "full_attention"],
    )  # fmt: skip
    return tf.AutoModel.from_config(config), {"input_ids": IDS, "use_cache": False}


MADE = [growing, growing_latent, sines, table, grid, buckets, latent_norms]


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__)
def test_what_a_twin_shows_holds_for_the_model_itself(made):
    model, batch = made()
    twins.randomise(model, seed=11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "kv_a_proj" in name:
                parameter.mul_(0.03)
    proof = prove(model.eval(), batch)
    assert set(proof["reason"]) <= {"", "it computes no softmax over q·k"}
    assert float((proof["difference"] / proof["range"]).max()) < 1e-5


def test_queries_grow_by_the_logarithm_of_how_often_their_position_holds_the_length():
    gain = QueryGain(strength=0.5, length=4, shift=1)
    assert gain(torch.tensor([0, 2, 3, 6, 7, 11])).tolist() == pytest.approx(
        [1, 1, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(3), 1 + 0.5 * math.log(4)]
    )


def test_an_image_of_another_size_is_refused():
    rows = torch.ones(5, 4)
    with pytest.raises(LocaterError, match="3 × 3 patches, not of 8"):
        GridKeys(rows, rows)(torch.ones(1, 1, 1, 8, 4), torch.ones(1, 1, 1, 8, 4), (rows, rows))


def test_a_proof_of_several_models_has_rows_of_each():
    parts = {"sound": table()[0], "text": growing()[0], "own": torch.nn.MultiheadAttention(8, 2)}
    proof = prove(torch.nn.ModuleDict(parts))
    assert isinstance(proof, pd.DataFrame)
    assert {name.partition(".")[0] for name in proof["module"]} == set(parts)
    assert "give prove a batch" in proof.set_index("module").loc["own", "reason"]
    assert float((proof["difference"] / proof["range"]).max()) < 1e-4


def test_a_class_that_is_patched_after_its_proof_is_proven_again(monkeypatch):
    model, _ = growing()
    assert len(attentions(model)) == 2
    kind = type(model.layers[0].self_attn)
    monkeypatch.setattr(kind, "forward", lambda _, hidden_states, *__, **___: (hidden_states, None))
    with pytest.raises(LocaterError, match="no softmax over q·k"):
        attentions(model)
