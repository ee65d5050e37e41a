"""Attention sinks, logits without a key: what is measured is the softmax over keys and sink that the model computes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers as tf
from materialised import materialised
from zoo import GROUPED, VOCABULARY

from locater import LocaterError, observe
from locater.control import Softcap, ZLoss
from locater.hooks._calls import of_interface
from locater.measure import attention_statistics

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
COMPRESSED = {
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "head_dim": 8, "qk_rope_head_dim": 4, "q_lora_rank": 8, "o_lora_rank": 8, "o_groups": 2, "index_n_heads": 2,
    "index_head_dim": 8, "index_topk": 2, "moe_intermediate_size": 16, "n_routed_experts": 2, **EXPERTS,
}  # fmt: skip
CONFIGS = {
    "gpt-oss": ("GptOssConfig", {**EXPERTS, "head_dim": 8, "sliding_window": 5}),
    "flint": ("FlintConfig", {}),
    "mimo-v2-flash": ("MiMoV2FlashConfig", {}),
    "deepseek-v4": ("DeepseekV4Config", COMPRESSED),  # keys of blocks after those of tokens
    "hy-v4": ("HYV4Config", SPECIAL),
    "granite-swa": ("GraniteSWAConfig", {}),
}
SCALED_AFTERWARDS = "granite-swa"  # its probabilities are those without a sink, its output is scaled


def built(name):
    kind, options = CONFIGS[name]
    if not hasattr(tf, kind):
        pytest.skip(f"this version of transformers has no {kind}")
    config = getattr(tf, kind)(**GROUPED, **options)
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def padded_batch():
    torch.manual_seed(1)
    ids, mask = torch.randint(3, VOCABULARY, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def by_head(values, real):
    return torch.stack([values[:, head][real].mean() for head in range(values.shape[1])]).numpy()


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != SCALED_AFTERWARDS])
def test_entropy_is_that_of_the_models_own_probabilities_and_what_is_missing_from_them_to_one(name):
    model, batch = built(name), padded_batch()
    real = batch["attention_mask"].bool()
    with torch.no_grad(), observe(model) as seen:
        probabilities = model(**batch, output_attentions=True).attentions
    table = seen.table()
    assert len(probabilities) == table["module"].nunique()
    least = 1.0
    for module, p in zip(table["module"].unique(), probabilities, strict=True):
        p = p.double()
        sink = (1 - p.sum(-1)).clamp(min=0)
        entropy = torch.special.entr(p).sum(-1) + torch.special.entr(sink)
        rows = table[table["module"] == module]
        # float32 probabilities; what is missing to one is known to 1e-7 or so, and its entropy to a hundred times that
        np.testing.assert_allclose(rows["entropy"], by_head(entropy, real), atol=1e-5)
        assert (rows["entropy_share"] <= 1).all()
        assert (rows["queries"] == real.sum().item()).all()
        least = min(least, 1 - sink.max().item())
    assert least < 0.8  # the sinks take part


@pytest.mark.parametrize("name", CONFIGS)
def test_all_statistics_are_those_of_the_logits_and_one_more(name, monkeypatch):
    model, batch = built(name), padded_batch()
    real, given = batch["attention_mask"].bool(), []
    scope = type(model.model.layers[0].self_attn).forward.__globals__
    function = scope["eager_attention_forward"]

    def spy(module, query, key, value, attention_mask, scaling, **rest):
        sinks = None if module.sinks is None else module.sinks.detach()
        given.append((query, key, attention_mask, scaling, sinks))
        return function(module, query, key, value, attention_mask, scaling, **rest)

    monkeypatch.setitem(scope, "eager_attention_forward", spy)
    with torch.no_grad(), observe(model, layers=np.arange(2)) as seen:
        model(**batch)
    table = seen.table()
    for module, (q, k, mask, scale, sinks) in zip(table["module"].unique(), given, strict=True):
        bias = mask.double().masked_fill(mask < -1e30, -math.inf)
        s = materialised(q, k, causal=False, scale=scale, bias=bias, sinks=sinks)
        rows, terms = table[table["module"] == module], (s > -math.inf).sum(-1)
        entropy = torch.special.entr(s.softmax(-1)).sum(-1)
        many = real & (terms[:, 0] > 1)
        expected = {
            "entropy": by_head(entropy, real),
            "entropy_share": by_head(entropy / terms.log(), many),
            "logsumexp": by_head(s.logsumexp(-1), real),
            "max_logit": np.array([s[:, head][real].max() for head in range(s.shape[1])]),
        }
        for column, value in expected.items():
            np.testing.assert_allclose(rows[column], value, rtol=1e-5, atol=1e-5, err_msg=f"{module} {column}")


def test_flash_attention_rounds_sinks_as_it_does_everything_and_sdpa_leaves_them_out():
    module, q = torch.nn.Identity(), torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    given = {"module": module, "query": q, "key": q, "attention_mask": None, "s_aux": torch.tensor([0.1, 3.3])}
    (flash,) = of_interface("flash_attention_3", given, cross=False)
    assert flash.sinks.dtype == torch.bfloat16
    (flex,) = of_interface("flex_attention", given, cross=False)
    assert flex.sinks is given["s_aux"]
    (sdpa,) = of_interface("sdpa", given, cross=False)
    assert sdpa.sinks is None


def test_a_head_with_a_sink_of_minus_infinity_has_none():
    q, k = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    found, plain = attention_statistics(q, k, sinks=torch.full((2,), -math.inf)), attention_statistics(q, k)
    for name in ("entropy", "max_logit", "logsumexp"):
        torch.testing.assert_close(getattr(found, name), getattr(plain, name))


def test_sinks_are_one_a_head():
    with pytest.raises(LocaterError, match=r"sinks must be \(2,\) on cpu, one a head, got \(3,\) on cpu"):
        attention_statistics(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), sinks=torch.zeros(3))


def test_z_loss_of_a_model_with_sinks_moves_them_too():
    model = built("gpt-oss").train()
    batch = padded_batch()
    applied = ZLoss(0.1).apply(model)
    model(**batch).logits.sum().mul(0).backward()
    assert applied.measure()["penalty"] > 0
    assert all(layer.self_attn.sinks.grad.abs().max() > 0 for layer in model.model.layers)


@pytest.mark.parametrize("name", ["gpt-oss", "granite-swa"])
def test_a_cap_far_above_all_logits_leaves_a_model_with_sinks_as_it_is(name):
    model, batch = built(name), padded_batch()
    with torch.no_grad():
        plain = model(**batch).logits
        applied = Softcap(1e6).apply(model)
        capped = model(**batch).logits
        applied.remove()
        assert torch.equal(model(**batch).logits, plain)
    scale = plain.abs().max().item()
    torch.testing.assert_close(capped, plain, rtol=0, atol=1e-5 * scale)  # float32, through two layers
