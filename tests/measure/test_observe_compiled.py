"""`observe` with torch.compile and FlexAttention: right, or refused, or warned of; never silently nothing."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn
from zoo import GROUPED, VOCABULARY, build, inputs

from locater import LocaterError, observe
from own_attention import OwnAttention

# of torch's compiler, when it is loaded, and of transformers' way to call it
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:_compile flag")
NUMBERS = ["entropy", "entropy_share", "max_logit", "logsumexp", "queries"]


@pytest.fixture(autouse=True)
def _nothing_compiled_before_and_after():
    def forget():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    forget()
    yield
    forget()


class Skipping(nn.Module):
    """As with layers that are dropped in training: the forward runs, its attention does not."""

    def __init__(self):
        super().__init__()
        self.attention = OwnAttention()

    def forward(self, x):
        return x


def calls_sdpa():
    torch.manual_seed(0)
    return nn.Sequential(OwnAttention(), OwnAttention())


def torchs():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, batch_first=True, dropout=0.0, dim_feedforward=24)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def compiled_in_part(model):
    parts = model if isinstance(model, nn.Sequential) else model.layers
    parts[1] = torch.compile(parts[1], backend="eager")
    return model


X = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(1))


def assert_same(one, other):
    assert list(one["module"]) == list(other["module"])
    np.testing.assert_array_equal(one[NUMBERS], other[NUMBERS])


# ---------------------------------------------------------------------- torch.compile


@torch.no_grad()
def test_a_compiled_hugging_face_model_is_observed_again_and_again():
    model, batch = build("llama"), inputs("llama")
    model.set_attn_implementation("sdpa")
    with observe(model) as expected:
        model(**batch)
    fast = compiled(model)
    plain = fast(**batch).logits
    for _ in range(2):
        with observe(fast, every=2) as seen:
            for _ in range(2):  # the first is measured
                assert torch.equal(fast(**batch).logits, plain)
        assert_same(seen.table(), expected.table())  # under the names they have uncompiled
        assert (seen.tokens()["sequences"] == 2).all()
    before = seen.table()
    assert torch.equal(fast(**batch).logits, plain)
    assert_same(seen.table(), before)


@pytest.mark.parametrize("how", [compiled, compiled_in_place, compiled_in_part])
@pytest.mark.parametrize("make", [calls_sdpa, torchs])
@torch.no_grad()
def test_a_compiled_model_that_would_run_no_hooks_is_refused_unless_it_runs_uncompiled(make, how):
    model = make()
    with observe(model) as expected:
        model(X)
    model = how(model)
    model(X)
    with pytest.raises(LocaterError, match=r"torch.compile has compiled it.*set_stance\(\"force_eager\"\)"), \
            observe(model):  # fmt: skip
        pass
    with torch.compiler.set_stance("force_eager"), observe(model) as seen:
        model(X)
    assert_same(seen.table(), expected.table())


@pytest.mark.parametrize("make", [calls_sdpa, torchs])
@torch.no_grad()
def test_code_compiled_inside_the_block_is_intercepted_and_free_of_it_afterwards(make):
    model = make()
    plain = model(X)
    with observe(model) as seen:
        fast = compiled(model)
        assert torch.equal(fast(X), plain)
        assert torch.equal(fast(X), plain)
    table = seen.table()
    assert (table["queries"] == 2 * 18).all()
    assert torch.equal(fast(X), plain)
    assert_same(seen.table(), table)


@pytest.mark.compiled
@pytest.mark.parametrize("make", [calls_sdpa, torchs])
@torch.no_grad()
@torch._dynamo.config.patch(skip_nnmodule_hook_guards=True)  # torch's setting, which methods of `control` change
def test_a_model_whose_calls_were_missed_in_compiled_code_is_warned_of(make):
    torch.compiler.reset()
    model = make()
    around = torch.compile(lambda x: model(x), backend="eager")
    around(X)
    with pytest.warns(UserWarning, match=r"nothing of .* was measured: it may have run in code that torch.compile"), \
            observe(model) as seen:  # fmt: skip
        around(X)
    assert seen.table().empty


@torch.no_grad()
def test_a_forward_without_any_attention_is_warned_of_and_a_block_without_a_forward_is_not():
    model = Skipping()
    with pytest.warns(UserWarning, match="nothing of Skipping was measured: it ran, .* attention and others"), \
            observe(model):  # fmt: skip
        model(X)
    with warnings.catch_warnings(), observe(model):
        warnings.simplefilter("error")


# ---------------------------------------------------------------------- FlexAttention


def windowed():
    torch.manual_seed(0)
    return tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=4)).eval()


def capped():
    torch.manual_seed(0)
    config = tf.Gemma2Config(**GROUPED, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0)
    return tf.Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("make", [lambda: build("llama"), windowed, capped], ids=["llama", "window", "softcap"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_has_the_statistics_of_eager(make, side):
    model, tables = make(), []
    ids = torch.randint(3, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(3))
    lengths, position = torch.tensor([11, 7, 2])[:, None], torch.arange(11)
    mask = {"none": lengths > 0, "left": position >= 11 - lengths, "right": position < lengths}[side].expand(3, 11)
    with torch.compiler.set_stance("force_eager"):  # compiling it for a CPU takes half a minute
        for backend in ("eager", "flex_attention"):
            model.set_attn_implementation(backend)
            with observe(model) as seen:
                model(input_ids=ids, attention_mask=mask.long())
            tables.append(seen)
    one, other = (seen.table() for seen in tables)
    assert (one["queries"] == mask.sum().item()).all()
    # hidden states of the second layer come from other sums
    np.testing.assert_allclose(one[NUMBERS], other[NUMBERS], rtol=2e-5, atol=2e-5)
    module = one["module"].iloc[0]
    np.testing.assert_array_equal(tables[0].rho(module), tables[1].rho(module))


def test_flex_attention_compiled_for_the_cpu_has_the_statistics_of_sdpa(full):
    if not full:
        pytest.skip("compiles for half a minute; in make test-full")
    model, batch, tables = build("llama"), inputs("llama"), []
    for backend in ("sdpa", "flex_attention"):
        model.set_attn_implementation(backend)
        with torch.no_grad(), observe(model) as seen:
            model(**batch)
        tables.append(seen.table())
    np.testing.assert_allclose(tables[0][NUMBERS], tables[1][NUMBERS], rtol=2e-5, atol=2e-5)
