"""Dropout's masks: as random as they should be, the same everywhere, and their own gradient."""

from __future__ import annotations

import math

import pytest
import torch

from interpreter import DEVICE, ON_GPU, on_gpu, runs
from locater.errors import LocaterError
from locater.lab.engine._random import dropout, dropout_add, dropout_bits, keep_mask, site_key

SEEDS = torch.tensor([0, 1, 12345, 2**40])
COUNT = 1 << 18


def masks(rate, steps=(0, 1, 2), sites=(0, 1, 2)):
    """(steps · sites · members, COUNT) in float64."""
    return torch.cat([keep_mask(site_key(SEEDS, t, s), COUNT, rate) for t in steps for s in sites]).double()


# ---------------------------------------------------------------------- how random they are


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_the_rate_says(rate):
    error = math.sqrt(rate * (1 - rate) / COUNT)
    assert (masks(rate).mean(1) - (1 - rate)).abs().max() < 4 * error
    assert abs(masks(rate).mean().item() - (1 - rate)) < 4 * error / 6  # of 36 masks


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_masks_of_other_members_steps_and_sites_are_uncorrelated(rate):
    correlation = torch.corrcoef(masks(rate)).fill_diagonal_(0)  # of 630 pairs
    assert correlation.abs().max() * math.sqrt(COUNT) < 4.5


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_no_mask_is_another_one_shifted(rate):
    """At all shifts of all pairs, and of each with itself: neighbours, and elements of other tokens."""
    spectra = torch.fft.rfft((masks(rate, sites=(0,)) - (1 - rate)) / math.sqrt(rate * (1 - rate)))  # (12, …)
    for i, spectrum in enumerate(spectra):
        correlation = torch.fft.irfft(spectra[i:] * spectrum.conj(), n=COUNT) / math.sqrt(COUNT)
        correlation[0, 0] = 0  # itself, as it is
        assert correlation.abs().max() < 6.5  # of 2·10^7 standard normal numbers: beyond it lie 10^-10


def test_each_bit_of_the_key_changes_half_of_the_bits():
    key = site_key(torch.tensor([7]), 3, 1)
    flipped = torch.cat([key ^ (1 << i if i < 63 else -(1 << 63)) for i in range(64)])
    difference = dropout_bits(flipped, 1 << 14) ^ dropout_bits(key, 1 << 14)
    for bit in range(32):
        share = (difference >> bit & 1).double().mean(1)
        assert (share - 0.5).abs().max() < 0.05  # lowbias32 leaves a bias of some percent; a standard error is 0.004


def test_all_bits_are_even():
    bits = dropout_bits(site_key(SEEDS, 5, 2), COUNT)
    for bit in range(32):
        assert ((bits >> bit & 1).double().mean(1) - 0.5).abs().max() < 4.5 * 0.5 / math.sqrt(COUNT)


def test_keys_differ():
    keys = torch.stack([site_key(torch.arange(20), t, s) for t in range(50) for s in range(10)])
    assert keys.unique().numel() == keys.numel()
    assert keys.to(torch.int32).unique().numel() >= keys.numel() - 2  # of 10^4 numbers of 32 bits: 0.01 pairs are equal


# ---------------------------------------------------------------------- what they depend on


def test_keys_of_tensors_are_those_of_numbers():
    sites = torch.arange(3)[:, None]
    together = site_key(SEEDS, torch.tensor(7), sites)
    assert torch.equal(together, torch.stack([site_key(SEEDS, 7, s) for s in range(3)]))
    assert torch.equal(site_key(SEEDS, 2**62, 3), site_key(SEEDS, torch.tensor(2**62), 3))  # products wrap around


def test_a_member_does_not_depend_on_its_neighbours():
    x, keys = torch.randn(3, 100), site_key(torch.tensor([5, 6, 7]), 11, 0)
    together, alone = dropout(x, keys, 0.3), dropout(x[1:2], site_key(torch.tensor([6]), 11, 0), 0.3)
    assert torch.equal(together[1:2], alone)


def test_the_bits_are_what_they_were():
    """In Python's integers. Runs are continued from checkpoints: masks must not change with a version."""
    mask64, mask32 = (1 << 64) - 1, (1 << 32) - 1
    for seed, step, site in ((1, 1000, 2), (-1, 0, 0), (0, 0, 0), (2**63 - 1, 2**31, 7)):
        x = seed * 0x9E3779B97F4A7C15 + step * 0xD1342543DE82EF95 + site * 0xAF251AF3B0F025B5 + 0x632BE59BD9B4E019
        x &= mask64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask64
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask64
        x ^= x >> 31
        key = site_key(torch.tensor([seed]), step, site)
        assert key.item() & mask64 == x
        for k, bits in enumerate(dropout_bits(key, 20)[0].tolist()):
            y = (k * 0x9E3779B9 ^ x) & mask32
            y = ((y ^ y >> 16) * 0xED5AD4BB ^ x >> 32) & mask32
            y = (y ^ y >> 16) * 0x7FEB352D & mask32
            y = (y ^ y >> 15) * 0x846CA68B & mask32
            assert bits & mask32 == y ^ y >> 16


