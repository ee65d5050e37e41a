"""Softcap: logits are c · tanh(s / c), on the paths that can take it, and no others."""

from __future__ import annotations

import copy
import gc
import inspect
import sys

import pytest
import torch
from rivals import batch, gradients, loss_of, ready, softmax_inputs, stand_in_for_flash
from torch import nn
from zoo import recorded_logits

from locater import LocaterError, observe
from locater.control import Softcap

CAP = 1.5
FAMILIES = [
    "gpt2", "gpt2-scaled-by-layer", "gpt-neox", "llama", "mistral", "granite", "gemma", "gemma3", "phi3", "opt", "bert",
    "distilbert", "modernbert", "vit", "whisper", "t5",
]  # fmt: skip


def first_logits(model, given):
    """Of the first attention module, which no cap before it has changed; and its position bias, if any."""
    with softmax_inputs() as logits:
        loss_of(model, given)
    return logits[0].detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_capped_as_the_formula_says(family):
    model, given = ready(family), batch(family)
    plain = first_logits(model, given)
    bias = torch.zeros(())
    if family == "t5":
        attention = model.encoder.block[0].layer[0].SelfAttention
        bias = attention.compute_bias(plain.shape[2], plain.shape[3]).detach()
    Softcap(CAP).apply(model)
    found, seen = first_logits(model, given), plain > -1e30
    expected = CAP * torch.tanh((plain - bias) / CAP) + bias
    assert (plain[seen] - expected[seen]).abs().max() > 0.1
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-9, atol=1e-9)
    assert (found[~seen] < -1e30).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cap_far_above_the_logits_changes_nothing(family):
    """All else of the family's own eager function is there: masks, groups, biases, scales, dropout's place."""
    model, given = ready(family), batch(family)
    loss_of(model, given).backward()
    expected, output = gradients(model), loss_of(model, given)
    model.zero_grad()
    Softcap(1e6).apply(model)
    torch.testing.assert_close(loss_of(model, given), output, rtol=1e-6, atol=0)  # softmax in float32, for some
    loss_of(model, given).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_no_logit_is_beyond_the_cap_however_large_the_weights():
    model, given = ready("llama"), batch("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.mul_(1000)
    Softcap(CAP).apply(model)
    with recorded_logits(model) as seen:
        loss_of(model, given)
    for _, _, logits in seen.values():
        assert logits[logits > -1e30].abs().max() <= CAP


def test_an_observer_sees_the_capped_logits():
    model, given = ready("llama"), batch("llama")
    Softcap(0.5).apply(model)
    with recorded_logits(model) as recorded, observe(model) as seen:
        loss_of(model, given)
    table = seen.table()
    for name, (_, _, logits) in recorded.items():
        tops = torch.tensor(table[table.module == name].max_logit.to_numpy())
        torch.testing.assert_close(tops, logits.amax((0, 2, 3)), rtol=1e-6, atol=0)
    assert table.max_logit.max() <= 0.5


def test_other_models_of_the_family_are_not_capped_and_removed_neither_is_this():
    gc.collect()  # models of other tests, whose caps go with them
    model, other, given = ready("llama"), ready("llama"), batch("llama")
    modeling = sys.modules[type(model).__module__]
    original = modeling.eager_attention_forward
    expected = loss_of(model, given)
    handle = Softcap(CAP).apply(model)
    assert not torch.allclose(loss_of(model, given), expected)
    assert torch.equal(loss_of(other, given), expected)
    handle.remove()
    assert torch.equal(loss_of(model, given), expected)
    assert modeling.eager_attention_forward is original


def test_a_copy_is_capped_while_the_model_is_and_then_refuses_to_run():
    gc.collect()
    model, given = ready("llama"), batch("llama")
    handle = Softcap(CAP).apply(model)
    twin = copy.deepcopy(model)
    assert torch.equal(loss_of(twin, given), loss_of(model, given))
    handle.remove()
    with pytest.raises(LocaterError, match="a copy of one whose softcap has been removed"):
        loss_of(twin, given)


def test_a_cache_gives_what_a_whole_forward_gives():
    model, given = ready("llama").eval(), batch("llama")
    Softcap(CAP).apply(model)
    ids = given["input_ids"]
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        first = model(input_ids=ids[:, :7], use_cache=True)
        rest = model(input_ids=ids[:, 7:], past_key_values=first.past_key_values).logits
    # the model is in float64, its softmax in float32: 1e-7 in each of two layers, ten times that behind their products
    torch.testing.assert_close(rest, whole[:, 7:], rtol=1e-5, atol=1e-5)


def test_flex_attention_is_given_a_score_mod_that_caps(monkeypatch):
    """torch's function would be compiled even here: its arguments are taken at their word instead."""
    from transformers.integrations import flex_attention as integration
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def dense(query, key, value, score_mod, block_mask, enable_gqa, scale, **_):
        assert block_mask is None
        assert query.shape == key.shape or enable_gqa
        return score_mod(query @ key.mT * scale, None, None, None, None).softmax(-1) @ value

    monkeypatch.setattr(integration, "compile_friendly_flex_attention", dense)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "flex_attention", lambda **_: None)  # all is seen
    model, given = ready("vit"), batch("vit")
    plain = loss_of(model, given)
    Softcap(CAP).apply(model)
    capped = loss_of(model, given)
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(loss_of(model, given), capped, rtol=1e-6, atol=0)  # eager: softmax in float32
    assert abs(capped - plain) > 1e-4 * plain


