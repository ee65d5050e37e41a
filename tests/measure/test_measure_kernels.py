"""The measuring kernel against the materialised T × T in float64.

Without a GPU it runs in Triton's interpreter, as `interpreter` says.
"""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from materialised import TOLERANCE, check, check_rho, last_rows, materialised, problems

from interpreter import DEVICE, ON_GPU, imported_without_triton, on_gpu, runs
from locater import _triton
from locater.measure import AttentionStatistics, _kernels, attention_statistics
from locater.measure._kernels import Tiles, View, row_statistics

pytest.importorskip("triton")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = Tiles(16, 16, 4, 2)
WAYS = [SMALL, Tiles(32, 16, 4, 1, slice=16), Tiles(16, 32, 4, 3), Tiles(16, 16, 4, 2, descriptors=True)]


def numbers(*shape, dtype=torch.bfloat16, seed=0, size=1.0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=generator).mul_(size).to(dtype)


def statistics(q, k, view, tiles=SMALL):
    return AttentionStatistics(*row_statistics(q, k, view, tiles=tiles), torch.empty(0))


# ---------------------------------------------------------------------- against the materialised T × T


@runs
@settings(max_examples=50)  # most options, and each width, are a program of their own to compile
@given(
    problems(DTYPES, longest=300 if ON_GPU else 40, widest=130 if ON_GPU else 20, biased=False, device=DEVICE),
    st.data(),
)
def test_any_options_agree_with_the_materialised(problem, data):
    q, k, options = problem
    tiles = data.draw(st.sampled_from(WAYS))
    with patch.object(_kernels, "candidates", lambda *_: [tiles]):
        found = attention_statistics(q, k, **options)
    s, tolerance = materialised(q, k, **options), TOLERANCE[q.dtype]
    check(found, s, tolerance)
    own = options["causal"] or "window" in options or "alibi_slopes" in options or q.shape[2] == k.shape[2]
    check_rho(found.rho, s, last_rows(q.shape[2], options.get("key_mask"), own, len(q)), tolerance)


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", [WAYS[2], WAYS[3]])
@pytest.mark.parametrize(("tq", "tk"), [(48, 48), (37, 37), (1, 1), (1, 50), (5, 33), (50, 7)])
def test_lengths_that_fill_blocks_or_do_not(dtype, tiles, tq, tk):
    q, k = numbers(2, 2, tq, 16, dtype=dtype, size=3), numbers(2, 1, tk, 16, dtype=dtype, size=3, seed=1)
    causal = tq <= tk
    found = statistics(q, k, View(0.25, right=0 if causal else None), tiles)
    check(found, materialised(q, k, causal=causal), TOLERANCE[dtype])


@runs
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tiles", [SMALL, WAYS[1]])
def test_windows_that_begin_and_end_anywhere(window, causal, tiles):
    q, k = numbers(1, 1, 45, 16, size=3), numbers(1, 1, 70, 16, size=3, seed=1)
    found = statistics(q, k, View(0.25, left=window - 1, right=0 if causal else window - 1), tiles)
    check(found, materialised(q, k, causal=causal, window=window), TOLERANCE[q.dtype])


@runs
def test_a_query_that_sees_nothing_has_no_entropy_and_no_logit():
    q, k = numbers(2, 1, 40, 16), numbers(2, 1, 40, 16, seed=1)
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    mask[1, :35] = False
    found = statistics(q, k, View(0.25, right=0, key_mask=mask))
    assert (found.entropy[1, :, :35] == 0).all()
    assert (found.max_logit[1, :, :35] == -math.inf).all()
    check(found, materialised(q, k, key_mask=mask), TOLERANCE[q.dtype])


@runs
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_ten_thousand_stay_in_range(dtype):
    q, k = numbers(1, 2, 70, 16, dtype=dtype), numbers(1, 2, 70, 16, dtype=dtype, seed=1)
    scale = 1e4 / materialised(q, k, scale=1.0).amax().item()
    found = attention_statistics(q, k, scale=scale)
    assert all(value.isfinite().all() for value in found)
    assert (found.entropy >= 0).all()
    assert (found.entropy <= math.log(70)).all()
    s = materialised(q, k, scale=scale)
    # float32 knows a logit of 1e4 to 1e-3 or so; an entropy moves by less than that times 1 + H
    check(found, s, 5e-3)
    assert found.max_logit.max() > 9999


@runs
@pytest.mark.parametrize("cap", [0.5, 30.0, 1e4])
def test_a_cap_keeps_the_precision_of_small_logits(cap):
    q, k = numbers(1, 1, 40, 16, dtype=torch.float32, size=3), numbers(1, 1, 40, 16, dtype=torch.float32, seed=1)
    found = statistics(q, k, View(0.25, right=0, softcap=cap))
    check(found, materialised(q, k, softcap=cap), 2e-6)


@runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tiles", [SMALL, Tiles(16, 16, 4, 2, slice=16)])
@pytest.mark.parametrize("width", [1, 16, 20, 64, 80])
def test_widths_that_are_no_power_of_2(dtype, tiles, width):
    q, k = numbers(1, 2, 20, width, dtype=dtype), numbers(1, 2, 40, width, dtype=dtype, seed=1)
    check(statistics(q, k, View(0.3), tiles), materialised(q, k, scale=0.3, causal=False), TOLERANCE[dtype])


