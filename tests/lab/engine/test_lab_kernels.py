"""The lab's Triton kernels against PyTorch in float64.

Without a GPU they run in Triton's interpreter, as `interpreter` says.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from interpreter import DEVICE, ON_GPU, imported_without_triton, on_gpu, runs
from locater import _triton
from locater.errors import LocaterError
from locater.lab.engine import _kernels
from locater.lab.engine._kernels import Tiles, _adamw, _dropout, _vocabulary, adamw_, exp_logits, weight_gradient

pytest.importorskip("triton")

HALF = 2.0 ** -(8 if ON_GPU else 7)  # the largest relative error of bfloat16; the interpreter cuts off, not rounds
# logits are float32 sums of at most 128 products of a few units; then 2^-22 of exp2, and the sum over the words
EXACT = 3e-5


# ---------------------------------------------------------------------- exponentials of logits, and their products

SMALL = Tiles(16, 32, 4, 2)
GRID = Tiles(16, 32, 4, 1, parts=None)  # over tokens and words
WAYS = [
    SMALL,
    Tiles(64, 16, 4, 3),
    GRID,
    Tiles(32, 16, 4, 2, parts=2),
    Tiles(16, 32, 4, 2, descriptors=True),
    Tiles(32, 32, 4, 2, parts=None, descriptors=True),
]


class Problem:
    """Tokens and words of E models, targets among them, and what should come out."""

    def __init__(self, members=2, tokens=37, words=75, width=32, dtype=torch.bfloat16, padding=0):
        generator = torch.Generator(DEVICE).manual_seed(0)
        kind = {"device": DEVICE, "generator": generator}
        self.x = torch.randn(members, tokens, width, **kind).to(dtype)
        # one of several parameters of a model, all of them in a row
        flat = torch.randn(members, words * width + padding, **kind).mul_(3 * width**-0.5).to(dtype)
        self.w = flat[:, padding:].view(members, words, width)
        self.targets = torch.randint(words, (members, tokens), **kind)
        chosen = self.w.gather(1, self.targets[..., None].expand(-1, -1, width))
        self.shift = (self.x.float() * chosen.float()).sum(-1)

    def exponentials(self):
        s = self.x.double() @ self.w.double().mT
        return (s - self.shift.double()[..., None]).clamp(max=75).exp()

    def check(self, z, y, out=None):
        e, w = self.exponentials(), self.w.double()
        assert ((z - e.sum(-1)).abs() <= EXACT * e.sum(-1)).all()
        if out is not None:
            assert ((out.double() - e).abs() <= (HALF + EXACT) * e).all()
        if y is not None:  # e is rounded, and w if it was float16; each rounding is at most HALF
            rounding = HALF if self.w.dtype == torch.bfloat16 else 2 * HALF
            assert ((y - e @ w).abs() <= (rounding + EXACT) * (e @ w.abs())).all()


@runs
@pytest.mark.parametrize("tiles", [SMALL, GRID, Tiles(32, 16, 4, 2, parts=2, descriptors=True)])
@pytest.mark.parametrize(("tokens", "words", "width"), [(37, 75, 32), (5, 130, 64), (16, 64, 128), (20, 33, 40)])
def test_sums_and_products_of_exponentials(tiles, tokens, words, width):
    problem = Problem(2, tokens, words, width)
    problem.check(*exp_logits(problem.x, problem.w, problem.shift, tiles=tiles))


@runs
@pytest.mark.parametrize(("dtype", "product"), [(torch.bfloat16, False), (torch.float16, True)])
@pytest.mark.parametrize("tiles", WAYS)
def test_exponentials_can_be_kept(dtype, product, tiles):
    problem = Problem(dtype=dtype)
    stored = torch.full((2, 37, 80), -1.0, dtype=torch.bfloat16, device=DEVICE)  # rows of a multiple of 16 bytes
    out = stored[..., :75]
    z, y = exp_logits(problem.x, problem.w, problem.shift, out=out, product=product, tiles=tiles)
    assert (y is None) == (not product)
    problem.check(z, y, out)
    assert (stored[..., 75:] == -1).all()


@runs
@pytest.mark.parametrize("tiles", WAYS)
def test_only_the_sums_if_nothing_else_is_asked_for(tiles):
    problem = Problem()
    z, y = exp_logits(problem.x, problem.w, problem.shift, product=False, tiles=tiles)
    assert y is None
    problem.check(z, y)


@runs
@pytest.mark.parametrize("tiles", WAYS)
@pytest.mark.parametrize(
    ("dtype", "tokens", "words", "width"), [(torch.bfloat16, 37, 75, 32), (torch.float16, 75, 20, 128)]
)
def test_loss_and_gradients_are_those_of_the_cross_entropy(tiles, dtype, tokens, words, width):
    problem = Problem(2, tokens, words, width, dtype)
    x, w = problem.x.double().requires_grad_(), problem.w.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy((x @ w.mT).flatten(0, 1), problem.targets.flatten(), reduction="none")
    loss.sum().backward()

    z, y = exp_logits(problem.x, problem.w, problem.shift, tiles=tiles)
    d_w = weight_gradient(problem.x, problem.w, problem.shift + z.log(), tiles=tiles)
    index = problem.targets[..., None].expand(-1, -1, width)
    d_x = y / z[..., None] - problem.w.gather(1, index).float()
    d_w.scatter_add_(1, index, -problem.x.float())
    rounding = 4 * HALF  # of sums of magnitudes below 1 times a few units
    assert (z.log().flatten() - loss).abs().max() < EXACT
    assert (d_x - x.grad).abs().max() < rounding * w.abs().max()
    assert (d_w - w.grad).abs().max() < rounding * w.grad.abs().max()


@runs
@pytest.mark.parametrize("padding", [8, 5])  # parameters that start at a multiple of 16 bytes, or do not
@pytest.mark.parametrize("tiles", [SMALL, Tiles(16, 32, 4, 2, descriptors=True)])
def test_words_may_lie_among_other_parameters(padding, tiles):
    problem = Problem(padding=padding)
    problem.check(*exp_logits(problem.x, problem.w, problem.shift, tiles=tiles))


@runs
@pytest.mark.parametrize("tiles", [SMALL, GRID])
def test_the_gradient_may_lie_among_others(tiles):
    problem = Problem()
    stored = torch.full((2, 16 + 75 * 32 + 16), 7.0, device=DEVICE)
    out = stored[:, 16:-16].view(2, 75, 32)
    shift = problem.shift + 3
    assert weight_gradient(problem.x, problem.w, shift, out=out, tiles=tiles) is out
    assert torch.equal(out, weight_gradient(problem.x, problem.w, shift, tiles=tiles))
    assert (stored[:, :16] == 7).all()
    assert (stored[:, -16:] == 7).all()


@runs
def test_a_hopeless_target_gives_large_numbers_and_no_infinities():
    problem = Problem()
    problem.shift[1, 3] = -500.0
    z, y = exp_logits(problem.x, problem.w, problem.shift, tiles=SMALL)
    problem.check(z, y)
    assert z[1, 3] > 1e34
    assert y.isfinite().all()


@runs
def test_a_member_does_not_depend_on_its_neighbours():
    problem = Problem(members=3)
    together = exp_logits(problem.x, problem.w, problem.shift, tiles=SMALL)
    alone = exp_logits(problem.x[1:2], problem.w[1:2], problem.shift[1:2], tiles=SMALL)
    assert all(torch.equal(many[1:2], one) for many, one in zip(together, alone, strict=True))


@runs
@pytest.mark.parametrize("width", [32, 128])
@pytest.mark.parametrize("product", [True, False])
@pytest.mark.parametrize("store", [True, False])
def test_all_candidates_compute_the_same(width, product, store):
    problem = Problem(1, 130, 150, width)
    assert len(_kernels.candidates(width, product=product, store=store)) <= 8
    for tiles in _kernels.candidates(width, product=product, store=store):
        out = torch.empty(1, 130, 152, dtype=torch.bfloat16, device=DEVICE)[..., :150] if store else None
        problem.check(*exp_logits(problem.x, problem.w, problem.shift, out=out, product=product, tiles=tiles), out)


@runs
def test_operands_that_do_not_fit_are_refused():
    problem = Problem()
    x, w, shift = problem.x, problem.w, problem.shift
    with pytest.raises(LocaterError, match=r"\(2, 37, 32\), \(2, 75, 31\)"):
        exp_logits(x, w[..., :31], shift)
    with pytest.raises(LocaterError, match=r"float32, torch\.float32"):
        exp_logits(x.float(), w.float(), shift)
    with pytest.raises(LocaterError, match="contiguous"):
        exp_logits(x.mT.contiguous().mT, w, shift)
    with pytest.raises(LocaterError, match=r"out must be \(2, 37, 75\) in bfloat16"):
        exp_logits(x, w, shift, out=torch.empty(2, 37, 75, device=DEVICE))
    with pytest.raises(LocaterError, match=r"out must be \(2, 75, 32\) in float32"):
        weight_gradient(x, w, shift, out=torch.empty(2, 75, 16, device=DEVICE))
    large = torch.empty_strided((2, 37, 75), (1 << 32, 1 << 26, 1), dtype=torch.bfloat16, device="meta")
    with pytest.raises(LocaterError, match=r"2\^31"):
        exp_logits(x, w, shift, out=large)
    wide = Problem(width=160)
    with pytest.raises(LocaterError, match="160"):
        weight_gradient(wide.x, wide.w, wide.shift)


@on_gpu
@pytest.mark.parametrize("width", [128, 32])
def test_tuning_leaves_right_results_behind(width, monkeypatch):
    monkeypatch.setattr(_vocabulary, "_TUNED", {})
    problem = Problem(2, 512, 1024, width)
    out = torch.empty(2, 512, 1024, dtype=torch.bfloat16, device=DEVICE)
    times = _kernels.tune(problem.x, problem.w, problem.shift, out=out)
    assert set(_vocabulary._TUNED.values()) == {min(times, key=times.get)}
    problem.check(*exp_logits(problem.x, problem.w, problem.shift, out=out), out)


@on_gpu
@pytest.mark.parametrize("width", [128, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_real_size_against_float32(width, dtype):
    members, tokens, words = 3, 4096, 33280
    problem = Problem(members, tokens, words, width, dtype)
    out = torch.empty(members, tokens, words, dtype=torch.bfloat16, device=DEVICE)
    z, y = exp_logits(problem.x, problem.w, problem.shift, out=out)
    for ways in (
        {},
        {"out": torch.empty_like(out)},
        {"out": torch.empty_like(out), "tiles": Tiles(128, 128, 8, 1, None)},
    ):
        again, _ = exp_logits(problem.x, problem.w, problem.shift, product=False, **ways)
        torch.testing.assert_close(again, z, rtol=EXACT, atol=0)
        assert "out" not in ways or torch.equal(ways["out"], out)
    d_w = weight_gradient(problem.x, problem.w, problem.shift + z.log())
    assert torch.equal(d_w, weight_gradient(problem.x, problem.w, problem.shift + z.log()))

    rounding = HALF if dtype == torch.bfloat16 else 2 * HALF
    for member in range(members):
        w, expected, size = problem.w[member].float(), torch.zeros_like(d_w[0]), torch.zeros_like(d_w[0])
        for start in range(0, tokens, 512):  # 68 MB of logits
            part = slice(start, start + 512)
            x, shift = problem.x[member, part].float(), problem.shift[member, part, None]
            e = (x @ w.mT - shift).exp()
            sums = e.sum(-1, keepdim=True)
            torch.testing.assert_close(z[member, part, None], sums, rtol=EXACT, atol=0)
            assert ((out[member, part] - e).abs() <= (HALF + EXACT) * e).all()
            assert ((y[member, part] - e @ w).abs() <= (rounding + EXACT) * (e @ w.abs())).all()
            expected += (e / sums).mT @ x
            size += (e / sums).mT @ x.abs()
        assert ((d_w[member] - expected).abs() <= (rounding + EXACT) * size).all()


# ---------------------------------------------------------------------- AdamW


def updated(steps, **kind):
    """p of three members after some updates of `adamw_`, of which the second takes none; and the others' by PyTorch."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    count, rates, decays, scales = 1500, (1e-3, 1e-2, 3e-2), (0.01, 0.1, 0.5), (1.0, 0.5, 0.25)
    start = torch.randn(3, count, device=DEVICE, generator=generator)
    members = [torch.nn.Parameter(row.double()) for row in start]
    optimizers = [
        torch.optim.AdamW([member], lr=rate, weight_decay=decay, foreach=False)
        for member, rate, decay in zip(members, rates, decays, strict=True)
    ]
    p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    low = torch.full_like(p, 7.0, dtype=kind["low"]) if kind.get("low") else None
    at = {"device": DEVICE}
    active = torch.tensor([1, 0, 1], **at).to(kind.get("active", torch.bool))
    for step in range(1, steps + 1):
        g = torch.randn(3, count, device=DEVICE, generator=generator)
        adamw_(
            p, g, m, v, low, learning_rate=torch.tensor(rates, **at), decay=torch.tensor(decays, **at),
            step=torch.full((3,), step, **at), active=active, grad_scale=torch.tensor(scales, **at),
        )  # fmt: skip
        for e in (0, 2):
            members[e].grad = g[e].double() * scales[e]
            optimizers[e].step()
    return p, m, v, low, start, torch.stack([member.detach() for member in members])


