"""LoRA (PEFT): the weight that acts is read as it is, and gradients reach the factors it is made of."""

from __future__ import annotations

import copy

import pandas as pd
import peft
import pytest
import torch
from torch import nn
from zoo import build, inputs, recorded_logits

from locater import LocAteR, LocaterError, scan
from locater.control import DecoupledLocAteR, QKClip, QKDecay, QKNorm, SigmaReparam
from locater.models import attentions
from locater.names import plain_name

TARGETS = {
    "llama": ["q_proj", "k_proj"],  # grouped queries
    "qwen2": ["q_proj"],  # biases; W_K is plain
    "gpt2": ["c_attn"],  # stored transposed, W_Q and W_K in one layer
    "gpt-neox": ["query_key_value"],
}


def adapted(name, **more):
    torch.manual_seed(0)
    options = {"r": 3, "lora_alpha": 2, "target_modules": TARGETS[name], "init_lora_weights": False}
    options["fan_in_fan_out"] = name == "gpt2"
    return peft.get_peft_model(build(name), peft.LoraConfig(**{**options, **more}))


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same_table(one, other):
    # names differ by a prefix; a merge rounds W to float32
    left, right = (each.drop(columns=["module", "softcap"]) for each in (one, other))
    pd.testing.assert_frame_equal(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TARGETS)
def test_merged_and_unmerged_are_one_table(name):
    model = adapted(name)
    unmerged = scan(model)
    with model.disable_adapter():
        same_table(scan(model), scan(build(name)))
    model.merge_adapter()
    same_table(scan(model), unmerged)
    model.unmerge_adapter()
    same_table(scan(model.merge_and_unload()), unmerged)
    assert not unmerged["scale"].equals(scan(build(name))["scale"])


@torch.no_grad()
@pytest.mark.parametrize("name", TARGETS)
def test_rebuilt_logits_are_the_models_own(name):
    model = adapted(name, use_rslora=True).eval()
    with recorded_logits(model) as seen:
        model(**inputs(name))
    for attention in attentions(model):
        query, key, logits = seen[attention.module]
        unmasked = logits > -1e30
        torch.testing.assert_close(attention.logits(query, key)[unmasked], logits[unmasked], rtol=1e-4, atol=1e-4)


def test_the_active_adapters_count():
    model = adapted("llama")
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    read = attentions(model)[0]  # once: what is active is asked for each time
    layer = model.get_submodule(read.module).q_proj

    def expected(*names):
        return layer.base_layer.weight + sum(layer.get_delta_weight(name) for name in names)

    for active in (["default"], ["other"], ["default", "other"]):
        model.base_model.set_adapter(active)
        torch.testing.assert_close(read.query.weight.flatten(0, 2), expected(*active))


@pytest.mark.parametrize("base_trained", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_locaters_gradient_reaches_the_factors(name, base_trained):
    model = adapted(name)
    model.add_adapter("idle", peft.LoraConfig(r=2, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2"))
    if base_trained:
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_("idle" not in parameter_name)
    reg = LocAteR(model, scale_strength=0.3, mean_strength=0.7)
    reg.penalty().backward()
    expected = {each: p.grad.clone() for each, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    reg.add_gradient_()
    found = {each: p.grad for each, p in model.named_parameters() if p.grad is not None}
    for part, trained in (("lora_A", True), ("lora_B", True), ("base_layer", base_trained)):
        assert any(part in each for each in found) is trained
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_locater_trains_the_factors_that_the_optimizer_holds():
    model = adapted("llama")
    held = {name: parameter for name, parameter in model.named_parameters() if "lora_B" in name}
    optimizer = torch.optim.SGD(held.values(), lr=1e-3)
    reg = LocAteR(model, scale_strength=0.3, mean_strength=0.7).attach(optimizer)
    before, penalty = parameters(model), float(reg.penalty().detach())
    optimizer.step()
    assert float(reg.penalty().detach()) < penalty
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) is (name not in held)
        assert (parameter.grad is None) is (name not in held)


def test_merged_adapters_get_no_gradient():
    model = adapted("llama")
    reg = LocAteR(model, scale_strength=0.3, mean_strength=0.7)
    model.merge_adapter()
    reg.add_gradient_()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("apply", [
    lambda model, optimizer: QKClip(1.0).apply(model, optimizer),
    lambda model, optimizer: QKDecay(0.1).apply(model, optimizer),
    lambda model, optimizer: QKNorm().apply(model, optimizer),
    lambda model, optimizer: SigmaReparam().apply(model, optimizer),
])  # fmt: skip
def test_what_changes_stored_weights_is_refused(apply):
    model = adapted("llama")
    before = parameters(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(LocaterError, match=r"made of several \(LoRA\): merge_and_unload\(\) them, or use LocAteR"):
        apply(model, optimizer)
    after = parameters(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("size", [0.01, 1.0])
@pytest.mark.parametrize("name", TARGETS)
def test_decoupled_locater_bounds_what_the_factors_do_to_logits(name, size):
    model = adapted(name, lora_dropout=0.0).train()
    held = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(held, lr=1.0)
    reg = DecoupledLocAteR(model, change=1e-3, spread=1e6).attach(optimizer)
    model(**inputs(name))
    states = {a.module: reg._states.of(a).states for a in reg.attentions}
    old = {a.module: a.logits(states[a.module]).detach() for a in reg.attentions}
    for p in held:
        p.grad = size * torch.randn_like(p)
    before = parameters(model)
    optimizer.step()
    for a in reg.attentions:
        change = (a.logits(states[a.module]).detach() - old[a.module]).tril()
        count = torch.arange(1, change.shape[-1] + 1)[:, None]
        off = (change - change.sum(-1, keepdim=True) / count).tril()
        spread = (off.square().sum((-2, -1)) / (count.sum() - 1)).mean(0).sqrt()  # (heads,)
        assert (spread < 1.01e-3).all()
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert changed
    assert all("lora" in name for name in changed)
    # of the module that moved most, as much is left as its bound allows, once: also where W_Q and W_K share factors
    trained = [(p.detach(), p.grad, before[n]) for n, p in model.named_parameters() if p.requires_grad]
    kept = [float(((p - old) / -gradient).median()) for p, gradient, old in trained]
    largest = max(reg.measure()[f"{plain_name(a.module)}/change"] for a in reg.attentions)
    if size < 0.1:  # a larger step moves logits by more than its size, and less of it may stay
        assert min(kept) == pytest.approx(1e-3 / largest, rel=0.1)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), "adapted by DoraLinearVariant"),
        (peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True), "adapted by lora_bias"),
        (peft.LoHaConfig(r=2, target_modules=["q_proj"]), r"adapted by peft\.tuners\.loha"),
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), r"adapted by peft\.tuners\.ia3"),
    ],
)
def test_other_adapters_are_refused(config, says):
    model = build("qwen2")  # its projections have biases, which lora_bias needs
    with pytest.raises(LocaterError, match=says):
        attentions(peft.get_peft_model(model, config))


@pytest.mark.filterwarnings("ignore:.*not read")  # PEFT's module around it
def test_adapters_of_torchs_own_module_are_refused():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 1)
    with pytest.raises(LocaterError, match="merge_and_unload"):
        attentions(peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["self_attn"])))


def test_a_copy_of_the_model_is_read_by_itself():
    model = adapted("llama")
    other = copy.deepcopy(model)
    other.merge_adapter()
    same_table(scan(other), scan(model))