def test_a_longer_mask_begins_like_a_shorter_one():
    key = site_key(SEEDS, 1, 1)
    assert torch.equal(dropout_bits(key, 500)[:, :123], dropout_bits(key, 123))


# ---------------------------------------------------------------------- what they do


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 40), (2, 5, 3, 7)])
def test_what_stays_is_scaled(shape, dtype):
    x = torch.randn(shape, dtype=dtype, device=DEVICE)
    key = site_key(torch.arange(shape[0], device=DEVICE), 4, 1)
    kept = keep_mask(key, x[0].numel(), 0.25).view(shape)
    y = dropout(x, key, 0.25)
    assert y.dtype == dtype
    assert (y == 0).eq(~kept).all()
    torch.testing.assert_close(y, torch.where(kept, x.double() / 0.75, 0).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_is_added(dtype):
    x, residual = torch.randn(3, 70, dtype=dtype, device=DEVICE), torch.randn(3, 70, device=DEVICE)
    key = site_key(torch.arange(3, device=DEVICE), 4, 1)
    y = dropout_add(x, residual, key, 0.1)
    assert y.dtype == torch.float32
    expected = residual.double() + torch.where(keep_mask(key, 70, 0.1), x.double() / 0.9, 0)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_the_mask(dtype):
    x, residual = (torch.randn(3, 70, device=DEVICE).requires_grad_() for _ in range(2))
    x = x.detach().to(dtype).requires_grad_()
    key = site_key(torch.arange(3, device=DEVICE), 4, 1)
    weight = torch.randn(3, 70, device=DEVICE)
    (dropout_add(x, residual, key, 0.2) * weight).sum().backward()
    torch.testing.assert_close(x.grad, torch.where(keep_mask(key, 70, 0.2), weight / 0.8, 0).to(dtype))
    assert torch.equal(residual.grad, weight)


def test_gradients_agree_with_differences():
    x, residual = (torch.randn(2, 9, dtype=torch.float64).requires_grad_() for _ in range(2))
    key = site_key(torch.arange(2), 4, 1)
    assert torch.autograd.gradcheck(lambda a: dropout(a, key, 0.3), x)
    assert torch.autograd.gradcheck(lambda a, b: dropout_add(a, b, key, 0.3), (x, residual))
    assert torch.autograd.gradgradcheck(lambda a: dropout(a, key, 0.3), x)


def test_a_rate_of_zero_changes_nothing():
    x, key = torch.randn(2, 9), site_key(torch.arange(2), 4, 1)
    assert dropout(x, key, 0.0) is x
    assert torch.equal(dropout_add(x, x, key, 0.0), 2 * x)
    assert keep_mask(key, 1000, 0.0).all()


def test_what_is_not_a_rate_or_a_seed_is_refused():
    x, key = torch.randn(2, 9), site_key(torch.arange(2), 4, 1)
    for rate in (1.0, -0.1, math.nan):
        for call in (lambda r: dropout(x, key, r), lambda r: dropout_add(x, x, key, r), lambda r: keep_mask(key, 9, r)):
            with pytest.raises(LocaterError, match="rate must lie in"):
                call(rate)
    with pytest.raises(LocaterError, match="seeds must be int64"):
        site_key(torch.arange(2.0), 4, 1)


# ---------------------------------------------------------------------- kernel and PyTorch


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_keeps_what_pytorch_keeps(dtype):
    count = (1 << 21) + 5 if ON_GPU else 5000
    seeds = torch.tensor([0, 3, -(2**63), 2**63 - 1])
    key = site_key(seeds, 123, 4)
    y = dropout(torch.ones(4, count, dtype=dtype, device=DEVICE), key.to(DEVICE), 0.37)
    assert torch.equal(y.cpu() != 0, keep_mask(key, count, 0.37))


@runs
def test_the_kernel_refuses_what_it_would_misread():
    x = torch.randn(2, 9, device=DEVICE)
    with pytest.raises(LocaterError, match=r"key must be \(2,\)"):
        dropout(x, torch.zeros(3, dtype=torch.int64, device=DEVICE), 0.1)
    with pytest.raises(LocaterError, match="one shape"):
        dropout_add(x, x[:, :8], torch.zeros(2, dtype=torch.int64, device=DEVICE), 0.1)


@on_gpu
def test_masks_are_the_same_on_both_devices():
    key = site_key(SEEDS, 9, 1)
    assert torch.equal(site_key(SEEDS.cuda(), torch.tensor(9).cuda(), 1).cpu(), key)
    assert torch.equal(dropout_bits(key.cuda(), 10_000).cpu(), dropout_bits(key, 10_000))
