"""Statistics of attention against the materialised T × T, in float64."""

from __future__ import annotations

import math
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from materialised import TOLERANCE, check, check_rho, last_rows, materialised, problems
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from locater import _triton
from locater.errors import LocaterError
from locater.measure import _blocks, _kernels, _logits, _rows, attention_statistics, signal_propagation

# ---------------------------------------------------------------------- against the materialised T × T


@given(problems(), st.integers(1, 20), st.sampled_from([1, 40, 1 << 10, 1 << 18]), st.sampled_from([1, 50, 1 << 15]))
def test_blocks_of_any_size_in_shares_of_any_size_agree_with_the_materialised(problem, block, logits, share):
    q, k, options = problem
    sizes = {(_rows, "_BLOCK"): block, (_logits, "CPU_LOGITS"): logits, (_blocks, "SHARE"): share}
    with ExitStack() as patched:
        for (module, name), size in sizes.items():
            patched.enter_context(patch.object(module, name, size))
        found = attention_statistics(q, k, **options)
    s, tolerance = materialised(q, k, **options), TOLERANCE[q.dtype]
    check(found, s, tolerance)
    own = options["causal"] or "window" in options or "alibi_slopes" in options or q.shape[2] == k.shape[2]
    check_rho(found.rho, s, last_rows(q.shape[2], options.get("key_mask"), own, len(q)), tolerance)
    assert found.entropy.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)


@given(problems(longest=24), st.data())
def test_rho_of_chosen_queries_agrees_with_the_materialised(problem, data):
    q, k, options = problem
    tq = q.shape[2]
    queries = data.draw(st.lists(st.integers(-tq, tq - 1), min_size=1, max_size=4))
    with patch.object(_logits, "CPU_LOGITS", data.draw(st.sampled_from([1, 1 << 18]))):
        rho = signal_propagation(q, k, queries=queries, **options)
    s, mask = materialised(q, k, **options), options.get("key_mask")
    own = options["causal"] or "window" in options or "alibi_slopes" in options or tq == k.shape[2]
    for number, query in enumerate(queries):
        rows = [query] * len(q)
        if query < 0:
            rows = [None if end is None else end + 1 + query for end in last_rows(tq, mask, own, len(q))]
        rows = [
            None if row is None or row < 0 or (own and mask is not None and not mask[b, row - tq]) else row
            for b, row in enumerate(rows)
        ]
        check_rho(rho[:, number], s, rows, TOLERANCE[q.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [True, False])
def test_logits_of_ten_thousand_stay_in_range(dtype, causal):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 2, 700, 16, generator=generator).to(dtype) for _ in range(2))
    scale = 1e4 / materialised(q, k, causal=causal, scale=1.0).amax().item()
    found = attention_statistics(q, k, causal=causal, scale=scale)
    assert all(value.isfinite().all() for value in found)
    assert (found.entropy >= 0).all()
    assert (found.entropy <= math.log(700)).all()
    check(found, materialised(q, k, causal=causal, scale=scale), 1e-5)
    assert found.max_logit.max() > 9999