@runs
@pytest.mark.parametrize("active", [torch.bool, torch.int64, torch.float32])
def test_adamw_is_pytorchs_for_active_members_and_leaves_others_alone(active):
    p, m, v, low, start, expected = updated(4, active=active)
    assert low is None
    assert torch.equal(p[1], start[1])
    assert not m[1].any()
    assert not v[1].any()
    torch.testing.assert_close(p.double(), expected, rtol=0, atol=1e-6)  # 4 updates of numbers up to 4, 2^-24 of each


@runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_copy_in_half_precision_follows(dtype):
    p, *_, low, _, _ = updated(2, low=dtype)
    torch.testing.assert_close(low[::2].float(), p[::2], rtol=HALF, atol=1e-7)
    assert (low[1] == 7).all()


@runs
@pytest.mark.parametrize("step", [1, 2, 10, 499, 500, 501, 5_000, 50_000, 1_000_000])
def test_the_bias_correction_keeps_its_precision(step):
    one = torch.ones(1, device=DEVICE)
    p, m, v, g = (torch.full((1, 8), value, device=DEVICE) for value in (0.0, 0.0, 0.0, 2.0))
    adamw_(p, g, m, v, None, learning_rate=one, decay=one, step=one.long() * step, active=one, eps=1e-20)
    ratio = (0.1 / (1 - 0.9**step)) / (0.001 / (1 - 0.999**step)) ** 0.5
    torch.testing.assert_close(p.double(), torch.full_like(p, -ratio, dtype=torch.float64), rtol=1e-6, atol=0)


