"""How models of transformers start: what the configuration says, against models that were built."""

from __future__ import annotations

import json
import math
import re
import warnings
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


SPECIAL = {  # so that every number that is read has a value of its own
    "clip_text_model": {"initializer_factor": 3.0},
    "clip_vision_model": {"initializer_factor": 3.0},
    "dinov2": {"layerscale_value": 0.3},
    "gemma2": {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "gpt2": {"n_positions": TOKENS},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.22, "embedding_multiplier": 12.0},
}


def configuration(kind, layers=6, width=256, **more):
    """Small, as its class; initializer_range is not the default's 0.02."""
    heads = width // 64
    sizes = {
        "hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers, "vocab_size": 1000,
        "num_key_value_heads": heads // 2, "head_dim": 64, "intermediate_size": 3 * width, "ffn_dim": 3 * width,
        "hidden_dim": 3 * width, "word_embed_proj_dim": width, "image_size": 56, "patch_size": 8, "pad_token_id": 0,
        "bos_token_id": 0, "eos_token_id": 0, "attention_types": [[["global"], 1], [["local"], layers - 1]],
    }  # fmt: skip
    made = transformers.CONFIG_MAPPING[kind]
    names = {made.attribute_map.get(name, name): value for name, value in sizes.items()}
    known = {name: value for name, value in names.items() if name in made.__dataclass_fields__}
    return made(**known | SPECIAL.get(kind, {}) | more, attn_implementation="eager")


def built(config, seed=0):
    torch.manual_seed(seed)
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)  # of gpt_bigcode
        return transformers.AutoModel.from_config(config).eval()


PLACES = {  # of a weight, by the end of its name; what is fused has several
    r"(c_attn|query_key_value|qkv_proj)\.weight": ("query", "key", "value"),
    r"(q_proj|attention\.query|attention\.q_proj|self\.query|q_lin)\.weight": ("query",),
    r"(k_proj|self\.key|attention\.key|k_lin)\.weight": ("key",),
    r"(v_proj|self\.value|attention\.value|v_lin)\.weight": ("value",),
    r"(o_proj|attn\.c_proj|attention\.output\.dense|out_proj|attention\.dense|self_attn\.dense|out_lin)\.weight": (
        "output",
    ),
    r"(gate_proj|up_proj|gate_up_proj|c_fc|intermediate\.dense|dense_h_to_4h|fc1|fc_in|lin1)\.weight": ("up",),
    r"(down_proj|mlp\.c_proj|\d\.output\.dense|dense_4h_to_h|fc2|fc_out|lin2)\.weight": ("down",),
    r"(embed_tokens|wte|word_embeddings|embed_in|token_embedding)\.weight": ("token",),
    r"(wpe|position_embeddings?|embed_positions)(\.weight)?": ("position",),
    r"token_type_embeddings\.weight": ("shared",),
    r"(cls_token|class_embedding)": ("first",),
    r"(patch_embeddings\.projection|patch_embedding)\.weight": ("patch",),
}
FACTORS = {"gemma": 16.0, "gemma2": 16.0, "gemma3_text": 16.0, "granite": 12.0}  # on embeddings


def expected(made, place):
    attention, mlp = made.transformer.attention, made.transformer.mlp
    if place == "patch":
        return made.token_std / np.sqrt(made.pixels)  # of variance 1
    if place == "token":
        return made.token_std / FACTORS.get(made.family, 1.0)
    if place in ("position", "shared", "first"):
        return getattr(made, f"{place}_std")
    std = getattr(mlp if place in ("up", "down") else attention, place).std
    # LayerNorm1P's gain of 2 is put on what reads it
    return std / 2 if made.family == "nemotron" and place in ("query", "key", "value", "up") else std


def of_a_kind(kind, std, **more):
    """With that `initializer_range`, where the type has one."""
    name = "init_std" if kind == "opt" else "initializer_range"
    return configuration(kind, **more, **({} if kind == "siglip_vision_model" else {name: std}))