def test_equal_logits_have_the_entropy_of_their_number():
    n = 1023
    for dtype in TOLERANCE:
        q, k = torch.ones(1, 1, n, 8, dtype=dtype), torch.full((1, 1, n, 8), 5.0, dtype=dtype)
        entropy = attention_statistics(q, k).entropy[0, 0].double()
        torch.testing.assert_close(entropy, torch.arange(1, n + 1).double().log(), rtol=1e-7, atol=1e-7)
        assert entropy.max() <= torch.tensor(math.log(n)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_of_several_blocks(dtype):
    generator = torch.Generator().manual_seed(1)
    q, k = (2.5 * torch.randn(1, n, 2300, 64, generator=generator).to(dtype) for n in (2, 1))
    s = materialised(q, k)
    assert 30 < s[s > -math.inf].abs().max() < 80
    found = attention_statistics(q, k)
    check(found, s, TOLERANCE[dtype])
    check_rho(found.rho, s, [2299], TOLERANCE[dtype])


# ---------------------------------------------------------------------- what must hold of any attention


@given(problems(dtypes=(torch.float64,)))
def test_entropy_lies_between_0_and_the_log_of_what_is_seen(problem):
    q, k, options = problem
    found = attention_statistics(q, k, **options)
    seen = (materialised(q, k, **options) != -math.inf).sum(-1)
    assert (found.entropy >= 0).all()
    assert (found.entropy <= seen.clamp(min=1).double().log() + 1e-12).all()
    assert (found.logsumexp >= found.max_logit).all()


@given(problems(dtypes=(torch.float64,), biased=False, sunk=False))
def test_a_shift_of_the_bias_moves_the_logits_and_nothing_else(problem):
    q, k, options = problem
    s = materialised(q, k, **options)
    bias = torch.randn(*q.shape[:3], 1, dtype=torch.float64)  # another for each query
    plain, moved = attention_statistics(q, k, **options), attention_statistics(q, k, bias=bias, **options)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(moved.entropy, plain.entropy, **close)
    torch.testing.assert_close(moved.max_logit, plain.max_logit + bias[..., 0], **close)
    torch.testing.assert_close(moved.logsumexp, plain.logsumexp + bias[..., 0], **close)
    assert s.shape[-1] == moved.rho.shape[-1]


@given(problems(dtypes=(torch.float64,), biased=False), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter_without_places(problem, random):
    q, k, options = problem
    options = {name: value for name, value in options.items() if name in ("scale", "softcap")} | {"causal": False}
    order = list(range(k.shape[2]))
    random.shuffle(order)
    plain, shuffled = attention_statistics(q, k, **options), attention_statistics(q, k[:, :, order], **options)
    for name in ("entropy", "max_logit", "logsumexp"):
        torch.testing.assert_close(getattr(shuffled, name), getattr(plain, name), rtol=1e-10, atol=1e-10)
    z_may_round = 1e-9
    s = materialised(q, k[:, :, order], **options)
    check_rho(plain.rho[:, order], s, [q.shape[2] - 1] * len(q), z_may_round)


@given(problems())
def test_without_rho_all_else_is_the_same_to_the_bit(problem):
    q, k, options = problem
    found, expected = attention_statistics(q, k, rho=False, **options), attention_statistics(q, k, **options)
    assert found.rho is None
    assert expected.rho is not None
    same(found[:3], expected[:3])


def test_entropy_is_scipys():
    generator = torch.Generator().manual_seed(2)
    q, k = (3 * torch.randn(1, 2, 50, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    p = materialised(q, k).softmax(-1).numpy()
    entropy = attention_statistics(q, k).entropy.numpy()
    np.testing.assert_allclose(entropy, stats.entropy(p, axis=-1), atol=1e-12)


def test_one_token_attends_to_itself():
    found = attention_statistics(torch.full((3, 2, 1, 4), 2.0), torch.full((3, 1, 1, 4), 3.0))
    assert (found.entropy == 0).all()
    assert (found.max_logit == 12).all()
    assert (found.logsumexp == 12).all()
    assert (found.rho == 1).all()  # z = 1/1 + 0


# ---------------------------------------------------------------------- options


@pytest.fixture
def small():
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(2, 4, 30, 8, generator=generator),
        torch.randn(2, 2, 30, 8, generator=generator),
    )


def same(one, other):
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(one, other, strict=True))


def test_queries_after_a_cache_are_the_last_rows_of_the_whole(small):
    q, k = small
    whole, step = attention_statistics(q, k), attention_statistics(q[:, :, -3:], k)
    for name in ("entropy", "max_logit", "logsumexp"):
        torch.testing.assert_close(getattr(step, name), getattr(whole, name)[:, :, -3:], rtol=1e-6, atol=1e-6)
    assert torch.equal(step.rho, whole.rho)


def test_a_query_that_sees_nothing_has_no_entropy_and_no_logit(small):
    q, k = small
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, :10] = False  # padded on the left
    found = attention_statistics(q, k, key_mask=mask)
    assert (found.entropy[1, :, :10] == 0).all()
    assert (found.max_logit[1, :, :10] == -math.inf).all()
    assert (found.logsumexp[1, :, :10] == -math.inf).all()
    assert not found.rho.isnan().any()  # of sequence 0 alone, for the first keys


@pytest.mark.parametrize("unmasked", [slice(0, 20), slice(10, 30)])
def test_padding_on_either_side_leaves_the_rest_as_it_was(small, unmasked):
    q, k = small
    mask = torch.zeros(2, 30, dtype=torch.bool)
    mask[:, unmasked] = True
    padded, short = (
        attention_statistics(q, k, key_mask=mask),
        attention_statistics(q[:, :, unmasked], k[:, :, unmasked]),
    )
    for name in ("entropy", "max_logit", "logsumexp"):
        torch.testing.assert_close(getattr(padded, name)[:, :, unmasked], getattr(short, name), rtol=1e-6, atol=1e-6)
    assert torch.equal(padded.rho[:, unmasked], short.rho)
    assert padded.rho[:, ~mask[0]].isnan().all()


def test_each_sequence_has_its_own_last_token(small):
    q, k = small
    lengths = (12, 30)
    mask = torch.arange(30) < torch.tensor(lengths)[:, None]
    rho = attention_statistics(q, k, key_mask=mask).rho
    alone = [attention_statistics(q[b : b + 1, :, :n], k[b : b + 1, :, :n]).rho for b, n in enumerate(lengths)]
    assert torch.equal(rho[:, :12], (alone[0] + alone[1][:, :12]) / 2)
    assert torch.equal(rho[:, 12:], alone[1][:, 12:])


def test_a_sequence_without_queries_of_its_own_does_not_count(small):
    q, k = small
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, -5:] = False
    found = attention_statistics(q[:, :, -5:], k, key_mask=mask)
    assert torch.equal(found.rho, attention_statistics(q[1:, :, -5:], k[1:]).rho)
    assert found.entropy[0].isfinite().all()