def test_flash_attention_is_handed_the_cap(monkeypatch):
    model, given = ready("llama"), batch("llama")
    handle = Softcap(CAP).apply(model)
    capped = loss_of(model, given)
    handle.remove()
    caps = stand_in_for_flash(monkeypatch, model)
    Softcap(CAP).apply(model)
    torch.testing.assert_close(loss_of(model, given), capped, rtol=1e-6, atol=0)
    assert caps == [CAP, CAP]


def test_it_works_where_somebody_has_put_the_function_back(monkeypatch):
    model, other, given = ready("llama"), ready("llama"), batch("llama")
    modeling = sys.modules[type(model).__module__]
    original = inspect.unwrap(modeling.eager_attention_forward)
    first = Softcap(CAP).apply(model)
    capped = loss_of(model, given)
    monkeypatch.setattr(modeling, "eager_attention_forward", original)
    Softcap(CAP).apply(other)
    assert torch.equal(loss_of(other, given), capped)
    first.remove()
    assert torch.equal(loss_of(other, given), capped)


# ---------------------------------------------------------------- paths that cannot


def test_sdpa_is_refused_also_when_it_is_chosen_later():
    model, given = ready("llama"), batch("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(LocaterError, match=r"runs on 'sdpa', which cannot cap .*\(\"eager\"\)"):
        Softcap().apply(model)
    model.set_attn_implementation("eager")
    Softcap().apply(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(LocaterError, match="runs on 'sdpa', which cannot cap"):
        loss_of(model, given)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ready("bloom"), "BloomAttention.* computes its attention by itself"),
        (lambda: nn.TransformerEncoderLayer(8, 2), "MultiheadAttention.* computes its attention by itself"),
        (lambda: ready("gemma2"), "caps its logits at 2 already"),
        (lambda: nn.Linear(2, 2), "no attention in Linear"),
    ],
)
def test_attention_without_a_place_for_it_is_refused(make, says):
    with pytest.raises(LocaterError, match=says):
        Softcap().apply(make())


def test_gpt2s_own_upcasting_is_refused():
    model = ready("gpt2")
    for block in model.transformer.h:
        block.attn.reorder_and_upcast_attn = True
    with pytest.raises(LocaterError, match="reorder_and_upcast_attn"):
        Softcap().apply(model)
