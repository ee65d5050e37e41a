"""LocAteR: its closed form against autograd for every family, and at work in real training loops."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from zoo import FAMILIES, build

from locater import LocAteR, LocaterError
from locater.models import attentions


class Joint(nn.Module):
    """The paper's Section 2: W_QK trained itself."""

    def __init__(self, heads=None, width=6):
        super().__init__()
        self.w_qk = nn.Parameter(0.3 * torch.randn(*([] if heads is None else [heads]), width, width))
        self.temperature = width**0.5


class Plain(nn.Module):
    """Separate projections under the usual names, heads and scale said."""

    def __init__(self, groups=2):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.scale = 4, groups, 0.25
        self.q_proj, self.k_proj = nn.Linear(12, 16), nn.Linear(12, 4 * groups)

    def forward(self, x):
        q, k = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q_proj, self.k_proj))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        return (self.scale * q @ k.mT).softmax(-1) @ k


MODELS = {
    **{name: lambda name=name: build(name) for name in FAMILIES},
    "nn.MultiheadAttention": lambda: nn.MultiheadAttention(12, 3),
    "nn.MultiheadAttention, separate": lambda: nn.MultiheadAttention(12, 3, vdim=8),
    "nn.TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 2),
    "nn.Transformer": lambda: nn.Transformer(12, 2, 1, 1, 16, batch_first=True),
    "joint": Joint,
    "joint, three heads": lambda: Joint(3),
    "plain, grouped": Plain,
}


def regulariser(model, **more):
    return LocAteR(model, scale_strength=0.3, mean_strength=0.7, target=1.5, **more)


def dense_penalty(reg):
    """The definition, through d_model × d_model matrices."""
    total = 0.0
    for attention in reg.attentions:
        w = attention.qk().dense()
        trace = w.diagonal(dim1=-2, dim2=-1).sum(-1)
        total = total + reg.scale_strength * w.square().sum() + reg.mean_strength * ((trace - reg.target) ** 2).sum()
    return total


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_the_closed_form_equals_autograd_of_the_definition(name):
    model = MODELS[name]().double()
    reg = regulariser(model)
    penalty = reg.penalty()
    torch.testing.assert_close(penalty, dense_penalty(reg), rtol=1e-12, atol=0)
    dense_penalty(reg).backward()
    expected = gradients(model)
    model.zero_grad()
    penalty.backward()
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-10 * expected[key].abs().max().item())
    model.zero_grad()
    reg.add_gradient_()
    assert gradients(model).keys() == expected.keys()
    for key, gradient in gradients(model).items():
        assert (gradient - expected[key]).norm() <= 1e-10 * expected[key].norm(), key


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "phi3", "falcon-new", "nn.MultiheadAttention"])
def test_in_fused_layouts_only_the_query_and_key_rows_change(name):
    model = MODELS[name]().double()
    reg = regulariser(model)
    reg.add_gradient_()
    for attention in reg.attentions:
        gradient = attention.key.tensor.grad.clone()
        assert gradient.abs().max() > 0
        attention.query.view(gradient).zero_()
        attention.key.view(gradient).zero_()
        assert gradient.abs().max() == 0  # nothing was written elsewhere


def test_a_shared_key_collects_the_sum_over_its_query_heads():
    model = build("llama").double()
    reg = LocAteR(model, scale_strength=0.0, mean_strength=1.0, target=0.0)
    reg.add_gradient_()
    attention = reg.attentions[0]
    w_q, w_k = attention.query.weight, attention.key.weight  # (2, 2, 8, 32), (2, 1, 8, 32)
    trace = (w_q * w_k).sum((-2, -1), keepdim=True)
    torch.testing.assert_close(attention.key.view(attention.key.tensor.grad), (2 * trace * w_q).sum(1, keepdim=True))