@pytest.mark.parametrize("std", [0.02, 0.07])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_kind_of_weight_starts_as_large_as_is_read(kind, std):
    config = of_a_kind(kind, std, layers=2)
    made, seen = initial(config.to_dict(), kind), set()
    for weight, value in built(config).named_parameters():
        if "bias" in weight:
            assert value.abs().max() < (1e-5 if kind == "siglip_vision_model" else 1e-9), weight
        elif re.search(r"norm|\bln_\w+\.weight|layrnorm", weight.lower()):
            assert bool((value == (0 if "gemma" in kind else 1)).all()), weight
        elif "lambda1" in weight:
            np.testing.assert_allclose(value.detach(), made.transformer.branch)
        elif not re.search(r"pooler|mask_token|^(vision_model\.)?head\.", weight):
            places = next(found for pattern, found in PLACES.items() if re.search(pattern + "$", weight))
            seen |= set(places)
            for place in places:
                # a standard deviation of n normals is good to 1/√2n; five of these, and [PAD]'s row of zeros
                allowed = 5 / np.sqrt(2 * value.numel()) + (1 / len(value) if place == "token" else 0)
                assert value.std().item() == pytest.approx(expected(made, place), rel=allowed), weight
    assert {"query", "key", "value", "output", "up", "down"} <= seen
    assert {name for name in ("position", "shared", "first") if getattr(made, f"{name}_std")} <= seen
    assert ({"patch"} if made.pixels else {"token"}) <= seen


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
    last = next(pattern for pattern, places in PLACES.items() if places == ("down",))
    assert {made.transformer.mlp.down.inputs} == {max(s) for n, s in shapes.items() if re.search(last, n)}
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
    for part in norms or [p for one in attentions(model) for p in (one.query, one.key)] if gain != 1 else ():
        part.weight.mul_(gain**0.5)
    given = {"input_ids": torch.randperm(990)[None, :TOKENS] + 5}
    if hasattr(config, "image_size"):
        size = config.image_size if isinstance(config.image_size, list) else [config.image_size] * 2
        given = {"pixel_values": torch.randn(1, config.num_channels, *size)}
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


def compared(config, networks, gain=1.0, draws=48, count=TOKENS):
    """The law, how far it is from the mean of so many networks in entropy and cosine, and what it may be."""
    made = initial(config.to_dict(), config.model_type)
    tokens = made.most_tokens if made.pixels else count
    law = depth_law(made.transformer, made.grams(tokens, count=draws), gain=gain, draws=draws)
    runs = [measured(config, gain, seed) for seed in range(networks)]
    entropy, cosine, _ = (np.mean(part, 0) for part in zip(*runs, strict=True))
    deficit = law.most_entropy - entropy
    return law, np.abs(law.entropy - entropy), np.abs(law.cosine[:-1] - cosine), np.maximum(0.1, 0.05 * deficit)


