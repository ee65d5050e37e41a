"""How models of transformers start: what the configuration says, against models that were built."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from locater import LocaterError
from locater.models import attentions
from locater.models.initial import FAMILIES, initial, open_initial
from locater.theory import depth_law, trainability

TOKENS = 64


def configuration(kind, layers=6, width=256, **more):
    """Small, as a configuration and as its class; initializer_range is not the default's 0.02."""
    heads = width // 64
    common = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers, "vocab_size": 1000}
    inner = {"intermediate_size": 3 * width}
    grouped = common | inner | {"num_key_value_heads": heads // 2}
    sizes = {
        "gpt2": {"n_embd": width, "n_head": heads, "n_layer": layers, "vocab_size": 1000, "n_positions": TOKENS,
                 "bos_token_id": 0, "eos_token_id": 0},
        "llama": grouped, "mistral": grouped, "qwen2": grouped, "qwen3": grouped | {"head_dim": 64},
        "bert": common | inner, "gpt_neox": common | inner,
        "opt": common | {"ffn_dim": 3 * width, "word_embed_proj_dim": width},
        "vit": common | inner | {"image_size": 56, "patch_size": 8},
    }  # fmt: skip
    return transformers.CONFIG_MAPPING[kind](**sizes[kind] | more, attn_implementation="eager")


def built(config, seed=0):
    torch.manual_seed(seed)
    transformers.logging.set_verbosity_error()
    return transformers.AutoModel.from_config(config).eval()


PLACES = {  # of a weight, by the end of its name; what is fused has several
    r"(q_proj|attention\.query|attention\.q_proj|self\.query)\.weight": ("query",),
    r"(k_proj|self\.key)\.weight": ("key",),
    r"(v_proj|self\.value)\.weight": ("value",),
    r"(c_attn|query_key_value)\.weight": ("query", "key", "value"),
    r"(o_proj|attn\.c_proj|attention\.output\.dense|self_attn\.out_proj|attention\.dense)\.weight": ("output",),
    r"(gate_proj|up_proj|c_fc|intermediate\.dense|dense_h_to_4h|fc1)\.weight": ("up",),
    r"(down_proj|mlp\.c_proj|\d\.output\.dense|dense_4h_to_h|fc2)\.weight": ("down",),
    r"(embed_tokens|wte|word_embeddings|embed_in)\.weight": ("token",),
    r"(wpe|position_embeddings|embed_positions)(\.weight)?": ("position",),
    r"token_type_embeddings\.weight": ("shared",),
    r"cls_token": ("first",),
    r"patch_embeddings\.projection\.weight": ("patch",),
}


def expected(made, place):
    attention, mlp = made.transformer.attention, made.transformer.mlp
    if place == "patch":
        return made.token_std / np.sqrt(3 * 8 * 8)  # pixels of a patch, of variance 1
    if place in ("token", "position", "shared", "first"):
        return getattr(made, f"{place}_std")
    return getattr(mlp if place in ("up", "down") else attention, place).std


@pytest.mark.parametrize("std", [0.02, 0.07])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_kind_of_weight_starts_as_large_as_is_read(kind, std):
    name = "init_std" if kind == "opt" else "initializer_range"
    config = configuration(kind, layers=3, **{name: std})
    made, seen = initial(config.to_dict(), kind), set()
    for weight, value in built(config).named_parameters():
        if "bias" in weight:
            assert not value.any(), weight
        elif "norm" in weight.lower() or re.search(r"ln_\w+\.weight", weight):
            assert bool((value == 1).all()), weight
        elif "pooler" not in weight:
            places = next(found for pattern, found in PLACES.items() if re.search(pattern + "$", weight))
            seen |= set(places)
            for place in places:
                # a standard deviation of n normals is good to 1/√2n; five of these, and [PAD]'s row of zeros
                allowed = 5 / np.sqrt(2 * value.numel()) + (1 / len(value) if place == "token" else 0)
                assert value.std().item() == pytest.approx(expected(made, place), rel=allowed), weight
    assert {"query", "key", "value", "output", "up", "down"} <= seen
    assert {name for name in ("position", "shared") if getattr(made, f"{name}_std")} <= seen


@pytest.mark.parametrize("kind", FAMILIES)
def test_widths_and_heads_are_those_of_the_model_built(kind):
    config = configuration(kind, layers=2)
    made = initial(config.to_dict(), kind)
    model = built(config)
    one = attentions(model)[0]
    attention = made.transformer.attention
    assert made.transformer.layers == 2
    assert (attention.query.inputs, attention.head_width) == (256, 64)
    assert attention.key_heads * attention.head_width == one.key.weight.reshape(-1, 256).shape[0]
    shapes = {name: value.shape for name, value in model.named_parameters() if value.ndim == 2}
    inner = [max(s) for n, s in shapes.items() if re.search(r"(down_proj|fc2|h_to_h|mlp.c_proj|\d.output.dense)", n)]
    assert {made.transformer.mlp.down.inputs} == set(inner)
    if attention.rotary:
        rope = one.rope.frequencies.numpy()
        np.testing.assert_allclose(attention.rotary, rope, rtol=1e-5)
    else:
        assert one.rope is None


@torch.no_grad()
def measured(config, gain, seed):
    """Entropy, mean cosine and rank residual of one network at every depth."""
    model = built(config, seed)
    norms = [part for name, part in model.named_modules() if name.endswith(("q_norm", "k_norm"))]
    for part in norms or [p for one in attentions(model) for p in (one.query, one.key)]:
        part.weight.mul_(gain**0.5)
    given = {"input_ids": torch.randperm(990)[None, :TOKENS] + 5}
    if config.model_type == "vit":
        given = {"pixel_values": torch.randn(1, 3, 56, 56)}
    out = model(**given, output_attentions=True, output_hidden_states=True)
    entropy = [torch.special.entr(p.double()).sum(-1).mean().item() for p in out.attentions]
    cosine, residual = [], []
    for x in out.hidden_states[:-1]:
        residual.append(((x - x.mean(1, keepdim=True)).norm() / x.norm()).item())
        x = torch.nn.functional.normalize(x[0].double(), dim=-1)
        cosine.append(((x.sum(0) ** 2).sum() - len(x)).item() / (len(x) * (len(x) - 1)))
    return np.array(entropy), np.array(cosine), np.array(residual)


@pytest.mark.parametrize(
    ("kind", "gain"),
    [("gpt2", 12), ("gpt2", 50), ("llama", 12), ("llama", 50), ("bert", 12), ("bert", 50), ("vit", 12), ("vit", 40),
     ("opt", 20), ("gpt_neox", 20), ("qwen3", 2)],
)  # fmt: skip
def test_entropy_and_likeness_of_every_layer_are_predicted(kind, gain, full):
    """Entropies from nine tenths of ln n to a quarter. A network of four heads strays; so six are averaged."""
    config = configuration(kind, layers=24 if full else 6)
    made = initial(config.to_dict(), kind)
    law = depth_law(made.transformer, made.gram(50 if kind == "vit" else TOKENS), gain=gain, draws=48)
    runs = [measured(config, gain, seed) for seed in range(16 if full else 6)]
    entropy, cosine, residual = (np.mean(part, 0) for part in zip(*runs, strict=True))
    deficit = law.most_entropy - entropy
    assert (0.15 * law.most_entropy < entropy).all()
    assert deficit[0] > 0.1 * law.most_entropy  # near ln n anything predicts
    assert (np.abs(law.entropy - entropy) < np.maximum(0.1, 0.05 * deficit)).all()
    assert (np.abs(law.cosine[:-1] - cosine) < 0.05).all()
    assert (np.abs(law.rank_residual[:-1] - residual) < 0.05).all()


def test_a_norm_s_eps_counts_where_queries_are_as_small():
    config = configuration("qwen3", layers=2, initializer_range=1e-4)
    made = initial(config.to_dict(), "qwen3")
    law = depth_law(made.transformer, made.gram(TOKENS), draws=8)
    runs = [measured(config, 1.0, seed)[0] for seed in range(3)]
    assert np.abs(law.entropy - np.mean(runs, 0)).max() < 0.02
    without = replace(made.transformer, attention=replace(made.transformer.attention, qk_norm_eps=0.0))
    assert depth_law(without, made.gram(TOKENS), draws=8).entropy[0] < law.entropy[0] - 0.1


def test_llama_s_own_embedding_rotates_all_coordinates():
    """transformers ignores a partial_rotary_factor there; GPT-NeoX's does not."""
    for kind, pairs in (("llama", 64), ("gpt_neox", 12)):
        heads = initial(rotary(kind, partial_rotary_factor=0.25), "here").transformer.attention
        assert len(heads.rotary) == pairs


def test_what_mends_frozen_attention_leaves_tokens_different():
    """Attention that is no longer frozen mixes tokens: both are solved for."""
    made = initial(configuration("bert").to_dict(), "bert").scaled(1000.0, 20.0)
    found = trainability(made.transformer, made.gram(32))
    assert found.frozen == tuple(range(6))
    assert found.alike_from is None
    mended = made.scaled(found.gain, found.branch)
    again = trainability(mended.transformer, mended.gram(32))
    assert (again.uniform, again.frozen, again.alike_from) == ((), (), None)


def test_a_folder_a_file_and_a_configuration_are_one(tmp_path):
    config = configuration("llama")
    config.save_pretrained(tmp_path)
    made = initial(config.to_dict(), "here")
    assert open_initial(str(tmp_path)) == made
    assert open_initial(str(tmp_path / "config.json")) == made


def test_windows_and_stretched_rotary_embeddings_are_read():
    made = initial(configuration("mistral", sliding_window=7).to_dict(), "here")
    assert made.transformer.attention.window == 7
    stretched = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    rates = [
        initial(configuration("llama", **more).to_dict(), "here").transformer.attention.rotary
        for more in ({}, {"rope_parameters": stretched})
    ]
    np.testing.assert_allclose(np.array(rates[0]) / 4, rates[1], rtol=1e-5)


def rotary(kind, **given):
    return {"model_type": kind, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, **given}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "resnet"}, "how a model of type 'resnet' starts is not known here, only that of bert, gpt2"),
        ({}, "how a model of type None starts is not known"),
        ({"model_type": ["llama"]}, "is not known"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1 to 1,000"),
        ({"model_type": "llama", "num_hidden_layers": 10_000}, "from 1 to 1,000, got 10000"),
        ({"model_type": "gpt2", "n_layer": 0}, "n_layer must be a whole number from 1"),
        ({"model_type": "llama", "hidden_act": "sine"}, "hidden_act 'sine' is not known here"),
        ({"model_type": "llama", "num_key_value_heads": 5}, "key_heads must divide the 32 heads, got 5"),
        (
            {"model_type": "llama", "initializer_range": -1.0},
            "here: its configuration is none of llama: Validation error",
        ),
        ({"model_type": "bert", "hidden_size": 100}, "here: "),
        ({"model_type": "opt", "hidden_size": 2**20, "num_attention_heads": 1}, "heads must be at most 4,096 wide"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "makes layers differ"),
        ({"model_type": "llama", "hidden_size": "wide"}, "here: "),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3},
            "only some layers have a sliding",
        ),
        ({"model_type": "gpt2", "initializer_range": 0.0}, "initializer_range must be a positive number, got 0.0"),
        ({"model_type": "mistral", "sliding_window": 1}, "a sliding_window of 1 leaves attention one key"),
        (rotary("llama", rope_theta=-5.0), "rope_theta must be a positive number, got -5.0"),
        (rotary("llama", rope_theta=None), "rope_theta must be a positive number, got None"),
        (rotary("llama", partial_rotary_factor=7), "must be a positive number of at most 1, got 7"),
        (rotary("llama", rope_type="yarn", factor=2.0, attention_factor=1e308), "rope_parameters cannot be read"),
        (
            rotary("gpt_neox", rope_type="yarn", factor=4.0, partial_rotary_factor=0.25),
            "scale a part of the coordinates",
        ),
    ],
)
def test_what_is_no_transformer_known_is_refused_in_one_sentence(config, words):
    with pytest.raises(LocaterError) as refused:
        initial(config, "here")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_that_are_no_configuration_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("[1, 2]")
    for name in (tmp_path, tmp_path / "config.json", tmp_path / "nothing" / "at" / "all"):
        with pytest.raises(LocaterError):
            open_initial(str(name))