def test_gradients_are_added_not_replaced():
    model = MODELS["nn.MultiheadAttention"]()
    reg = regulariser(model)
    reg.add_gradient_()
    once = model.in_proj_weight.grad.clone()
    reg.add_gradient_()
    torch.testing.assert_close(model.in_proj_weight.grad, 2 * once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precisions_follow_float64(dtype):
    model = build("llama")
    low = copy.deepcopy(model).to(dtype)
    same = copy.deepcopy(low).double()
    regulariser(low).add_gradient_()
    regulariser(same).add_gradient_()
    for key, gradient in gradients(low).items():
        expected = gradients(same)[key]
        # products are float32 (sums of 32 terms); half precisions round once more, to the gradient's type
        roundings = 8 if dtype == torch.float32 else 2
        assert (gradient.double() - expected).norm() <= roundings * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-new", "whisper", "plain, grouped", "joint, three heads"])
def test_modules_stacked_into_one_batch_get_the_same_gradients(name):
    """As on a GPU without Triton; on a CPU each is worked on in place."""
    from locater.control._closed_form import Coefficients

    model = nn.ModuleList([MODELS[name](), MODELS[name]()]).double()
    reg = regulariser(model)
    reg.add_gradient_()
    in_place = copy.deepcopy(gradients(model))
    model.zero_grad()
    groups = reg._groups(lambda _: 0, None)
    assert max(len(group.members) for group in groups) > 1
    for group in groups:
        group.add_stacked(group.members, Coefficients(reg.scale_strength, reg.mean_strength, reg.target))
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, in_place[key], rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_the_gradients_are_those_of_the_cpu(name):
    model = MODELS[name]()
    regulariser(model).add_gradient_()
    expected = {key: gradient.clone() for key, gradient in gradients(model).items()}
    model.zero_grad()
    moved = model.cuda()
    regulariser(moved).add_gradient_()
    for key, gradient in gradients(moved).items():
        # float32 sums of up to a few hundred terms, in another order
        assert (gradient.cpu() - expected[key]).norm() <= 1e-5 * expected[key].norm(), key


def test_frozen_parameters_are_left_alone():
    model = build("llama").double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name and "q_proj" in name)
    reg = regulariser(model)
    reg.add_gradient_()
    assert set(gradients(model)) == {"model.layers.1.self_attn.q_proj.weight"}
    expected = torch.autograd.grad(reg.penalty(), reg.attentions[1].query.tensor)[0]
    torch.testing.assert_close(reg.attentions[1].query.tensor.grad, expected)


def test_parameters_shared_by_two_modules_collect_both_gradients():
    model = nn.ModuleList([Plain(), Plain(), Plain()]).double()
    model[1].q_proj.weight = model[0].q_proj.weight
    model[2].k_proj.weight = model[0].k_proj.weight
    reg = regulariser(model)
    assert len(reg.attentions) == 3
    reg.penalty().backward()
    expected = copy.deepcopy(gradients(model))
    model.zero_grad()
    reg.add_gradient_()
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[key])


# ---------------------------------------------------------------- the paper


def test_the_printed_gradient_of_the_trace_term_is_not_the_gradient():
    """Section 6 prints (tr − 1)·tr·W_K for 2(tr − 1)·W_K."""
    model = MODELS["nn.MultiheadAttention"]().double()
    reg = LocAteR(model, scale_strength=0.0, mean_strength=1.0)
    reg.add_gradient_()
    attention = reg.attentions[0]
    got = attention.query.view(attention.query.tensor.grad)
    trace = attention.qk().trace()[..., None, None]
    torch.testing.assert_close(got, 2 * (trace - 1) * attention.key.weight)
    printed = (trace - 1) * trace * attention.key.weight
    assert (printed - got).norm() > 0.5 * got.norm()


