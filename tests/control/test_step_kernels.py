"""The kernels of a bounded step, with every layout that weights are stored in, and steps made by them.

Without a GPU they run in Triton's interpreter, as `interpreter` says.
"""

from __future__ import annotations

import copy

import pytest
import torch
from layouts import fused, rows, transposed, unaligned

from interpreter import DEVICE, runs
from locater.control import DecoupledLocAteR, _bounded
from locater.control._step_kernels import addresses, mix_, moments, project
from locater.control._weights import Stored
from locater.control.rules.decoupled import logit_moments
from locater.models import Rope, attentions

pytest.importorskip("triton")

LAYOUTS = [rows, fused, transposed, unaligned]


def weights_of(layout, dtype, modules=2):
    """Of some modules, alike: their views of queries and of keys."""
    made = [layout(3, 2, 20, 37, dtype=dtype, device=DEVICE) for _ in range(modules)]
    queries = [of_query(query, key) for query, key, of_query, _ in made]
    return queries, [of_key(query, key) for query, key, _, of_key in made]


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_is_projected_and_the_weights_are_copied_in_one_pass(layout, dtype):
    torch.manual_seed(0)
    for views in weights_of(layout, dtype):
        half = DEVICE == "cuda"
        states = torch.randn(2, 2, 5, 37, device=DEVICE, dtype=torch.float16 if half else torch.float32)
        table = addresses(views)
        found, copied = project(table, views, states, copied=True)
        expected = torch.einsum("sbnd,sgrkd->sgrbnk", states.double(), torch.stack(views).double())
        # a sum of 37 products of numbers of about 1, each to 2⁻¹¹ or 2⁻²⁴
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-2 if half else 1e-4)
        again, none = project(table, views, states, copied=False)
        assert none is None
        torch.testing.assert_close(again, found)
        # what was copied is what was there: mixed in whole, it is there again, to the last bit
        before = [view.clone() for view in views]
        for view in views:
            view.fill_(torch.nan)
        nothing, whole = torch.zeros(2, 1, 1, device=DEVICE), torch.ones(2, 1, 1, device=DEVICE)
        mix_(table, views, copied, nothing, whole)
        assert all(torch.equal(view, own) for view, own in zip(views, before, strict=True))


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_are_mixed_with_what_they_were_and_the_others_stay_as_they_are(layout, dtype):
    torch.manual_seed(0)
    for views in weights_of(layout, dtype):
        g, r = views[0].shape[:2]
        table = addresses(views)
        old, copied = (
            [view.clone() for view in views],
            project(table, views, torch.zeros(2, 1, 1, 37, device=DEVICE), copied=True)[1],
        )
        for view in views:
            view.copy_(torch.randn_like(view))
        new, was = torch.rand(2, 2, g, r, device=DEVICE).unbind(0)
        new[0, 0], was[0, 0] = 1.0, 0.0
        views[0][0, 0, 0, 0] = torch.nan  # of a head that is not touched
        before = [view.clone() for view in views]
        mix_(table, views, copied, new, was)
        for view, own, earlier, a, b in zip(views, before, old, new, was, strict=True):
            expected = a[..., None, None] * own.float() + b[..., None, None] * earlier.float()
            torch.testing.assert_close(view, expected.to(dtype), equal_nan=True)
        assert torch.equal(views[0][0].flatten()[1:], before[0][0].flatten()[1:])


@runs
@pytest.mark.parametrize(
    ("k", "pairs", "interleaved"), [(20, 0, False), (20, 10, False), (20, 10, True), (24, 6, False)]
)
@pytest.mark.parametrize(("r", "n"), [(1, 7), (3, 16)])
def test_moments_are_those_of_the_logits(k, pairs, interleaved, r, n):
    torch.manual_seed(0)
    old, new = ([torch.randn(2, 3, h, 2, n, k, device=DEVICE) for h in (r, 1)] for _ in range(2))
    rope = Rope(torch.rand(pairs, dtype=torch.float64), interleaved) if pairs else None
    rotation = None if rope is None else rope.angles(torch.arange(n, device=DEVICE), torch.float32)

    def logits(q, k):
        if rope is not None:
            q, k = rope.rotate_by(q, *rotation), rope.rotate_by(k, *rotation)
        return 0.3 * (q @ k.mT)

    found = moments(old, new, 0.3, rotation, interleaved)
    torch.testing.assert_close(found, logit_moments(logits(*old), logits(*new)), rtol=1e-4, atol=1e-4)


@runs
@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter multiplies with numpy
def test_what_is_not_finite_and_single_tokens_have_no_moments():
    old, new = ([torch.randn(2, 1, 1, 2, 5, 16, device=DEVICE) for _ in range(2)] for _ in range(2))
    new[1][1, 0, 0, 0, 3, 2] = torch.inf
    found = moments(old, new, 1.0, None, False)
    assert found[0].isfinite().all()
    assert found[1, ..., 0].isfinite().all()
    assert not found[1, ..., 1:].isfinite().any()
    assert moments([x[..., :1, :] for x in old], [x[..., :1, :] for x in new], 1.0, None, False).isnan().all()


def wide(family):
    """A model whose heads are wide enough for kernels."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    if family != "gpt2":
        sizes |= {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))


@runs
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_steps_by_kernels_are_those_without(monkeypatch, family):
    torch.manual_seed(0)
    models = [wide(family).to(DEVICE)]
    models.append(copy.deepcopy(models[0]))
    for index, model in enumerate(models):
        if index:
            monkeypatch.setattr(_bounded, "supported", lambda *_: False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        reg = DecoupledLocAteR(model, change=1e-2, spread=0.3).attach(optimizer)
        for step in range(3):
            torch.manual_seed(step)
            ids = torch.randint(0, 50, (2, 6), device=DEVICE)
            model.train()(input_ids=ids)
            for p in model.parameters():
                p.grad = 0.03 * torch.randn_like(p)
            optimizer.step()
        assert reg._states.entered()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        # on a GPU products are of half precision in both, summed in another order
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 if DEVICE == "cpu" else 2e-3)
    for attention in attentions(models[0]):
        assert attention.query.tensor.isfinite().all()


@runs
def test_biases_of_two_precisions_are_mixed_without_kernels():
    biases = [torch.randn(3, 4, device=DEVICE), torch.randn(3, 4, device=DEVICE).bfloat16()]
    stored = Stored(biases, 0, lambda bias: bias[:, None, :, None])
    before, old = [bias.clone() for bias in biases], stored.copied()
    for bias in biases:
        bias.add_(1.0)
    half = torch.full((2, 3, 1), 0.5, device=DEVICE)
    stored.mix_(old, half, torch.ones_like(half))
    for bias, own in zip(biases, before, strict=True):
        torch.testing.assert_close(bias.float(), own.float() + 0.5, rtol=1e-2, atol=1e-2)