# ---------------------------------------------------------------------- points of the diagram, by training


def trained(config, gain, branch, steps=200):
    """The loss at telling each position its neighbour's token, which attention alone can do."""
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config)
    with torch.no_grad():
        for one in attentions(model):
            one.query.weight.mul_(gain**0.5)
            one.key.weight.mul_(gain**0.5)
        for name, value in model.named_parameters():
            if name.endswith("output.dense.weight"):
                value.mul_(branch)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        ids = torch.randint(1, 32, (32, 16))
        logits = model(input_ids=ids).logits[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.mean(losses[-10:])


def test_what_starts_frozen_or_alike_does_not_train_and_what_starts_between_does(full):
    """Points of the diagram of a Post-LN encoder of six layers; guessing costs ln 31 = 3.43."""
    if not full:
        pytest.skip("twelve seconds: LOCATER_FULL=1, or make test-full")
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, vocab_size=32,
        initializer_range=0.1, max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    made = initial(json.loads(config.to_json_string()), "here")

    def said(gain, branch):
        scaled = made.scaled(gain, branch)
        return trainability(scaled.transformer, scaled.gram(16))

    healthy, frozen, alike = said(3.0, 0.3), said(300.0, 1.0), said(1.0, 3.0)
    assert not healthy.uniform
    assert not healthy.frozen
    assert healthy.alike_from is None
    assert len(frozen.frozen) == 6
    assert alike.alike_from is not None
    assert trained(config, 3.0, 0.3) < 0.3
    assert trained(config, 300.0, 1.0) > 3
    assert trained(config, 1.0, 3.0) > 2.5
    mended = trained(config, 1.0, 3.0 * alike.branch)
    assert mended < 0.3
