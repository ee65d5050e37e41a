"""Models inside torch.compile, weights that have no values: what the methods call things, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from locater.control import DecoupledLocAteR, LocAteR, QKClip, QKDecay, QKNorm, SigmaReparam
from locater.errors import LocaterError


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=32,
        )
    )  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


METHODS = {
    "LocAteR": lambda model: LocAteR(model, scale_strength=1e-2, mean_strength=1e-2).attach(sgd(model)),
    "DecoupledLocAteR": lambda model: DecoupledLocAteR(model).attach(sgd(model)),
    "QK-clip": lambda model: QKClip(1e-3).apply(model, sgd(model)),
    "QK weight decay": lambda model: QKDecay(0.1).apply(model, sgd(model)),
    "QK-norm": lambda model: QKNorm().apply(model),
    "σReparam": lambda model: SigmaReparam().apply(model),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_compiled_model_has_the_names_of_the_model_inside(name):
    plain, compiled = (
        METHODS[name](wrap(llama())) for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager"))
    )
    assert compiled.measure().keys() == plain.measure().keys()


def test_a_state_passes_between_a_model_and_the_same_compiled():
    model = llama()
    compiled = DecoupledLocAteR(torch.compile(model, backend="eager"))
    plain = DecoupledLocAteR(model)
    plain.load_state_dict(compiled.state_dict())
    older = {**plain.state_dict(), "initial": {f"_orig_mod.{n}": v for n, v in plain.state_dict()["initial"].items()}}
    plain.load_state_dict(older)
    compiled.load_state_dict(plain.state_dict())


@pytest.mark.compiled
@torch._dynamo.config.patch(skip_nnmodule_hook_guards=True)  # torch's setting
def test_code_that_was_compiled_for_one_model_does_not_run_for_another_with_other_hooks():
    """Of the same class and shape, as when methods are compared in one process; nor for the same, hooked later."""
    torch.compiler.reset()
    ids = torch.arange(24).view(2, 12)
    models = [llama().eval() for _ in range(3)]
    called = [torch.compile(model, backend="eager") for model in models]

    def differ():
        return [
            not torch.allclose(a(input_ids=ids).logits, b(input_ids=ids).logits)
            for a, b in zip(models, called, strict=True)
        ]

    assert differ() == [False] * 3
    both, keys = QKNorm().apply(models[1]), QKNorm(queries=False).apply(models[2])
    assert differ() == [False] * 3
    logits = [model(input_ids=ids).logits for model in models]
    assert not torch.allclose(logits[1], logits[0])
    assert not torch.allclose(logits[1], logits[2])
    both.remove()
    keys.remove()
    assert differ() == [False] * 3


@pytest.mark.parametrize("name", METHODS)
def test_weights_on_the_meta_device_are_refused_in_one_sentence(name):
    with torch.device("meta"):
        model = llama()
    with pytest.raises(LocaterError, match=r"model\.layers\.0\.self_attn are on the meta device and have no values"):
        METHODS[name](model)


@pytest.mark.parametrize("name", METHODS)
def test_quantised_weights_are_refused_in_one_sentence(name):
    model = llama()
    layer = model.model.layers[0].self_attn.k_proj
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(LocaterError, match=f"are torch.float8_e4m3fn, whose values {name} cannot read"):
        METHODS[name](model)