@pytest.mark.parametrize(("scale_strength", "mean_strength"), [(1.0, 0.01), (1.0, 1.0), (0.02, 1.0)])
def test_without_a_task_the_penalty_settles_at_a_multiple_of_the_identity(scale_strength, mean_strength):
    """Its minimiser is a·I with a = mean_strength/(scale_strength + d·mean_strength), for a jointly trained W_QK."""
    torch.manual_seed(0)
    model = Joint(width=5).double()
    reg = LocAteR(model, scale_strength=scale_strength, mean_strength=mean_strength)
    rate = 0.4 / (scale_strength + 5 * mean_strength)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    reg.attach(optimizer)
    for _ in range(8000):
        optimizer.zero_grad()
        optimizer.step()
    a = mean_strength / (scale_strength + 5 * mean_strength)
    torch.testing.assert_close(model.w_qk.detach(), a * torch.eye(5, dtype=torch.float64), atol=1e-6, rtol=0)


def test_as_printed_a_larger_kappa_2_raises_the_scale_and_swapped_it_lowers_it():
    """The reading that `from_paper` takes is the one in which Fig. 6B's trend is guaranteed."""

    def scale(scale_strength, mean_strength, d=128):
        a = mean_strength / (scale_strength + d * mean_strength)
        return d * a**2

    kappas = (1e-3, 1e-2, 1e-1, 1.0)
    printed = [scale(100.0, kappa_2) for kappa_2 in kappas]
    swapped = [scale(kappa_2, 100.0) for kappa_2 in kappas]
    assert printed == sorted(printed)
    assert swapped == sorted(swapped, reverse=True)
    reg = LocAteR.from_paper(Joint(), kappa_1=100, kappa_2=0.5, tokens_per_batch=4096)
    assert reg.mean_strength == 100 / 4096
    assert reg.scale_strength == 0.5 / 4096
    assert reg.target == 1


def test_the_target_of_one_is_far_below_the_threshold_of_localisation():
    """tr W = 1 means r = tr W/λ = 0.088 at d = 128, λ = √d; the middle-site focus of Lemma 2 needs r > 2."""
    import numpy as np

    from locater import TokenProcess, rho
    from locater.theory import regime

    walk, lam = TokenProcess.random_walk(64), np.sqrt(128)
    assert regime(rho(np.full(128, 1 / 128), walk, lam)) == "late"
    assert regime(rho(np.full(128, 4 * lam / 128), walk, lam)) == "middle"


# ---------------------------------------------------------------- attach


def toy(seed=0):
    torch.manual_seed(seed)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2).double()
    # float64: a key bias has gradient zero, and Adam would turn float32's rounding of it into full steps
    x, y = torch.randn(2, 4, 6, 16, dtype=torch.float64)
    return model, lambda: (model(x) - y).square().mean()


def train(loss, optimizer, steps, penalty=None):
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        (value if penalty is None else value + penalty()).backward()
        optimizer.step()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


def assert_same_parameters(a, b, tolerance=1e-6):
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_attached_training_equals_training_on_loss_plus_penalty(name):
    (model, loss), (other, other_loss) = toy(), toy()
    optimizer, other_optimizer = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    regulariser(model).attach(optimizer)
    train(loss, optimizer, 5)
    train(other_loss, other_optimizer, 5, penalty=regulariser(other).penalty)
    assert_same_parameters(model, other, 1e-5)


def test_detached_it_does_nothing():
    (model, loss), (other, other_loss) = toy(), toy()
    optimizer, other_optimizer = (OPTIMIZERS["SGD"](m.parameters()) for m in (model, other))
    reg = regulariser(model).attach(optimizer)
    reg.detach()
    train(loss, optimizer, 3)
    train(other_loss, other_optimizer, 3)
    assert_same_parameters(model, other, 0)


def test_gradient_accumulation_adds_the_penalty_once_a_step():
    (model, loss), (other, other_loss) = toy(), toy()
    optimizer, other_optimizer = (OPTIMIZERS["SGD"](m.parameters()) for m in (model, other))
    regulariser(model).attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(4):
            (loss() / 4).backward()
        optimizer.step()
    train(other_loss, other_optimizer, 3, penalty=regulariser(other).penalty)
    assert_same_parameters(model, other)