@pytest.mark.bitwise  # a sum of one number is exact on every machine, and then z is 1, the edge of what counts
def test_chosen_queries_see_what_a_shorter_sequence_would(small):
    q, k = small
    rho = signal_propagation(q, k, queries=[4, -1, -30, 17])
    assert rho.shape == (4, 4, 30)
    for number, row in enumerate((4, 29, 0, 17)):
        short = attention_statistics(q[:, :, : row + 1], k[:, :, : row + 1]).rho
        assert torch.equal(rho[:, number, : row + 1], short)
        assert rho[:, number, row + 1 :].isnan().all()


def test_the_default_query_is_the_one_of_the_statistics(small):
    q, k = small
    mask = torch.arange(30) < torch.tensor([12, 30])[:, None]
    expected = attention_statistics(q, k, key_mask=mask, window=9).rho
    same(signal_propagation(q, k, key_mask=mask, window=9)[:, 0], expected)
    assert expected[:, :3].isnan().all()  # before the window of either


def test_a_window_wider_than_the_text_is_none(small):
    q, k = small
    same(attention_statistics(q, k, window=30), attention_statistics(q, k))
    same(attention_statistics(q, k, window=30, causal=False), attention_statistics(q, k, causal=False))
    assert (attention_statistics(q, k, window=1).entropy == 0).all()  # itself


def test_a_window_without_causality_reaches_both_ways():
    q, k = torch.zeros(1, 1, 9, 2), torch.zeros(1, 1, 9, 2)
    seen = attention_statistics(q, k, causal=False, window=3).entropy.exp()[0, 0]
    torch.testing.assert_close(seen, torch.tensor([3.0, 4, 5, 5, 5, 5, 5, 4, 3]))