QUICK = ("gemma2", "olmo2", "nemotron", "exaone4", "granite", "clip_vision_model")  # what others have is in these
VARIANTS = [
    ("stablelm", {"use_parallel_residual": True}),
    ("falcon", {"parallel_attn": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_neo", {"attention_types": [[["local"], 6]], "window_size": 8}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 64}),
]


def far_off(kind, networks, more=None):
    """Whether the law of this type is wrong, and its largest errors."""
    law, error, apart, allowed = compared(of_a_kind(kind, 0.1, **more or {}), networks)
    said = f"{kind}: {error.max():.3f} nats of {law.most_entropy:.2f}, cosine {apart.max():.3f}"
    near = law.entropy_share.min() > 0.95  # where anything predicts it
    wrong = near or (error >= allowed).any() or (apart >= 0.05).any()
    return wrong, f"{said}, share {law.entropy_share.min():.2f} to {law.entropy_share.max():.2f}"


@pytest.mark.parametrize("kind", QUICK)
def test_what_norms_caps_and_multipliers_do_is_predicted(kind):
    wrong, said = far_off(kind, 6)
    assert not wrong, said


def test_every_type_starts_as_is_predicted(full):
    if not full:
        pytest.skip("46 types, two minutes: LOCATER_FULL=1, or make test-full")
    found = [far_off(kind, 16, more) for kind, more in [*((kind, {}) for kind in FAMILIES), *VARIANTS]]
    print("\n".join(said for _, said in found))
    assert not [said for wrong, said in found if wrong]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"is_causal": False}),
        ("mistral", {"is_causal": False, "sliding_window": 5}),
        ("bert", {"is_decoder": True}),
        ("bert", {"is_decoder": True, "is_causal": False}),
        ("vit", {"image_size": [16, 16], "patch_size": [2, 2]}),  # patches of 12 pixels
        ("vit", {"image_size": [12, 48], "patch_size": 4, "num_channels": 1}),
        ("gpt_neox", {"rotary_pct": 0.0, "hidden_act": "gelu_accurate"}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": TOKENS, "max_window_layers": 3}),
        # which its class does not read, and neither the next
        ("mistral", {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 3}),
        ("bert", {"head_dim": 16}),
        ("vit", {"head_dim": 16}),  # which does
        ("llama", {"rms_norm_eps": 1.0}),
    ],
)
def test_what_a_configuration_changes_is_predicted(kind, more, full):
    _, error, apart, allowed = compared(of_a_kind(kind, 0.1, **more), 24 if full else 8)
    assert (error < allowed).all()
    assert (apart < 0.05).all()


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
        ({"model_type": "resnet"}, "how a model of type 'resnet' starts is not known here, only that of arcee"),
        ({}, "names no model_type"),
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
        ({"model_type": "llama", "num_attention_heads": 0}, "its configuration is none of llama: a number in it is 0"),
        ({"model_type": "bert", "hidden_size": 100}, "here: "),
        ({"model_type": "opt", "hidden_size": 2**20, "num_attention_heads": 1}, "heads must be at most 4,096 wide"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "makes layers differ"),
        ({"model_type": "llama", "hidden_size": "wide"}, "here: "),
        ({"model_type": "gpt2", "initializer_range": 0.0}, "initializer_range must be a positive number, got 0.0"),
        ({"model_type": "mistral", "sliding_window": 1}, "a sliding_window of 1 leaves attention one key"),
        (rotary("llama", rope_theta=-5.0), "rope_theta must be a positive number, got -5.0"),
        (rotary("llama", rope_theta=None), "rope_theta must be a positive number, got None"),
        (rotary("llama", partial_rotary_factor=7), "partial_rotary_factor must be a number from 0 to 1, got 7"),
        (rotary("llama", rope_type="linear", factor=0.0), "rope_parameters cannot be read: they make angles"),
        (rotary("llama", rope_type="yarn", factor=2.0, attention_factor=math.nan), "factor that are no numbers"),
        (rotary("llama", rope_type="linear", factor=2.0, partial_rotary_factor=0.5), "rotate 64 of a head's 128"),
        ({"model_type": "llama", "head_dim": 1}, "rope_parameters rotate 2 of a head's 1 coordinates"),
        ({"model_type": "qwen3", "rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by type of layer"),
        ({"model_type": "bert", "type_vocab_size": 0}, "type_vocab_size must be a whole number from 1"),
        ({"model_type": "qwen2", "head_dim": None}, "head_dim must be a whole number from 1 to 4,096, got None"),
        ({"model_type": "ministral"}, "head_dim must be a whole number from 1 to 4,096, got None"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 32}, "and sliding_window is null"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 32}, "layer_types other than"),
        ({"model_type": "vit", "image_size": [64, 64, 3]}, "image_size must be a whole number from 1, or two"),
        ({"model_type": "olmo", "clip_qkv": 8.0}, "clip_qkv is not known here"),
        ({"model_type": "cohere", "use_qk_norm": True}, "use_qk_norm is not known here"),
        ({"model_type": "falcon", "alibi": True}, "alibi is not known here"),
        ({"model_type": "gptj", "rotary_dim": 512}, "rotary_dim must be a whole number from 1 to 256, got 512"),
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


def test_layers_whose_windows_differ_are_alike_up_to_the_smallest():
    config = configuration("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=3)
    made = initial(config.to_dict(), "here")
    assert made.transformer.attention.window is None
    assert made.gram(16).shape == (16, 16)
    with pytest.raises(LocaterError, match="at most the 16 that its sliding window holds: beyond it layers differ"):
        made.gram(17)


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
