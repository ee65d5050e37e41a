"""Latent attention (MLA): W_QK over the latents gives the model's own logits; every method acts on it or refuses."""

from __future__ import annotations

import copy

import pandas as pd
import peft
import pytest
import torch
import transformers as tf
from zoo import VOCABULARY, recorded_logits

from locater import LocAteR, LocaterError, scan
from locater.control import DecoupledLocAteR, QKClip, QKDecay, QKNorm, SigmaReparam
from locater.models import attentions

HEADS, NOPE, ROPE, VALUES, LATENT = 4, 10, 8, 6, 20
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 24,
    "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUES, "head_dim": ROPE,
    "max_position_embeddings": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attn_implementation": "eager",
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.5,
    "mscale_all_dim": 0.8, "beta_fast": 4, "beta_slow": 1,
}  # fmt: skip
DENSE = {"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense"] * 2}
SPARSE = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2, "mlp_layer_types": ["dense"] * 2}
MODELS = {
    "DeepSeek V2": ("DeepseekV2", {}),
    "DeepSeek V2, YaRN": ("DeepseekV2", {"rope_parameters": YARN}),
    "DeepSeek V2 Lite, YaRN": ("DeepseekV2", {"q_lora_rank": None, "rope_parameters": YARN}),
    "DeepSeek V3, YaRN": ("DeepseekV3", {"rope_parameters": YARN, "attention_bias": True}),
    "DeepSeek V3, YaRN without mscale": (
        "DeepseekV3", {"rope_parameters": {name: value for name, value in YARN.items() if "mscale" not in name}}
    ),
    "DeepSeek V3, rotating halves": ("DeepseekV3", {"q_lora_rank": None, "rope_interleave": False}),
    "latents as wide as each other": ("DeepseekV3", {"q_lora_rank": LATENT + ROPE}),
    "DeepSeek V3.2": ("DeepseekV32", SPARSE),
    "GLM MoE DSA": ("GlmMoeDsa", SPARSE),
    "GLM-4-MoE-lite": ("Glm4MoeLite", DENSE),
    "MiniCPM3": ("MiniCPM3", {"rope_parameters": YARN}),
    "Youtu": ("Youtu", {}),
    "A.X K1": ("AXK1", {}),
    "Kimi Linear": ("KimiLinear", DENSE),
    "Bailing hybrid": ("BailingHybrid", DENSE),
    "LongCat Flash": (
        "LongcatFlash",
        {"num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 1},
    ),
}  # fmt: skip


def build(name):
    kind, more = MODELS[name]
    torch.manual_seed(0)
    model = getattr(tf, f"{kind}ForCausalLM")(getattr(tf, f"{kind}Config")(**{**SMALL, **more})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens():
    return torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def kept():
    return {name: build(name) for name in ("DeepSeek V3, YaRN", "DeepSeek V2 Lite, YaRN")}


@pytest.fixture(params=["DeepSeek V3, YaRN", "DeepSeek V2 Lite, YaRN"])
def model(request, kept):
    return copy.deepcopy(kept[request.param])


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_rebuilt_logits_are_the_models_own(name):
    model = build(name)
    with recorded_logits(model) as seen:
        model(input_ids=tokens())
    found = attentions(model)
    assert [one.layer for one in found] == [0, 1]
    for attention in found:
        query, key, expected = seen[attention.module]
        unmasked = expected > -1e30
        span = expected[unmasked].max() - expected[unmasked].min()
        wrong = (attention.logits(query, key) - expected)[unmasked].abs().max()
        assert wrong < 1e-5 * span
        assert not attention.qk().square


@torch.no_grad()
def test_w_qk_acts_on_the_latents_at_every_offset(model):
    attention = attentions(model)[0]
    x = torch.randn(1, 6, 32)
    latents = x if attention.query_input is None else attention.query_input(x)
    logits = attention.logits(x)[0]
    for i, j in ((0, 0), (5, 5), (5, 2), (3, 4)):
        w = attention.qk_at(j - i).dense()[:, 0]  # (H, ., .)
        expected = attention.scale * latents[0, i] @ w @ attention.key_input(x)[0, j]
        torch.testing.assert_close(logits[:, i, j], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_scale_is_that_of_both_parts_of_a_head(model):
    attention = attentions(model)[0]
    layers = dict(model.model.layers[0].self_attn.named_modules())
    w_q = layers["q_b_proj" if "q_b_proj" in layers else "q_proj"].weight.unflatten(0, (HEADS, NOPE + ROPE))
    w_uk = layers["kv_b_proj"].weight.unflatten(0, (HEADS, NOPE + VALUES))[:, :NOPE]
    parts = (w_q[:, :NOPE].mT @ w_uk).square().sum((1, 2)), w_q[:, NOPE:].square().sum((1, 2))
    torch.testing.assert_close(attention.qk().scale()[:, 0], parts[0] + parts[1])
    table = scan(model)
    acting = parts[0] + attention.rope.gain**4 * parts[1]  # YaRN's gain is on queries and on keys
    torch.testing.assert_close(torch.tensor(table["scale"][:HEADS].to_numpy()).float(), acting)
    assert table["trace"].isna().all()


def test_adapters_of_latents_and_heads_are_read(kept):
    torch.manual_seed(0)
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(kept["DeepSeek V3, YaRN"]), config).eval()
    with recorded_logits(model) as seen:
        model(input_ids=tokens())
    for attention in attentions(model):
        query, key, expected = seen[attention.module]
        unmasked = expected > -1e30
        found = attention.logits(query, key).detach()[unmasked]
        torch.testing.assert_close(found, expected[unmasked], rtol=1e-4, atol=1e-4)
    reg = LocAteR(model, scale_strength=0.3, mean_strength=0.7)
    reg.penalty().backward()
    expected = gradients(model)
    model.zero_grad()
    reg.add_gradient_()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-3)
    assert {name.split(".")[-4] for name in expected} == {"q_b_proj", "kv_b_proj"}
    assert all("lora" in name for name in expected)


def test_a_checkpoint_gives_the_same_table(model, tmp_path):
    model.save_pretrained(tmp_path)
    pd.testing.assert_frame_equal(scan(tmp_path, offset=-3), scan(model, offset=-3))


# ---------------------------------------------------------------------- control


@pytest.mark.parametrize("frozen", ["", "kv_b_proj", "q_b_proj"])
def test_locaters_gradient_reaches_queries_and_up_projected_keys_alone(model, frozen):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    reg = LocAteR(model, scale_strength=0.3, mean_strength=0.7)
    reg.penalty().backward()
    expected = gradients(model)
    model.zero_grad()
    reg.add_gradient_()
    found = gradients(model)
    # Gram matrices of 18 × 18 in float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    changed = {name.split(".")[-2] for name in found}
    assert changed <= {"q_b_proj", "q_proj", "kv_b_proj"} - {frozen}
    for name, gradient in found.items():
        if "kv_b_proj" in name:
            of_values = gradient.unflatten(0, (HEADS, -1))[:, NOPE:]
            assert not of_values.any()


def test_locater_attached_lowers_the_scale(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    LocAteR(model, scale_strength=0.3, mean_strength=0.7).attach(optimizer)
    before = scan(model)["scale"]
    optimizer.step()
    assert (scan(model)["scale"] < before).all()


def test_qk_clip_leaves_the_shared_key_alone(model):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with recorded_logits(model) as seen:
        model(input_ids=tokens())
    logits = seen["model.layers.0.self_attn"][2]
    top = logits.masked_fill(logits < -1e30, -torch.inf).amax((0, 2, 3))
    threshold = float(top.median())
    QKClip(threshold).apply(model, optimizer)
    model(input_ids=tokens()).logits.sum().backward()
    optimizer.step()
    with recorded_logits(model) as seen:
        model(input_ids=tokens())
    logits = seen["model.layers.0.self_attn"][2]
    after = logits.masked_fill(logits < -1e30, -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(after, top.clamp(max=threshold), rtol=1e-4, atol=1e-4)
    gamma = (threshold / top).clamp(max=1)[:, None, None]
    assert (gamma < 1).any()
    for name, parameter in model.named_parameters():
        ratio = (parameter / before[name]).detach()
        if not name.startswith("model.layers.0.self_attn"):
            continue
        if "q_b_proj" in name or "q_proj" in name:
            ratio = ratio.unflatten(0, (HEADS, -1))
            torch.testing.assert_close(ratio[:, :NOPE], gamma.sqrt().expand(-1, NOPE, ratio.shape[-1]))
            torch.testing.assert_close(ratio[:, NOPE:], gamma.expand(-1, ROPE, ratio.shape[-1]))
        elif "kv_b_proj" in name:
            ratio = ratio.unflatten(0, (HEADS, -1))
            torch.testing.assert_close(ratio[:, :NOPE], gamma.sqrt().expand(-1, NOPE, LATENT))
            assert torch.equal(
                parameter.unflatten(0, (HEADS, -1))[:, NOPE:], before[name].unflatten(0, (HEADS, -1))[:, NOPE:]
            )
        else:
            assert torch.equal(parameter, before[name])


def test_qk_clip_needs_the_queries(model):
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "kv_b_proj" in name], lr=0.1)
    with pytest.raises(LocaterError, match=r"trains no W_Q of model.layers.0.self_attn"):
        QKClip(1.0).apply(model, optimizer)


@pytest.mark.parametrize("own", [{}, {"weight_decay": 0.2}])
def test_qk_decay_is_of_queries_and_up_projected_keys(model, own):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **own)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    QKDecay(0.5).apply(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    rest = 1 - 0.1 * own.get("weight_decay", 0.0)
    for name, parameter in model.named_parameters():
        factor = torch.full_like(parameter, rest)
        if name.split(".")[-2] in ("q_b_proj", "q_proj"):
            factor[:] = 0.95
        elif "kv_b_proj" in name:
            factor.unflatten(0, (HEADS, -1))[:, :NOPE] = 0.95
        torch.testing.assert_close(parameter.detach(), factor * before[name])


@pytest.mark.parametrize("apply", [
    lambda model, _: DecoupledLocAteR(model),
    lambda model, optimizer: QKNorm().apply(model, optimizer),
    lambda model, optimizer: SigmaReparam().apply(model, optimizer),
    lambda model, optimizer: SigmaReparam("all").apply(model, optimizer),
])  # fmt: skip
def test_what_would_change_latents_is_refused(model, apply):
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LocaterError, match=r"model.layers.0.self_attn is that of a latent"):
        apply(model, optimizer)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(optimizer.param_groups) == 1
