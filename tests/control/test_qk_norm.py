"""QK-norm: queries and keys of every head have root mean square 1, times a gain, before RoPE."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from rivals import Joint, batch, loss_of, one_step, ready
from torch import nn
from zoo import recorded_logits

from locater import LocaterError
from locater.control import QKNorm
from locater.models import Norm, attentions

FAMILIES = ["gpt2", "gpt-neox", "llama", "qwen2", "phi3", "falcon-new", "bloom", "gptj", "bert", "modernbert", "t5"]


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def learned(model, handle):
    """Gains that are not 1."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for gain in handle.parameters:
            gain.copy_(1 + 0.3 * torch.randn(gain.shape, generator=generator))
    return {name: p.detach() for name, p in model.named_parameters() if "locater_qk_norm" in name}


@pytest.mark.parametrize(
    ("family", "gain", "queries"),
    [
        *((family, gain, True) for family in FAMILIES for gain in (True, False)),
        ("gpt2", True, False),
        ("llama", True, False),
    ],
)
def test_the_logits_are_those_of_an_attention_with_norms(family, gain, queries):
    """The registry knows norms of q and k, for the families that have them: another account of the same."""
    model, given = ready(family), batch(family)
    known = attentions(model)
    handle = QKNorm(gain=gain, queries=queries).apply(model)
    gains = learned(model, handle)
    with recorded_logits(model) as seen:
        loss_of(model, given)
    for attention in known:
        query, key, found = seen[attention.module]
        norms = [Norm(gains.get(f"{attention.module}.locater_qk_norm.{part}"), 1e-6) for part in ("query", "key")]
        expected = replace(attention, query_norm=norms[0] if queries else None, key_norm=norms[1]).logits(query, key)
        # a softmax over keys does not mind what is added to all of them: Bloom's ALiBi counts from elsewhere
        at = found > -1e30
        torch.testing.assert_close(
            (found - found[..., :1])[at], (expected - expected[..., :1])[at], rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox", "llama", "bert"])
def test_logits_are_bounded_by_the_root_of_the_head_width_times_the_gains(family):
    model, given = ready(family), batch(family)
    with torch.no_grad():
        for attention in attentions(model):
            attention.query.weight.mul_(100)  # however large the weights
    handle = QKNorm().apply(model)
    gains = learned(model, handle)
    with recorded_logits(model) as seen:
        loss_of(model, given)
    for attention in attentions(model):
        width = attention.qk().d_head
        query, key = (gains[f"{attention.module}.locater_qk_norm.{part}"].abs().max() for part in ("query", "key"))
        found = seen[attention.module][2]
        assert found[found > -1e30].abs().max() <= width**0.5 * query * key


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox", "phi3"])
def test_the_values_of_a_fused_layer_are_left_alone(family):
    model, given = ready(family).eval(), batch(family)
    seen = {}

    def keep(layer, _, output):
        seen[id(layer)] = output.detach()

    layers = [m for name, m in model.named_modules() if name.endswith(("c_attn", "query_key_value", "qkv_proj"))]
    layers[0].register_forward_hook(keep)
    loss_of(model, given)
    before = seen[id(layers[0])]
    QKNorm().apply(model)
    layers[0]._forward_hooks.move_to_end(next(iter(layers[0]._forward_hooks)))  # look last
    loss_of(model, given)
    attention = attentions(model)[0]
    rows = torch.zeros(before.shape[-1], dtype=torch.bool)
    for projection in (attention.query, attention.key):
        projection.bias_view(rows).fill_(True)
    changed = (seen[id(layers[0])] != before).flatten(0, 1).any(0)
    assert torch.equal(changed, rows)


def test_removed_the_model_is_what_it_would_be_without():
    model, given = ready("gpt-neox"), batch("gpt-neox")
    expected = loss_of(model, given)
    handle = QKNorm().apply(model, optimizer_of(model))
    assert not torch.allclose(loss_of(model, given), expected)  # as `at_start` says
    handle.remove()
    assert torch.equal(loss_of(model, given), expected)


def test_gains_are_trained_without_decay_and_saved_with_the_model():
    model, given = ready("llama"), batch("llama")
    optimizer = optimizer_of(model)
    handle = QKNorm().apply(model, optimizer)
    assert optimizer.param_groups[-1]["weight_decay"] == 0
    assert len(optimizer.param_groups[-1]["params"]) == 4
    for _ in range(3):
        one_step(model, optimizer, given)
    assert all((gain != 1).all() for gain in handle.parameters)
    other = ready("llama", seed=7)
    QKNorm().apply(other)
    other.load_state_dict(model.state_dict())
    assert torch.equal(loss_of(other, given), loss_of(model, given))
    assert not any("locater" in name for name in ready("llama").state_dict())


def test_without_gains_nothing_is_added():
    model = ready("llama")
    names = list(model.state_dict())
    handle = QKNorm(gain=False).apply(model, optimizer_of(model))
    assert handle.parameters == []
    assert list(model.state_dict()) == names


def test_a_copy_has_norms_of_its_own():
    model, given = ready("llama"), batch("llama")
    handle = QKNorm().apply(model)
    twin = copy.deepcopy(model)
    expected = loss_of(twin, given)
    with torch.no_grad():
        for gain in handle.parameters:
            gain.mul_(3)
    assert torch.equal(loss_of(twin, given), expected)
    handle.remove()
    assert torch.equal(loss_of(twin, given), expected)
    with pytest.raises(LocaterError, match="has a QK-norm already"):
        QKNorm().apply(twin)


def test_half_precision_is_normalised_in_float32():
    model, given = ready("llama").bfloat16(), batch("llama")
    QKNorm(gain=False).apply(model)
    with recorded_logits(model) as seen:
        loss_of(model, given)
    width = attentions(model)[0].qk().d_head
    found = seen["model.layers.0.self_attn"][2]
    # the query's own key at its own position: bounded by √K but for the rounding of q, k and their product
    assert found[found > -1e30].abs().max() <= width**0.5 * (1 + 2**-6)


def test_attention_without_a_place_for_it_is_refused():
    with pytest.raises(LocaterError, match=r"MultiheadAttention.* in one function"):
        QKNorm().apply(nn.MultiheadAttention(8, 2))
    with pytest.raises(LocaterError, match="trains W_QK itself"):
        QKNorm().apply(Joint())
    with pytest.raises(LocaterError, match=r"Qwen3Attention.* normalises q and k itself"):
        QKNorm().apply(ready("qwen3"))


def test_beside_muon_the_gains_go_to_the_optimizer_of_the_other_vectors():
    model = ready("llama")
    inside = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for p in model.parameters() if all(p is not one for one in inside)]
    muon, adamw = torch.optim.Muon(inside, lr=2e-2), torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.1)
    with pytest.raises(LocaterError, match="Muon trains matrices, and what QK-norm adds are vectors"):
        QKNorm().apply(model, muon)
    handle = QKNorm(queries=False).apply(model, [muon, adamw])
    assert len(handle.parameters) == len(attentions(model))
    assert adamw.param_groups[-1]["params"] == handle.parameters
    assert (adamw.param_groups[-1]["lr"], adamw.param_groups[-1]["weight_decay"]) == (1e-3, 0.0)
    assert len(muon.param_groups) == 1
    handle.remove()
    assert len(adamw.param_groups) == 1


def test_gains_are_frozen_where_all_query_and_key_weights_of_the_layer_are():
    model, given = ready("llama"), batch("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    for layer in (first.q_proj, first.k_proj, second.q_proj):
        layer.requires_grad_(False)
    optimizer = optimizer_of(model)
    handle = QKNorm().apply(model, optimizer)
    assert [gain.requires_grad for gain in handle.parameters] == [False, False, True, True]
    one_step(model, optimizer, given)
    assert [bool((gain != 1).any()) for gain in handle.parameters] == [False, False, True, True]
