"""K and Σ of hidden states: those of the data they are estimated from, in the theory's normalisation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from corpora import write_corpus
from torch import nn
from zoo import VOCABULARY, build, inputs

from locater import QK, LocaterError, TokenProcess, observe, rho
from locater.lab import Config, Member, ModelConfig, Stack, load_corpus
from locater.measure._moments import Moments

FIRST, SECOND = "model.layers.0.self_attn", "model.layers.1.self_attn"


def directly(sequences):
    """Sample covariances of sequences (n, T, D), each position about its own mean, by the definition."""
    x = np.asarray(sequences, dtype=np.float64)
    n, tokens, _ = x.shape
    mean = x.mean(0)
    apart = x - mean
    covariance = sum(np.cov(x[:, i].T) for i in range(tokens)) / tokens
    k = np.array([[(apart[:, i] * apart[:, j]).sum(1).sum() / (n - 1) for j in range(tokens)] for i in range(tokens)])
    return k / np.trace(covariance), covariance, mean


def assert_are(found, sequences, tolerance=1e-12):
    k, covariance, mean = directly(sequences)
    np.testing.assert_allclose(found.position_covariance, k, atol=tolerance * np.abs(k).max())
    np.testing.assert_allclose(found.covariance, covariance, atol=tolerance * np.abs(covariance).max())
    np.testing.assert_allclose(found.mean, mean, atol=tolerance * np.abs(mean).max())
    assert np.diag(found.position_covariance).mean() == pytest.approx(1)
    assert found.sequences == len(sequences)
    assert all(x.dtype == np.float64 for x in found[:3])


def entering(model, module, batches):
    """The hidden states (B, T, D) that enter a module, of each batch."""
    kept = []

    def keep(module, args, kwargs):  # noqa: ARG001
        kept.append(kwargs["hidden_states"])

    handle = model.get_submodule(module).register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    handle.remove()
    return kept


def test_over_batches_they_are_the_sample_covariances_of_all_sequences():
    model, ids = build("llama"), torch.randint(3, VOCABULARY, (11, 9), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": part} for part in ids.split(4)]
    states = torch.cat(entering(model, SECOND, batches))
    with torch.no_grad(), observe(model, covariances=9) as seen:
        for batch in batches:
            model(**batch)
    assert_are(seen.covariances(SECOND), states)


@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_padding_is_left_out_and_sequences_that_are_too_short_do_not_count(side):
    model, generator = build("llama"), torch.Generator().manual_seed(1)
    ids, lengths = torch.randint(3, VOCABULARY, (7, 10), generator=generator), torch.tensor([10, 4, 6, 7, 5, 10, 6])
    position = torch.arange(10)
    mask = {
        "left": position >= 10 - lengths[:, None],
        "right": position < lengths[:, None],
        "between": torch.stack([torch.randperm(10, generator=generator) < n for n in lengths]),
    }[side]
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    (states,) = entering(model, SECOND, [batch])
    with torch.no_grad(), observe(model, covariances=6) as seen:
        model(**batch)
    whole = [x[real][:6] for x, real in zip(states, mask, strict=True) if real.sum() >= 6]
    assert len(whole) == 5
    assert_are(seen.covariances(SECOND), torch.stack(whole))


def test_matrix_normal_tokens_give_back_their_k_and_sigma_and_the_theory_takes_them():
    tokens, width, count = 10, 12, 4000
    random = np.random.default_rng(0)
    root = random.normal(size=(width, width)) / np.sqrt(width)
    sigma, process = root @ root.T, TokenProcess.random_walk(tokens)
    sequences = process.sample(count, covariance=sigma, seed=1) + random.normal(size=(tokens, width))
    model = nn.MultiheadAttention(width, 2, batch_first=True)
    x = torch.from_numpy(sequences).float()
    with torch.no_grad(), observe(model, covariances=tokens) as seen:
        for part in x.split(500):
            model(part, part, part, need_weights=False)
    found = seen.covariances("")
    factor = np.trace(process.position_covariance) / tokens  # which K and Σ share
    k, sigma = process.position_covariance / factor, sigma * factor
    # the variances of Σ_b x_i·x_j / n and Σ_bi x_ia x_ib / nT for Gaussians, and of the trace that K is divided by
    squares = np.trace(sigma @ sigma) / np.trace(sigma) ** 2
    k_error = np.sqrt((np.outer(np.diag(k), np.diag(k)) + k**2) * squares / count)
    trace_error = np.sqrt(2 * (k**2).sum() / tokens**2 * squares / count)
    sigma_error = np.sqrt((np.outer(np.diag(sigma), np.diag(sigma)) + sigma**2) * (k**2).sum() / tokens**2 / count)
    assert (np.abs(found.position_covariance - k) < 4.5 * (k_error + np.abs(k) * trace_error)).all()
    assert (np.abs(found.covariance - sigma) < 4.5 * sigma_error).all()

    qk = QK(*(torch.from_numpy(random.normal(size=(4, width))) for _ in range(2)))
    estimated = rho(qk, TokenProcess(found.position_covariance), 2.0, covariance=found.covariance)
    exact = rho(qk, TokenProcess(k), 2.0, covariance=sigma)
    # if z is stretched by a factor 1 + ε, ρ moves by less than ε/2 or so; ε here is √(2 / n), or less
    assert np.abs(estimated - exact).max() < 4.5 * np.sqrt(2 / count) / 2
    np.testing.assert_allclose(exact, rho(qk, process, 2.0, covariance=sigma / factor), atol=1e-9)


def test_about_zero_and_about_the_mean_differ_by_the_mean_alone():
    x = torch.from_numpy(np.random.default_rng(2).normal(size=(20, 5, 3)) + 2)
    moments = Moments(5)
    moments.add(x)
    zero, centred = moments.about_zero(), moments.covariances()
    second = 19 / 20 * centred.covariance + centred.mean.T @ centred.mean / 5
    np.testing.assert_allclose(zero.covariance, second, rtol=1e-12)
    lifted = 19 / 20 * centred.position_covariance * np.trace(centred.covariance) + centred.mean @ centred.mean.T
    np.testing.assert_allclose(zero.position_covariance * np.trace(second), lifted, rtol=1e-12)


def test_memory_does_not_grow_with_sequences():
    moments = Moments(6)

    def held():
        return sum(x.numel() for x in moments._sums)

    moments.add(torch.randn(3, 8, 4))
    once = held()
    for _ in range(5):
        moments.add(torch.randn(30, 8, 4))
    assert held() == once == 6 * 6 + 4 * 4 + 6 * 4 + 1


def test_members_of_a_stack_have_their_own(tmp_path):
    corpus = load_corpus(write_corpus(tmp_path / "text"), cache=tmp_path / "cache")
    config = Config(model=ModelConfig(width=16, ffn=16, layers=2, heads=2, tokens=8), batch=6, steps=5)
    members = [Member("one", seed=0), Member("two", seed=1)]
    stack, states = Stack(config, members, corpus, torch.device("cpu")), []

    def begin(real):
        assert real.all()
        return lambda layer, x, *_: states.append(x.clone()) if layer == 1 else None

    end = stack.watch(begin)
    with observe(stack, covariances=8) as seen:
        stack.advance()
        stack.advance()
    end()
    for e, member in enumerate(members):
        assert_are(seen.covariances(f"{member.name}/layers.1"), torch.cat([x[e] for x in states]))


def test_what_a_cache_goes_on_from_is_no_whole_sequence():
    model = build("llama")
    prompt = torch.randint(3, VOCABULARY, (5, 6), generator=torch.Generator().manual_seed(0))
    (states,) = entering(model, FIRST, [{"input_ids": prompt}])
    with torch.no_grad(), observe(model, covariances=3) as seen:
        cache = model(prompt).past_key_values
        model(prompt[:, :4], past_key_values=cache)
    assert_are(seen.covariances(FIRST), states[:, :3])


def test_what_is_not_there_says_why_and_what_would_help():
    model, batch = build("llama"), inputs("llama")
    with torch.no_grad(), observe(model) as seen:
        model(**batch)
    with pytest.raises(LocaterError, match=r"not kept; observe\(model, covariances=T\)"):
        seen.covariances(FIRST)
    with torch.no_grad(), observe(model, covariances=500) as seen:
        model(**batch)
    with pytest.raises(LocaterError, match=f"{FIRST} need 2 sequences of at least 500 tokens, and 0 came by"):
        seen.covariances(FIRST)
    with pytest.raises(LocaterError, match="these are"):
        seen.covariances("nowhere")
    for wrong in (True, 0, 2.5):
        with pytest.raises(LocaterError, match="must be how many tokens"), observe(model, covariances=wrong):
            pass
    with torch.no_grad(), observe(model, covariances=4) as seen:
        for _ in range(3):
            model(torch.full((2, 4), 5))  # one sequence again and again
    with pytest.raises(LocaterError, match="the same in all sequences"):
        seen.covariances(FIRST)
