"""σReparam: the spectral norm of every weight is its γ, and a trained model goes on as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from rivals import ByHand, Joint, batch, gradients, loss_of, one_step, ready
from torch import nn
from torch.nn.utils import parametrize

from locater import LocaterError
from locater.control import SigmaReparam
from locater.models import attentions


def multihead():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True), 2)


FAMILIES = ["gpt2", "gpt-neox", "llama", "phi3", "falcon-new", "bert", "t5"]
OTHERS = {"nn.MultiheadAttention": multihead, "joint": Joint, "by hand": ByHand}


def made(name):
    """A model, and a loss of it."""
    if name in FAMILIES:
        model, given = ready(name), batch(name)
        return model, lambda model: loss_of(model, given)
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return OTHERS[name]().double().train(), lambda model: model(x).square().mean()


def optimizer_of(model, lr=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)


def matrices(model):
    """W_Q and W_K of every module as (outputs, inputs), one below the other for each; of a joint W_QK each head's."""
    found = []
    for attention in attentions(model):
        if attention.query is None:
            found.append(attention.key.weight[:, 0].detach())
        else:
            found += [p.weight.detach().flatten(0, 2)[None] for p in (attention.query, attention.key)]
    return [matrix for some in found for matrix in some]


def gammas(handle):
    return torch.cat([gamma.detach() for gamma in handle.parameters])


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_applied_it_leaves_the_output_as_it_was_and_its_gammas_are_the_spectral_norms(name):
    model, loss = made(name)
    expected = torch.stack([torch.linalg.matrix_norm(matrix, 2) for matrix in matrices(model)])
    training, evaluated = loss(model), loss(model.eval())
    handle = SigmaReparam().apply(model, optimizer_of(model))
    torch.testing.assert_close(gammas(handle), expected, rtol=1e-9, atol=0)  # q and k of a fused layer in this order
    assert torch.equal(loss(model), evaluated)
    torch.testing.assert_close(loss(model.train()), training, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_after_training_the_spectral_norms_are_the_gammas(name):
    model, loss = made(name)
    optimizer = optimizer_of(model)
    handle = SigmaReparam().apply(model, optimizer)
    start = gammas(handle)
    for _ in range(5):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    learned = gammas(handle)
    assert ((learned - start).abs() > 1e-4).any()
    with torch.no_grad():
        for _ in range(400):  # the last step moved the weights: let the iteration follow
            for module in model.modules():
                if parametrize.is_parametrized(module):
                    for parts in module.parametrizations.values():
                        parts[0].iterate(parts.original)
    handle.remove()
    found = torch.stack([torch.linalg.matrix_norm(matrix, 2) for matrix in matrices(model)])
    torch.testing.assert_close(found, learned.abs(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "nn.MultiheadAttention"])
def test_the_gradient_is_that_of_the_formula(name):
    """Ŵ = γ W / ‖W‖₂ by torch's own norm, its derivative by autograd."""
    model, loss = made(name)
    twin = copy.deepcopy(model)
    handle = SigmaReparam().apply(model)
    with torch.no_grad():
        for gamma in handle.parameters:
            gamma.mul_(1.3)
    loss(model).backward()

    class Exact(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.parts = parts
            self.gamma = nn.Parameter(
                torch.stack([1.3 * torch.linalg.matrix_norm(p.weight.detach().flatten(0, 2), 2) for p in parts])
            )

        def forward(self, weight):
            out = weight.clone()
            for gamma, part in zip(self.gamma, self.parts, strict=True):
                matrix = part.view(weight)
                part.view(out).copy_(gamma * matrix / torch.linalg.matrix_norm(matrix.flatten(0, 2), 2))
            return out

    for attention in attentions(twin):
        owner, key = next(
            (m, k) for m in twin.modules() for k, p in m._parameters.items() if p is attention.query.tensor
        )
        parametrize.register_parametrization(owner, key, Exact([attention.query, attention.key]))
    loss(twin).backward()
    expected, found = gradients(twin), gradients(model)
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-6, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", ["gpt2", "llama", "nn.MultiheadAttention"])
@pytest.mark.parametrize("where", ["qk", "all"])
def test_removed_it_leaves_the_trained_output_in_the_weights_that_the_optimizer_holds(name, where):
    model, loss = made(name)
    names, held = list(model.state_dict()), list(model.parameters())
    optimizer = optimizer_of(model)
    handle = SigmaReparam(where).apply(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    model.eval()
    expected = loss(model)
    handle.remove()
    torch.testing.assert_close(loss(model), expected, rtol=1e-12, atol=0)
    assert sorted(model.state_dict()) == sorted(names)
    # some move behind others in their module; none is replaced
    assert {id(p) for p in model.parameters()} == {id(p) for p in held}
    assert len(optimizer.param_groups) == 1


def test_gamma_is_trained_without_decay_at_the_rate_of_the_weights():
    model = ready("llama")
    weights = [p for name, p in model.named_parameters() if "q_proj" in name or "k_proj" in name]
    rest = [p for name, p in model.named_parameters() if "q_proj" not in name and "k_proj" not in name]
    optimizer = torch.optim.AdamW(
        [{"params": rest, "lr": 1.0}, {"params": weights, "lr": 0.5, "betas": (0.8, 0.9)}], weight_decay=0.3
    )
    handle = SigmaReparam().apply(model, optimizer)
    group = optimizer.param_groups[-1]
    assert {id(p) for p in group["params"]} == {id(p) for p in handle.parameters}
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.8, 0.9), 0.0)


def test_all_linear_layers_are_taken_but_those_that_share_their_weight():
    model, given = ready("gpt2"), batch("gpt2")
    expected = loss_of(model, given)
    assert model.lm_head.weight is model.transformer.wte.weight
    handle = SigmaReparam("all").apply(model)
    torch.testing.assert_close(loss_of(model, given), expected, rtol=1e-12, atol=0)
    # two layers: q, k and v of the fused one, and three others
    assert gammas(handle).numel() == 2 * 6
    assert not parametrize.is_parametrized(model.lm_head)
    attention = model.transformer.h[0].attn.c_attn
    q, k, v = attention.weight.detach().split(32, 1)
    found = attention.parametrizations.weight[0].gamma
    for matrix, gamma in zip((q, k, v), found, strict=True):
        assert torch.linalg.matrix_norm(matrix, 2).item() == pytest.approx(gamma.item(), rel=1e-9)
    assert len(handle.measure()) == 12


def test_a_state_dict_is_loaded_into_a_model_that_it_is_applied_to():
    model, given = ready("llama"), batch("llama")
    optimizer = optimizer_of(model)
    SigmaReparam().apply(model, optimizer)
    for _ in range(3):
        one_step(model, optimizer, given)
    other = ready("llama", seed=7)
    SigmaReparam().apply(other)
    other.load_state_dict(model.state_dict())
    assert torch.equal(loss_of(other.eval(), given), loss_of(model.eval(), given))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_iterates_once_a_forward(reentrant):
    plain, given = ready("llama"), {**batch("llama"), "use_cache": False}
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        checkpointed.enable_input_require_grads()
    for model in (plain, checkpointed):
        SigmaReparam().apply(model)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name.endswith(".u"):  # far from converged: an iteration more would show
                    buffer.copy_(nn.functional.normalize(torch.ones_like(buffer), dim=0))
        loss_of(model, given).backward()
    expected, found = gradients(plain), gradients(checkpointed)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precisions_start_unchanged_too(dtype):
    model, given = ready("llama").to(dtype).eval(), batch("llama")
    expected = loss_of(model, given)
    handle = SigmaReparam().apply(model)
    assert torch.equal(loss_of(model, given), expected)
    assert gammas(handle).dtype == torch.float32  # a scalar of bfloat16 would hardly move


def test_a_model_made_bfloat16_afterwards_keeps_its_output_but_for_rounding():
    model, given = ready("llama").float().eval(), batch("llama")
    SigmaReparam().apply(model)
    expected = loss_of(copy.deepcopy(model).bfloat16(), given)
    plain = loss_of(ready("llama").bfloat16().eval(), given)
    torch.testing.assert_close(expected, plain, rtol=2**-5, atol=0)  # γ, u and v are rounded too


def test_random_numbers_are_left_alone():
    model = ready("gpt2")
    state = torch.get_rng_state()
    SigmaReparam().apply(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_it_cannot_be_applied_to():
    model = ready("llama")
    parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", nn.Identity())
    with pytest.raises(LocaterError, match="parametrized already"):
        SigmaReparam().apply(model)
    model = ready("llama")
    SigmaReparam().apply(model)
    with pytest.raises(LocaterError, match="under σReparam already"):  # a copy is not in the books, but shows it
        SigmaReparam().apply(copy.deepcopy(model))
    model = ready("llama")
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(LocaterError, match=r"q_proj.weight are one parameter, shared by 2 modules"):
        SigmaReparam().apply(model)


def test_a_weight_of_zeros_is_named_and_the_model_left_as_it_was():
    model = ready("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight.zero_()
    before = set(model.state_dict())
    with pytest.raises(LocaterError, match=r"h\.1\.mlp\.c_proj\.weight is all zero"):
        SigmaReparam("all").apply(model)
    assert set(model.state_dict()) == before


def test_gamma_is_frozen_where_its_weight_is():
    model = ready("llama")
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    handle = SigmaReparam("qk").apply(model)
    assert [gamma.requires_grad for gamma in handle.parameters] == [False, True, True, True]


def with_muon(model):
    inside = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for p in model.parameters() if all(p is not one for one in inside)]
    return torch.optim.Muon(inside, lr=2e-2), torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.1)


@pytest.mark.parametrize("where", ["qk", "all"])
def test_beside_muon_gamma_goes_to_the_optimizer_of_the_other_vectors(where):
    model = ready("llama").float()
    muon, adamw = with_muon(model)
    handle = SigmaReparam(where).apply(model, [muon, adamw])
    assert {id(p) for p in adamw.param_groups[-1]["params"]} == {id(p) for p in handle.parameters}
    assert (adamw.param_groups[-1]["lr"], adamw.param_groups[-1]["weight_decay"]) == (1e-3, 0.0)
    start = gammas(handle)
    loss_of(model, batch("llama")).backward()
    muon.step()
    adamw.step()
    assert (gammas(handle) != start).all()
    handle.remove()
    assert (len(muon.param_groups), len(adamw.param_groups)) == (1, 1)


def test_muon_alone_is_refused_before_anything_is_changed():
    model = ready("llama")
    muon, _ = with_muon(model)
    names = list(model.state_dict())
    with pytest.raises(LocaterError, match="Muon trains matrices, and what σReparam adds are vectors"):
        SigmaReparam().apply(model, muon)
    assert list(model.state_dict()) == names  # in this order, too
    assert len(muon.param_groups) == 1