def test_a_mask_may_come_as_a_bias_of_any_kind(small):
    q, k = small
    mask = torch.arange(30) < torch.tensor([12, 30])[:, None]
    causal = torch.ones(30, 30, dtype=torch.bool).tril()
    unmasked = mask[:, None, None] & causal
    expected = attention_statistics(q, k, key_mask=mask)
    lowest = torch.where(unmasked, 0.0, torch.finfo(torch.float32).min)  # as transformers fills it
    for bias in (unmasked, lowest, lowest.bfloat16(), torch.where(unmasked, 0.0, -math.inf)):
        found = attention_statistics(q, k, bias=bias, causal=False)
        same(found[:3], expected[:3])
        # which token is the last, a bias does not say
        rows = signal_propagation(q[1:], k[1:], bias=bias[1:], causal=False)
        same(rows[:, 0], signal_propagation(q[1:], k[1:])[:, 0])


def test_a_bias_given_in_blocks_needs_no_square(small):
    q, k = small
    bias = torch.randn(4, 30, 30, generator=torch.Generator().manual_seed(4))
    asked = []

    def block(rows, columns):
        asked.append((rows.stop - rows.start) * (columns.stop - columns.start))
        return bias[:, rows, columns]

    with patch.object(_rows, "_BLOCK", 8):
        same(attention_statistics(q, k, bias=block), attention_statistics(q, k, bias=bias))
    assert max(asked) <= 64
    queries = [3, -2]
    same(signal_propagation(q, k, bias=block, queries=queries), signal_propagation(q, k, bias=bias, queries=queries))


def test_alibi_is_a_bias(small):
    q, k = small
    slopes = 2.0 ** -torch.arange(1.0, 5)
    distance = torch.arange(30)[:, None] - torch.arange(30)
    expected = attention_statistics(q, k, bias=-slopes[:, None, None] * distance.abs())
    found = attention_statistics(q, k, alibi_slopes=slopes)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_negative_scale_prefers_what_it_would_avoid(small):
    q, k = small
    same(attention_statistics(q, k, scale=-0.5), attention_statistics(-q, k, scale=0.5))


def test_queries_and_keys_of_two_precisions(small):
    q, k = small
    k = k.bfloat16()
    same(attention_statistics(q, k), attention_statistics(q, k.float()))


# ---------------------------------------------------------------------- what is left alone


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes() > 0:
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_nothing_grows_with_the_square_of_the_length_nor_keys_with_heads():
    tokens = 8192
    q, k = torch.randn(1, 8, tokens, 4), torch.randn(1, 1, tokens, 4)
    with Largest() as largest:
        attention_statistics(q, k, window=700)
        signal_propagation(q, k, queries=[5, -1])
    assert largest.elements == _logits.CPU_LOGITS == tokens * 128  # a block, kept