@runs
def test_queries_and_keys_may_lie_in_memory_as_models_leave_them():
    fused = numbers(2, 40, 3, 4, 16)  # (B, T, qkv, H, K)
    q, k, _ = fused.permute(2, 0, 3, 1, 4)
    every_second = numbers(2, 4, 40, 32, seed=1)[..., ::2]
    shared = numbers(1, 1, 40, 16, seed=2).expand(2, 4, 40, 16)
    for tiles in WAYS:
        for keys in (k, every_second, shared):
            check(statistics(q, keys, View(0.25, right=0), tiles), materialised(q, keys), TOLERANCE[q.dtype])


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 256])
def test_all_candidates_compute_the_same(dtype, width):
    length = 700 if ON_GPU else 150
    q, k = numbers(1, 1, length, width, dtype=dtype), numbers(1, 1, length, width, dtype=dtype, seed=1)
    for tiles in _kernels.candidates(dtype, width):
        try:
            found = statistics(q, k, View(width**-0.5, right=0), tiles)
        except _kernels.triton.OutOfResources:
            continue
        check(found, materialised(q, k), TOLERANCE[dtype])


@runs
def test_tiles_that_do_not_fit_the_device_are_passed_over():
    q, k = numbers(1, 1, 20, 16), numbers(1, 1, 20, 16, seed=1)
    launch, tried = _kernels._launch, []

    def picky(*given):
        tried.append(given[-1])
        if given[-1] != SMALL:
            raise _kernels.triton.OutOfResources(2, 1, "shared memory")
        launch(*given)

    tables = [*_kernels.candidates(q.dtype, 16)[:2], SMALL, WAYS[1]]
    with patch.object(_kernels, "_launch", picky), patch.object(_kernels, "candidates", lambda *_: tables):
        found = attention_statistics(q, k)
    assert tried == tables[:3]
    check(found, materialised(q, k), TOLERANCE[q.dtype])


@runs
def test_the_same_call_gives_the_same_bits():
    q, k = numbers(1, 2, 40, 16), numbers(1, 2, 40, 16, seed=1)
    first = statistics(q, k, View(0.25, right=0))
    for _ in range(2):
        again = statistics(q, k, View(0.25, right=0))
        assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))


@runs
def test_a_logit_that_is_not_a_number_is_not_masked():
    q, k = numbers(1, 1, 40, 16), numbers(1, 1, 40, 16, seed=1)
    k[0, 0, 30] = math.nan
    found = statistics(q, k, View(0.25, right=0))
    for value in found[:3]:
        assert value[0, 0].isnan().tolist() == [False] * 30 + [True] * 10


# ---------------------------------------------------------------------- when it is chosen


@runs
def test_it_is_chosen_unless_there_is_a_bias_or_a_kind_of_number_it_does_not_know():
    q, k = numbers(1, 2, 20, 16), numbers(1, 2, 20, 16, seed=1)
    calls = []

    def spy(*given, **options):
        calls.append(given)
        return row_statistics(*given, **options)

    with patch.object(_kernels, "row_statistics", spy):
        attention_statistics(q, k)
        assert len(calls) == 1
        attention_statistics(q, k, bias=torch.zeros(1, device=DEVICE))
        attention_statistics(q.double(), k.double())
        attention_statistics(q, k.float())
        attention_statistics(q, k, scale=-1.0)
        attention_statistics(numbers(1, 1, 4, 260), numbers(1, 1, 4, 260))
    assert len(calls) == 1


@runs
def test_it_agrees_with_the_blocks_of_pytorch():
    q, k = numbers(2, 4, 50, 16, size=2), numbers(2, 2, 50, 16, size=2, seed=1)
    fast = attention_statistics(q, k, softcap=20.0, window=30)
    with patch.object(_triton, "triton", None):
        slow = attention_statistics(q, k, softcap=20.0, window=30)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_without_triton_the_module_imports_and_nothing_is_available(monkeypatch):
    _, module = imported_without_triton(monkeypatch, _triton, _kernels)
    assert not module.available(torch.empty(1))
    assert not module.available(torch.empty(1, device=DEVICE))


# ---------------------------------------------------------------------- larger, on a GPU


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 300}, {"softcap": 30.0}])
def test_thousands_of_tokens(dtype, width, options):
    q, k = numbers(1, 4, 3000, width, dtype=dtype, size=3), numbers(1, 2, 3001, width, dtype=dtype, size=3, seed=1)
    s = materialised(q, k, **options)
    scale = 50 / s[s > -math.inf].abs().max().item() * width**-0.5
    s = materialised(q, k, scale=scale, **options)
    found = attention_statistics(q, k, scale=scale, **options)
    check(found, s, TOLERANCE[dtype])
    check_rho(found.rho, s, [2999], TOLERANCE[dtype])


@on_gpu
def test_sixty_thousand_tokens_take_memory_by_the_token():
    tokens = 60_001
    q, k = numbers(1, 4, tokens, 64, size=2), numbers(1, 1, tokens, 64, size=2, seed=1)
    attention_statistics(q[:, :, :128], k[:, :, :128])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = attention_statistics(q, k)
    assert torch.cuda.max_memory_allocated() - before < 256e6  # one square, in half precision, has 7.2e9
    rows = torch.tensor([0, 1, 1000, 40_000, tokens - 1], device=DEVICE)
    s = q[:, :, rows].double() @ k.double().mT / 8
    s.masked_fill_(torch.arange(tokens, device=DEVICE) > rows[:, None], -math.inf)
    check(AttentionStatistics(*(value[:, :, rows] for value in found[:3]), found.rho), s, TOLERANCE[q.dtype])
    check_rho(found.rho, s, [4], TOLERANCE[q.dtype])


@on_gpu
def test_tuning_leaves_right_results_behind(monkeypatch):
    monkeypatch.setattr(_kernels, "_TUNED", {})
    q, k = numbers(1, 2, 1000, 64), numbers(1, 2, 1000, 64, seed=1)
    times = _kernels.tune(q, k, View(0.125, right=0))
    assert set(_kernels._TUNED.values()) == {min(times, key=times.get)}
    check(attention_statistics(q, k), materialised(q, k), TOLERANCE[q.dtype])