def test_a_closure_that_runs_backward_inside_the_step_keeps_the_penalty():
    """Lightning and LBFGS do; a gradient added before the step would be zeroed by the closure."""
    (model, loss), (other, other_loss) = toy(), toy()
    optimizer, other_optimizer = (OPTIMIZERS["SGD"](m.parameters()) for m in (model, other))
    regulariser(model).attach(optimizer)

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for how in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        assert how() > 0  # the loss comes back
    train(other_loss, other_optimizer, 2, penalty=regulariser(other).penalty)
    assert_same_parameters(model, other)


def test_clipping_does_not_clip_the_attached_penalty_but_clips_the_added_one():
    model, loss = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = regulariser(model).attach(optimizer)
    loss().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    optimizer.step()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert norm > 0.01
    reg.detach()
    optimizer.zero_grad()
    (loss() + reg.penalty()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    assert torch.cat([p.grad.flatten() for p in model.parameters()]).norm() <= 1.1e-6


class HalfPrecisionScaler:
    """What torch.amp.GradScaler does around a step, with its own arithmetic, on a CPU."""

    def __init__(self, fused, scale=1024.0):
        self.fused, self.scale = fused, torch.tensor(scale)

    def step(self, optimizer, overflow=False):
        if self.fused:
            optimizer.grad_scale, optimizer.found_inf = self.scale, torch.tensor(float(overflow))
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
        elif not overflow:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.div_(self.scale)
            optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_does_not_scale_the_penalty_and_skipped_steps_are_skipped(fused):
    (model, loss), (other, other_loss) = toy(), toy()
    kind = OPTIMIZERS["AdamW, fused"] if fused else OPTIMIZERS["AdamW"]
    optimizer, other_optimizer = kind(model.parameters()), kind(other.parameters())
    seen = []
    reg = regulariser(model, schedule=lambda step: seen.append(step) or 1.0).attach(optimizer)
    scaler = HalfPrecisionScaler(fused)
    for overflow in (False, True, False):
        optimizer.zero_grad()
        (scaler.scale * loss()).backward()
        scaler.step(optimizer, overflow)
    assert reg.step == 2
    train(other_loss, other_optimizer, 2, penalty=regulariser(other).penalty)
    assert_same_parameters(model, other, 1e-5)


def test_the_real_grad_scaler_agrees():
    (model, loss), (other, other_loss) = toy(), toy()
    for fused in (False, True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01, fused=fused)
        reg = regulariser(model).attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(loss()).backward()
            scaler.step(optimizer)
            scaler.update()
        reg.detach()
        train(other_loss, other_optimizer, 3, penalty=regulariser(other).penalty)
        assert_same_parameters(model, other, 2e-5)


def test_a_compiled_model_is_found_and_regularised():
    (model, loss), (other, other_loss) = toy(), toy()
    compiled = torch.compile(model, backend="eager")
    optimizer, other_optimizer = (OPTIMIZERS["SGD"](m.parameters()) for m in (model, other))
    reg = regulariser(compiled).attach(optimizer)
    assert len(reg.attentions) == 2
    train(loss, optimizer, 3)
    train(other_loss, other_optimizer, 3, penalty=regulariser(other).penalty)
    assert_same_parameters(model, other)


def test_several_parameter_groups_and_several_optimizers():
    (model, loss), (other, other_loss) = toy(), toy()

    def split(m):
        first = [p for name, p in m.named_parameters() if "layers.0" in name]
        second = [p for name, p in m.named_parameters() if "layers.0" not in name]
        return first, second

    reg = regulariser(model)
    optimizers = [torch.optim.SGD(part, lr=0.05) for part in split(model)]
    for optimizer in optimizers:
        reg.attach(optimizer)
    groups = [{"params": part, "lr": 0.05} for part in split(other)]
    together = torch.optim.SGD(groups, lr=1.0)
    regulariser(other).attach(together)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss().backward()
        for optimizer in optimizers:
            optimizer.step()
    train(other_loss, together, 3)
    # the second optimizer's step sees the first one's move, which only reaches other layers' parameters
    assert_same_parameters(model, other)


def test_a_schedule_multiplies_the_strength_by_the_step():
    model = Joint(width=3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reg = LocAteR(model, scale_strength=1.0, mean_strength=0.0, schedule=lambda step: float(step < 2)).attach(optimizer)
    for expected in (2.0, 2.0, 0.0):
        optimizer.zero_grad(set_to_none=False)
        model.w_qk.grad = torch.zeros_like(model.w_qk)
        optimizer.step()
        torch.testing.assert_close(model.w_qk.grad, expected * model.w_qk.detach())
    saved = reg.state_dict()
    fresh = LocAteR(model, scale_strength=9.0, mean_strength=9.0)
    fresh.load_state_dict(saved)
    assert (fresh.step, fresh.scale_strength, fresh.mean_strength) == (3, 1.0, 0.0)


def test_attached_twice_it_acts_once():
    model = Joint(width=3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reg = LocAteR(model, scale_strength=1.0, mean_strength=0.0)
    reg.attach(optimizer).attach(optimizer)
    optimizer.step()
    torch.testing.assert_close(model.w_qk.grad, 2 * model.w_qk.detach())
    assert reg.step == 1


def test_parameters_added_to_the_optimizer_later_are_regularised_too():
    model = nn.ModuleList([Plain(), Plain()])
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.0)
    regulariser(model).attach(optimizer)
    optimizer.step()
    assert model[1].q_proj.weight.grad is None
    optimizer.add_param_group({"params": list(model[1].parameters())})
    optimizer.step()
    assert model[1].q_proj.weight.grad.abs().max() > 0


def test_a_step_counts_once_with_closures_and_with_several_optimizers():
    model = nn.ModuleList([Plain(), Plain()])
    reg = regulariser(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, lr=1e-3)
    reg.attach(optimizer)

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)
    assert reg.step == 1
    reg.detach()
    two = [torch.optim.SGD(part.parameters(), lr=0.0) for part in model]
    for each in two:
        reg.attach(each)
    for each in 3 * two:
        each.step()
    assert reg.step == 4


def test_measure_reports_each_module_and_the_penalty():
    reg = regulariser(build("llama"))
    values = reg.measure()
    assert values["penalty"] == pytest.approx(reg.penalty().item(), rel=1e-5)
    assert values["model.layers.1.self_attn/trace"] == pytest.approx(
        attentions(build("llama"))[1].qk().trace().mean().item(), rel=1e-4
    )


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: LocAteR(Joint(), scale_strength=-1, mean_strength=0),
            "scale_strength must be .* not negative, got -1",
        ),
        (lambda: LocAteR(Joint(), scale_strength=0, mean_strength=float("nan")), "mean_strength"),
        (lambda: LocAteR(Joint(), scale_strength=0, mean_strength=0, target=float("inf")), "target"),
        (lambda: LocAteR(nn.Linear(2, 2), scale_strength=1, mean_strength=1), "no attention module .* Linear"),
        (lambda: LocAteR.from_paper(Joint(), tokens_per_batch=0), "tokens_per_batch"),
        (
            lambda: regulariser(Joint()).attach(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)),
            "holds none of the query and key weights",
        ),
        (lambda: regulariser(Joint()).load_state_dict({"step": 3}), "lacks"),
        (lambda: regulariser(Joint()).load_state_dict(None), "lacks"),
        (
            lambda: regulariser(Joint()).load_state_dict({**regulariser(Joint()).state_dict(), "step": -3}),
            "its step is -3",
        ),
        (
            lambda: regulariser(Joint()).load_state_dict(
                {"step": 3, "scale_strength": -1.0, "mean_strength": 0.0, "target": 1.0}
            ),
            "scale_strength must be",
        ),
    ],
)
def test_bad_arguments_are_refused(call, says):
    with pytest.raises(LocaterError, match=says):
        call()