@runs
def test_an_inactive_member_survives_gradients_that_overflowed():
    at = {"device": DEVICE}
    p, m, v = (torch.ones(2, 40, **at) for _ in range(3))
    one = torch.ones(2, **at)
    g = torch.full((2, 40), torch.inf, **at)
    adamw_(p, g, m, v, None, learning_rate=one, decay=one, step=one, active=torch.zeros(2, dtype=torch.bool, **at))
    assert all((tensor == 1).all() for tensor in (p, m, v))


@runs
def test_adamw_refuses_what_it_would_misread():
    p, one = torch.zeros(2, 40, device=DEVICE), torch.ones(2, device=DEVICE)
    given = {"learning_rate": one, "decay": one, "step": one, "active": one}
    with pytest.raises(LocaterError, match="m must be contiguous"):
        adamw_(p, p, torch.zeros(40, 2, device=DEVICE).mT, p, None, **given)
    with pytest.raises(LocaterError, match="float64"):
        adamw_(p, p, p.double(), p, None, **given)
    with pytest.raises(LocaterError, match=r"step must be \(2,\)"):
        adamw_(p, p, p, p, None, **given | {"step": one[:1]})
    with pytest.raises(LocaterError, match="g must be"):
        adamw_(p, p[:, ::2], p, p, None, **given)