class Block(torch.nn.Module):
    def __init__(self, measured):
        super().__init__()
        torch.manual_seed(0)
        self.measured, self.into, self.out = measured, torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.into(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        if self.measured:
            attention_statistics(q, k, bias=torch.zeros(1, requires_grad=True))
            attention_statistics(q, k, softcap=3.0, alibi_slopes=torch.ones(2))
            signal_propagation(q, k, queries=[2])
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return self.out(torch.dropout(y.transpose(1, 2).flatten(2), 0.1, True))


def test_measuring_changes_no_bit_of_a_training_step():
    x, steps = torch.randn(3, 11, 16), []
    for measured in (False, True):
        model = Block(measured)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(1)
        y = model(x)
        y.square().sum().backward()
        optimizer.step()
        steps.append([y.detach(), *(p.detach() for p in model.parameters()), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


def test_results_carry_no_graph_and_inputs_keep_theirs():
    q, k = (torch.randn(1, 1, 5, 4, requires_grad=True) for _ in range(2))
    before = q.detach().clone()
    found = attention_statistics(q * 1, k)
    assert not any(value.requires_grad for value in found)
    assert torch.equal(q, before)
    assert q.grad is None


def test_autocast_does_not_reach_the_products():
    q, k = (torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    expected = attention_statistics(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(attention_statistics(q, k), expected)


def test_a_logit_that_is_not_a_number_is_not_masked():
    q, k = torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2)
    k[0, 0, 2] = math.nan
    for value in attention_statistics(q, k)[:3]:
        assert value[0, 0].isnan().tolist() == [False, False, True, True]


# ---------------------------------------------------------------------- bad input


Q, K = torch.zeros(2, 6, 5, 4), torch.zeros(2, 3, 5, 4)
EVERY = torch.ones(2, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("q", "k", "options", "message"),
    [
        (Q[0], K, {}, r"q must be \(batch, heads, tokens, head width\), floating point, got \(6, 5, 4\)"),
        (Q, K.int(), {}, r"k must be .* got \(2, 3, 5, 4\) in torch.int32"),
        (Q, K[:, :, :0], {}, r"k must be .* got \(2, 3, 0, 4\)"),
        (Q, K[:1], {}, r"share batch and head width, got \(2, 6, 5, 4\) and \(1, 3, 5, 4\)"),
        (Q, K[..., :3], {}, "share batch and head width"),
        (Q[:, :5], K, {}, "the 5 query heads are no multiple of the 3 key heads"),
        (Q, K.to("meta"), {}, "one device, got cpu and meta"),
        (Q, K[:, :, :3], {}, r"at least as many keys \(3\) as queries \(5\)"),
        (Q, K[:, :, :3], {"causal": False, "window": 2}, "at least as many keys"),
        (Q, K, {"scale": math.nan}, "scale must be finite, got nan"),
        (Q, K, {"window": 0}, "window must be 1 or more.* got 0"),
        (Q, K, {"softcap": 0.0}, "softcap must be positive and finite, got 0.0"),
        (Q, K, {"alibi_slopes": torch.ones(3)}, r"alibi_slopes must be \(6,\) on cpu, one a head, got \(3,\)"),
        (Q, K, {"key_mask": EVERY[:1]}, r"key_mask must be \(2, 5\) \(batch, keys\).* got \(1, 5\)"),
        (Q, K, {"key_mask": EVERY.long()}, "boolean with False where a key is masked.* got .*int64"),
        (Q, K, {"key_mask": torch.tensor([[True], [False]]) & EVERY}, "in sequence 1 of the batch: .* by key_mask"),
        (Q, K, {"bias": torch.zeros(6, 5, 4)}, r"bias must expand to \(2, 6, 5, 5\), got \(6, 5, 4\)"),
        (Q, K, {"bias": torch.zeros(1, 2, 6, 5, 5)}, "bias must expand to"),
        (Q, K, {"bias": lambda _, __: torch.zeros(7, 1)}, r"bias must expand to \(2, 6, 5, 5\), got \(7, 1\)"),
        (Q, K, {"bias": torch.zeros(5, 5, dtype=torch.int64)}, "bias must be floating point or boolean.*int64"),
        (Q, K, {"bias": torch.full((2, 1, 1, 1), -math.inf)}, "nothing to measure in sequence 0 .* masked by bias"),
        (Q[:, :, :1], K, {"key_mask": EVERY & (torch.arange(5) < 4), "window": 1}, "masked by key_mask and window"),
    ],
)
def test_bad_input_is_answered_in_one_sentence(q, k, options, message):
    with pytest.raises(LocaterError, match=message) as caught:
        attention_statistics(q, k, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("queries", [[], [5], [0, -6]])
def test_queries_that_are_not_there_are_named(queries):
    with pytest.raises(LocaterError, match=r"rows from -5 to 4, got \["):
        signal_propagation(Q, K, queries=queries)


def test_on_a_cpu_the_kernel_is_not_asked(monkeypatch):
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    assert not _kernels.applies(Q, K, _kernels.View(1.0))
