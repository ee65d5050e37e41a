"""The Triton kernels against the formula in float64, with every layout that weights are stored in.

Without a GPU they run in Triton's interpreter, as `interpreter` says.
"""

from __future__ import annotations

import pytest
import torch
from layouts import fused, rows, transposed, unaligned

from interpreter import DEVICE, INTERPRETED, ON_GPU, imported_without_triton, runs
from locater import _triton
from locater.control import _kernels

SCALE, MEAN, TARGET = 0.3, 0.7, 1.5

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes them one by one."""
    if INTERPRETED:
        monkeypatch.setattr(_kernels, "_PROGRAMS", 16)


class Modules:
    """S modules of one shape, with gradients that are there already, and what they should become."""

    def __init__(self, layout, *shape, modules=2, dtype=torch.float32, gradient=torch.float32):
        torch.manual_seed(0)
        stored = [layout(*shape, dtype=dtype, device=DEVICE) for _ in range(modules)]
        self.stored = [
            (torch.randn_like(query, dtype=gradient), torch.randn_like(key, dtype=gradient))
            for query, key, *_ in stored
        ]
        if stored[0][0] is stored[0][1]:
            self.stored = [(query, query) for query, _ in self.stored]
        self.before = [(query.double(), key.double()) for query, key in self.stored]
        self.w_q = [view(query, key) for query, key, view, _ in stored]
        self.w_k = [view(query, key) for query, key, _, view in stored]
        self.views = [views for _, _, *views in stored]
        self.g_q, self.g_k = ([v[side](*g) for v, g in zip(self.views, self.stored, strict=True)] for side in (0, 1))

    def add(self, scale=SCALE, mean=MEAN, wanted=(True, True)):
        arguments = self.w_q, self.w_k, self.g_q if wanted[0] else None, self.g_k if wanted[1] else None
        assert _kernels.supported(*arguments)
        _kernels.add_gradients_(*arguments, scale, mean, TARGET)

    def check(self, tolerance, wanted=(True, True)):
        """All stored elements, so also that none beside the views was touched; relative to the largest."""
        for w_q, w_k, views, before, after in zip(
            self.w_q, self.w_k, self.views, self.before, self.stored, strict=True
        ):
            q, k = w_q.double(), w_k.double()
            pull = MEAN * ((q * k).sum((-1, -2), keepdim=True) - TARGET)
            expected = [tensor.clone() for tensor in before]
            if after[0] is after[1]:
                expected[1] = expected[0]
            if wanted[0]:
                views[0](*expected).add_(SCALE * (k @ k.mT) @ q + pull * k)
            if wanted[1]:
                views[1](*expected).add_(SCALE * (q @ q.mT).sum(1, keepdim=True) @ k + (pull * q).sum(1, keepdim=True))
            for got, want in zip(after, expected, strict=True):
                assert (got.double() - want).abs().max() <= tolerance * want.abs().max()


# float32 sums of at most 4,096 products: errors of 2^-24 each, that add up as a random walk
EXACT = 1e-5
# TF32 cuts both factors off after 10 bits, in the Gram matrix and again in its product: 4 · 2^-10 of the sum of the
# magnitudes. The interpreter does not. bfloat16 gradients keep 8 bits.
TF32 = BFLOAT16 = 2.0**-7


# ---------------------------------------------------------------------- what they compute


@runs
@pytest.mark.parametrize("layout", [rows, transposed, fused, unaligned])
@pytest.mark.parametrize(("groups", "heads", "k", "d"), [(2, 1, 16, 40), (1, 3, 24, 40), (1, 1, 64, 128)])
def test_the_gradients_are_the_closed_form_added_to_what_was_there(layout, groups, heads, k, d):
    modules = Modules(layout, groups, heads, k, d)
    modules.add()
    modules.check(EXACT)


@runs
@pytest.mark.parametrize("k", [96, 192, 256])
def test_wide_heads_are_done_in_tiles(k):
    modules = Modules(rows, 1, 2, k, 40, modules=1)
    modules.add()
    modules.check(EXACT)


@runs
@pytest.mark.parametrize("layout", [rows, transposed])
@pytest.mark.parametrize(
    ("dtype", "gradient", "tolerance"),
    [
        (torch.bfloat16, torch.bfloat16, BFLOAT16),
        (torch.bfloat16, torch.float32, TF32 if ON_GPU else EXACT),
        (torch.float16, torch.float16, TF32),
    ],
)
def test_half_weights_are_summed_in_float32(layout, dtype, gradient, tolerance):
    modules = Modules(layout, 1, 2, 24, 40, modules=1, dtype=dtype, gradient=gradient)
    modules.add()
    modules.check(tolerance)


@runs
@pytest.mark.parametrize(("layout", "k"), [(rows, 16), (rows, 64), (rows, 128), (transposed, 64), (fused, 128)])
def test_float32_multiplies_in_tf32_where_pytorch_may(layout, k):
    modules = Modules(layout, 1, 2, k, 72, modules=1)
    torch.set_float32_matmul_precision("high")
    try:
        modules.add()
    finally:
        torch.set_float32_matmul_precision("highest")
    modules.check(TF32 if ON_GPU else EXACT)


@runs
def test_three_products_in_tf32_are_as_good_as_float32(monkeypatch):
    monkeypatch.setattr(_kernels, "FULL_PRECISION", "tf32x3")
    modules = Modules(rows, 1, 1, 64, 72)
    modules.add()
    modules.check(EXACT)


@runs
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("layout", [rows, fused])
def test_only_the_wanted_side_is_written(layout, wanted):
    modules = Modules(layout, 1, 2, 16, 40)
    modules.add(wanted=wanted)
    modules.check(EXACT, wanted)


@runs
@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
def test_coefficients_may_be_tensors_on_the_device(which):
    scale, mean = (torch.tensor(c, device=DEVICE) if t else c for c, t in zip((SCALE, MEAN), which, strict=True))
    modules = Modules(rows, 2, 1, 16, 40)
    modules.add(scale, mean)
    modules.check(EXACT)


@runs
def test_a_tied_factor_collects_both_gradients():
    modules = Modules(rows, 2, 1, 16, 40)
    modules.stored = [(query, query) for query, _ in modules.stored]
    modules.before = [(query, query) for query, _ in modules.before]
    modules.w_k, modules.g_k = modules.w_q, modules.g_q
    modules.add()
    modules.check(EXACT)


@runs
@pytest.mark.parametrize(("programs", "modules_at_once"), [(1, 15), (264, 15), (264, 4), (264, 0)])
def test_how_the_work_is_divided_does_not_show(monkeypatch, programs, modules_at_once):
    monkeypatch.setattr(_kernels, "_PROGRAMS", programs)
    monkeypatch.setattr(_kernels, "_GRAM_BYTES", modules_at_once * 2 * 16 * 16 * 4)
    modules = Modules(rows, 1, 1, 16, 40, modules=5)
    modules.add()
    modules.check(EXACT)


@runs
def test_the_same_call_gives_the_same_bits():
    first, second = (Modules(rows, 1, 1, 16, 128) for _ in range(2))
    first.add()
    second.add()
    assert all(torch.equal(a, b) for a, b in zip(first.g_q + first.g_k, second.g_q + second.g_k, strict=True))


# ---------------------------------------------------------------------- what they take


def plain(*shape, dtype=torch.float32, modules=2, device=DEVICE):
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(modules)]


@runs
def test_what_is_not_supported_is_said():
    q, k = plain(2, 3, 16, 40), plain(2, 1, 16, 40)
    assert _kernels.supported(q, k, q, k)
    assert _kernels.supported(q, k, None, None)
    assert not _kernels.supported([], [], None, None)
    assert not _kernels.supported(q, k[:1], None, None)
    assert not _kernels.supported(plain(2, 3, 8, 40), plain(2, 1, 8, 40), None, None)  # narrow heads
    assert not _kernels.supported(plain(1, 1, 257, 16), plain(1, 1, 257, 16), None, None)  # wide ones
    assert not _kernels.supported(q, plain(2, 3, 16, 40), None, None)
    assert not _kernels.supported(q, k, q, plain(2, 1, 16, 48))
    assert not _kernels.supported(q, plain(2, 1, 16, 40, dtype=torch.float16), None, None)
    assert not _kernels.supported(q, k, plain(2, 3, 16, 40, dtype=torch.float16), None)
    assert not _kernels.supported(*(plain(2, 1, 16, 40, dtype=torch.float64) for _ in range(2)), None, None)
    assert not _kernels.supported([q[0], plain(2, 3, 40, 16)[0].mT], k, None, None)  # strides that differ
    assert not _kernels.supported(q, plain(2, 1, 16, 40, device="meta"), None, None)
    halves = [plain(2, heads, 16, 40, dtype=torch.bfloat16) for heads in (3, 1)]
    assert _kernels.supported(*halves, q, halves[1])


def test_tensors_on_a_cpu_are_left_to_pytorch():
    q, k = plain(2, 3, 16, 40, device="cpu"), plain(2, 1, 16, 40, device="cpu")
    assert not _kernels.supported(q, k, q, k)


def test_without_triton_the_module_imports_and_supports_nothing(monkeypatch):
    _, module = imported_without_triton(monkeypatch, _triton, _kernels)
    q, k = plain(2, 3, 16, 40), plain(2, 1, 16, 40)
    assert not module.supported(q, k, q, k)