@on_gpu
def test_adamw_at_the_real_size():
    members, count = 3, 2 * 33280 * 128 + 48
    p, g = (torch.randn(members, count, device=DEVICE) for _ in range(2))
    m, v, low, start = torch.zeros_like(p), torch.zeros_like(p), torch.empty_like(p, dtype=torch.bfloat16), p.clone()
    one = torch.ones(members, device=DEVICE)
    adamw_(p, g, m, v, low, learning_rate=1e-3 * one, decay=0.1 * one, step=one, active=one)
    expected = start.double() * (1 - 1e-4) - 1e-3 * g.double() / (g.double().abs() + 1e-8)
    torch.testing.assert_close(p.double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(low, p.to(torch.bfloat16))


# ---------------------------------------------------------------------- where they run


@runs
def test_they_are_available_here():
    assert _kernels.available(torch.empty(1, device=DEVICE))
    assert not _kernels.available(torch.empty(1, device="meta"))


def test_tensors_on_a_cpu_are_left_to_pytorch():
    assert not _kernels.available(torch.empty(1))


def test_without_triton_the_modules_import_and_nothing_is_available(monkeypatch):
    *_, module = imported_without_triton(monkeypatch, _triton, _adamw, _dropout, _vocabulary, _kernels)
    assert not module.available(torch.empty(1))
    assert not module.available(torch.empty(1, device=DEVICE))


@runs
def test_the_same_call_gives_the_same_bits():
    problem = Problem()
    calls = [exp_logits(problem.x, problem.w, problem.shift, tiles=Tiles(32, 16, 4, 2, parts=2)) for _ in range(3)]
    assert all(torch.equal(a, b) for one, other in pairwise(calls) for a, b in zip(one, other, strict=True))
