"""What `observe` reports is what the model's own softmax computes, and the model does not notice."""

from __future__ import annotations

import copy
import sys
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from zoo import COMMON, FAMILIES, GROUPED, SMALL, VOCABULARY, build, inputs, recorded_logits

from locater import LocaterError
from locater.hooks import Call
from locater.hooks._calls import _with_mask
from locater.measure import attention, attention_statistics, rank_residual
from locater.measure.observe import observe
from own_attention import OwnAttention

BYPASS = {
    "gpt2-upcast": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCABULARY, reorder_and_upcast_attn=True,
            attn_implementation="eager",
        )
    ),
    "deberta": lambda: tf.DebertaV2Model(
        tf.DebertaV2Config(
            **SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, type_vocab_size=0
        )
    ),
    "gpt_neo": lambda: tf.GPTNeoForCausalLM(
        tf.GPTNeoConfig(
            hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=5,
            intermediate_size=48, **COMMON,
        )
    ),
    "mpt": lambda: tf.MptForCausalLM(tf.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=VOCABULARY)),
    "codegen": lambda: tf.CodeGenForCausalLM(
        tf.CodeGenConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, vocab_size=VOCABULARY)
    ),
}  # fmt: skip
WINDOWED = {
    "mistral-window": lambda: tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=4)),
    "gemma3-window": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**GROUPED, head_dim=12, query_pre_attn_scalar=20, sliding_window=4)
    ),
    "modernbert-window": lambda: tf.ModernBertModel(
        tf.ModernBertConfig(**{**SMALL, "num_hidden_layers": 4}, pad_token_id=0, local_attention=6)
    ),
}


def stirred(make):
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def made(name):
    return build(name) if name in FAMILIES else stirred({**BYPASS, **WINDOWED}[name])


def of_logits(logits, real=None):
    """Mean entropy, its share of ln(keys), largest logit and mean logsumexp of each head, in float64."""
    logits = logits.double()
    logits = logits.masked_fill(logits < -1e30, -torch.inf)
    real = torch.ones(logits.shape[0], logits.shape[2], dtype=torch.bool) if real is None else real
    p = logits.softmax(-1)
    entropy = torch.special.entr(p).sum(-1)
    keys = (logits > -torch.inf).sum(-1)
    columns = {"entropy": [], "entropy_share": [], "max_logit": [], "logsumexp": []}
    for head in range(logits.shape[1]):
        h, n, s = entropy[:, head][real], keys[:, head][real], logits[:, head][real]
        columns["entropy"].append(h.mean())
        columns["entropy_share"].append((h / n.log())[n > 1].mean())
        columns["max_logit"].append(s.max())
        columns["logsumexp"].append(s.logsumexp(-1).mean())
    return {name: torch.stack(values).numpy() for name, values in columns.items()}


def of_head(table, module):
    return table[table["module"] == module].sort_values("head")


def assert_same(table, module, logits, real=None):
    rows = of_head(table, module)
    for name, expected in of_logits(logits, real).items():
        np.testing.assert_allclose(rows[name], expected, rtol=1e-5, atol=1e-5, err_msg=f"{module} {name}")


def assert_tables_equal(one, other, tolerance=1e-5):
    assert list(one["module"]) == list(other["module"])
    assert (one["queries"] == other["queries"]).all()
    for name in ("entropy", "entropy_share", "max_logit", "logsumexp"):
        np.testing.assert_allclose(one[name], other[name], rtol=tolerance, atol=tolerance, err_msg=name)


# ---------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("name", [*FAMILIES, *BYPASS, *WINDOWED])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # DeBERTa's
def test_statistics_are_those_of_the_logits_the_model_hands_to_softmax(name):
    model = made(name)
    with torch.no_grad(), observe(model) as seen:
        model(**inputs(name))
    if name in FAMILIES:
        with torch.no_grad(), recorded_logits(model) as recorded:
            model(**inputs(name))
        own = {module: logits for module, (_, _, logits) in recorded.items()}
    else:
        own = dict(zip(seen.table()["module"].unique(), own_logits(model, inputs(name)), strict=True))
    assert set(seen.table()["module"]) == set(own)
    for module, logits in own.items():
        assert_same(seen.table(), module, logits)


def own_logits(model, batch):
    """What the modules of a family outside the registry hand to softmax, in their order."""
    logits, softmax = [], functional.softmax

    def spy(x, *args, **kwargs):
        logits.append(x.detach())
        return softmax(x, *args, **kwargs)

    functional.softmax = spy
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        functional.softmax = softmax
    return logits


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral-window", "gemma3-window", "modernbert-window", "bert", "t5",
                                  "whisper", "vit", "opt", "falcon-new", "phi3"])  # fmt: skip
def test_sdpa_and_eager_have_the_same_statistics(name):
    model, tables = made(name), []
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        with torch.no_grad(), observe(model) as seen:
            model(**inputs(name))
        tables.append(seen.table())
    assert_tables_equal(*tables)


def padded(side, tokens=11, real=(11, 7, 2)):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (len(real), tokens), generator=generator)
    position = torch.arange(tokens)
    lengths = torch.tensor(real)[:, None]
    mask = position < lengths if side == "right" else position >= tokens - lengths
    return ids.masked_fill(~mask, 0), mask


def by_backend(*names):
    """With each backend that a family has; with a softcap, transformers' SDPA is none."""
    eager_only = ("bloom", "gptj", "gemma2")
    return [(name, backend) for name in names for backend in ("eager", "sdpa")[: 1 if name in eager_only else 2]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("name", "backend"), by_backend("llama", "gpt2", "mistral-window", "bert", "bloom", "falcon-new", "gptj", "t5")
)
def test_padding_does_not_count(name, side, backend):
    model = made(name)
    model.set_attn_implementation(backend)
    ids, mask = padded(side)
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    if name == "t5":
        batch["decoder_input_ids"] = ids[:, :5]
    elif name not in ("bert", "bloom"):  # which do not take them
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), observe(model) as together:
        model(**batch)
    parts = []
    for i in range(len(ids)):
        alone = {"input_ids": ids[i : i + 1, mask[i]]}
        if name == "t5":
            alone["decoder_input_ids"] = ids[i : i + 1, :5]
        with torch.no_grad(), observe(model) as seen:
            model(**alone)
        parts.append(seen)
    table, tables = together.table(), [seen.table() for seen in parts]
    count = sum(one["queries"] for one in tables)
    assert (table["queries"] == count).all()
    if name == "bert" and side == "left":
        return  # its positions do not skip padding: alone, the tokens would be others
    mean = sum(one["entropy"] * one["queries"] for one in tables) / count
    np.testing.assert_allclose(table["entropy"], mean, rtol=2e-5, atol=2e-5)  # float32 sums of other lengths
    np.testing.assert_allclose(table["max_logit"], np.max([one["max_logit"] for one in tables], 0), rtol=1e-4)
    module = table["module"].iloc[0]
    rows = np.full((len(parts), len(table[table["module"] == module]), mask.shape[1]), np.nan)
    for row, one in zip(rows, parts, strict=True):
        row[:, : one.rho(module).shape[1]] = one.rho(module)
    seeing = (~np.isnan(rows)).sum(0)
    expected = np.where(seeing > 0, np.nansum(rows, 0) / np.maximum(seeing, 1), np.nan)
    np.testing.assert_allclose(together.rho(module), expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "modernbert-window", "bert"])
def test_a_mask_that_only_says_causal_window_and_padding_is_not_handed_on_as_a_matrix(name, side, monkeypatch):
    model, (ids, mask), given = made(name), padded(side), []

    def spy(q, k, **options):
        given.append(options)
        return attention_statistics(q, k, **options)

    monkeypatch.setattr(attention, "attention_statistics", spy)
    with torch.no_grad(), observe(model):
        model(input_ids=ids, attention_mask=mask.long())
    assert given
    assert all(options["bias"] is None and torch.equal(options["key_mask"], mask) for options in given)


@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_a_mask_is_read_alike_in_blocks_of_rows_and_at_once(side, window, causal, added, monkeypatch):
    real = padded(side)[1] if side != "none" else torch.ones(3, 11, dtype=torch.bool)
    distance = torch.arange(11)[:, None] - torch.arange(11)
    seen = ((distance >= 0) | (not causal)) & (distance.abs() < (window or 99)) & real[:, None, None]
    q, odd = torch.zeros(3, 2, 11, 4), seen.clone()
    odd[0, 0, 9, 8] = False  # no padding, no window: it stays a matrix
    for mask, is_plain in ((seen, True), (odd, False)):
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min) if added else mask
        found = []
        for together in (1, 40, 10**9):
            monkeypatch.setattr("locater.hooks._calls._COMPARED", together)
            found.append(_with_mask(Call(q, q), mask, window=window))
        for one in found:
            assert (one.causal, one.window) == ((causal, window) if is_plain else (False, None))
            assert (one.bias is None) is is_plain
            assert torch.equal(one.real, real)
            assert (one.key_mask is None) is (side == "none" or not is_plain)
            assert one.key_mask is None or torch.equal(one.key_mask, real)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral-window", "bloom", "gptj", "falcon-multi-query"])
def test_generation_with_a_cache_sees_what_one_forward_sees(name):
    model = made(name)
    prompt = inputs("llama", tokens=6)["input_ids"]
    with torch.no_grad(), observe(model) as stepwise:
        text = model.generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True, pad_token_id=0,
                              eos_token_id=None)  # fmt: skip
    with torch.no_grad(), observe(model) as at_once:
        model(text[:, :-1])
    assert_tables_equal(stepwise.table(), at_once.table(), 1e-4)  # float32 keys come from other products


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_static_cache_with_room_left_does_not_confuse_which_queries_count(backend):
    model, (ids, mask) = made("llama"), padded("right")
    model.set_attn_implementation(backend)
    tables = []
    for cache in (tf.StaticCache(config=model.config, max_cache_len=20), tf.DynamicCache()):
        with torch.no_grad(), observe(model) as seen:
            model(ids, attention_mask=mask.long(), past_key_values=cache)
            longer = torch.cat([mask, mask.new_ones(3, 2)], 1)
            model(ids[:, :2], attention_mask=longer.long(), past_key_values=cache)
        tables.append(seen.table())
    assert_tables_equal(*tables)
    assert (tables[0]["queries"] == mask.sum().item() + 6).all()


def test_generation_of_an_encoder_decoder_sees_its_encoder():
    model = made("t5")
    with torch.no_grad(), observe(model) as seen:
        model.generate(inputs("t5")["input_ids"], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert set(seen.table()["kind"]) == {"encoder", "decoder", "cross"}


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_padding_of_a_decoder_does_not_count_in_its_cross_attention(backend):
    model, (ids, mask) = made("t5"), padded("right")
    model.set_attn_implementation(backend)
    with torch.no_grad(), observe(model) as seen:
        model(input_ids=ids, attention_mask=mask.long(), decoder_input_ids=ids, decoder_attention_mask=mask.long())
    assert (seen.table()["queries"] == mask.sum().item()).all()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("target", [5, 24, 40])
def test_cross_attention_shares_the_entropy_of_all_source_tokens_however_long_the_target(backend, target):
    """With more queries than keys, too, every query of cross-attention attends to all keys."""
    sizes = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = tf.BartConfig(vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, **sizes)
    model, source = stirred(lambda: tf.BartModel(config)), 12
    model.set_attn_implementation(backend)
    ids = torch.randint(3, VOCABULARY, (2, source + target), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), observe(model) as seen:
        model(input_ids=ids[:, :source], decoder_input_ids=ids[:, source:])
    rows = of_head(seen.table(), "decoder.layers.0.encoder_attn")
    assert list(rows["queries"]) == [2 * target] * 2
    np.testing.assert_allclose(rows["entropy_share"], rows["entropy"] / np.log(source), rtol=1e-6)
    assert rows["entropy_share"].max() <= 1


def test_rho_is_the_share_of_sequences_with_z_inside():
    model = made("llama")
    batch = {"input_ids": torch.randint(3, VOCABULARY, (8, 9), generator=torch.Generator().manual_seed(0))}
    with torch.no_grad(), observe(model, queries=[-1, 4]) as seen:
        for half in batch["input_ids"].split(4):
            model(half)
    with torch.no_grad(), recorded_logits(model) as recorded:
        model(**batch)
    for module, (_, _, logits) in recorded.items():
        for query, row in ((-1, 8), (4, 4)):
            s = logits[:, :, row, : row + 1].double()
            z = (1 + s - s.mean(-1, keepdim=True)) / (row + 1)
            expected = ((z >= 0) & (z <= 1)).double().mean(0)
            np.testing.assert_allclose(seen.rho(module, query)[:, : row + 1], expected)
            assert np.isnan(seen.rho(module, query)[:, row + 1 :]).all()


def test_entropy_by_position_is_the_mean_over_the_sequences_that_are_no_padding_there():
    model, (ids, mask) = made("llama"), padded("right")
    with torch.no_grad(), observe(model, by_position=True) as seen:
        for some, counts in ((ids, mask), (ids[:1, :6], mask[:1, :6])):  # the second call is shorter
            model(some, attention_mask=counts.long())
    with torch.no_grad(), recorded_logits(model) as recorded:
        model(ids)  # causal: what comes after a token does not reach it
    counts = mask.double()
    counts[0, :6] += 1
    for module, (_, _, logits) in recorded.items():
        entropy = torch.special.entr(logits.double().softmax(-1)).sum(-1)
        expected = (entropy * counts[:, None]).sum(0) / counts.sum(0)
        np.testing.assert_allclose(seen.entropy_by_position(module), expected, rtol=1e-5, atol=1e-6)  # float32 states


def test_tokens_are_measured_as_they_enter_without_padding():
    model = made("bert")
    ids, mask = padded("right")
    states = {}
    module = model.encoder.layer[1].attention.self
    handle = module.register_forward_pre_hook(lambda _, args: states.update(x=args[0].double()))
    with torch.no_grad(), observe(model) as seen:
        model(input_ids=ids, attention_mask=mask.long())
    handle.remove()
    row = seen.tokens().set_index("module").loc["encoder.layer.1.attention.self"]
    sequences = [x[keep] for x, keep in zip(states["x"], mask, strict=True)]
    np.testing.assert_allclose(row["rank_residual"], np.mean([rank_residual(x) for x in sequences]), rtol=1e-5)
    ranks, cosines = [], []
    for x in sequences:
        share = torch.linalg.svdvals(x - x.mean(0)).square()
        ranks.append(share.sum() ** 2 / share.square().sum())
        unit = functional.normalize(x, dim=-1)
        pairs = (unit @ unit.T)[~torch.eye(len(x), dtype=torch.bool)]
        cosines.append(pairs.mean())
    np.testing.assert_allclose(row["effective_rank"], np.mean(ranks), rtol=1e-5)
    np.testing.assert_allclose(row["mean_cosine"], np.mean(cosines), rtol=1e-5, atol=1e-6)
    assert row["sequences"] == 3


# ---------------------------------------------------------------------- the model does not notice


def outcome(model, batch, watching):
    """The outputs and gradients of one training step, bit for bit."""
    model.zero_grad()
    torch.manual_seed(5)  # dropout
    with ExitStack() as stack:
        seen = stack.enter_context(observe(model)) if watching else None
        result = model(**batch)
        first = result[0] if not isinstance(result, torch.Tensor) else result
        first.float().square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return first.detach(), gradients, seen


@pytest.mark.parametrize(
    ("name", "backend"), by_backend("gpt2", "llama", "gemma2", "t5", "bert", "bloom", "falcon-alibi", "whisper", "gptj")
)
def test_outputs_and_gradients_are_bitwise_the_same(name, backend):
    model = made(name).train()
    model.set_attn_implementation(backend)
    output, gradients, _ = outcome(model, inputs(name), watching=False)
    watched, watched_gradients, seen = outcome(model, inputs(name), watching=True)
    assert torch.equal(output, watched)
    assert gradients.keys() == watched_gradients.keys()
    assert all(torch.equal(gradients[key], watched_gradients[key]) for key in gradients)
    assert len(seen.table())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "bloom"])
@pytest.mark.filterwarnings("ignore:.*use_cache.*")
def test_what_checkpointing_computes_again_does_not_count(name, reentrant):
    model = made(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    batch = inputs(name)
    output, gradients, _ = outcome(model, batch, watching=False)
    watched, watched_gradients, seen = outcome(model, batch, watching=True)
    assert torch.equal(output, watched)
    assert all(torch.equal(gradients[key], watched_gradients[key]) for key in gradients)
    assert (seen.table()["queries"] == batch["input_ids"].numel()).all()


def test_autocast_changes_neither_the_output_nor_what_is_reported():
    model, batch = made("llama"), inputs("llama")
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(**batch).logits
        with observe(model) as seen:
            assert torch.equal(model(**batch).logits, plain)
    with torch.no_grad(), observe(model) as exact:
        model(**batch)
    gap = (seen.table()["entropy"] - exact.table()["entropy"]).abs().max()
    assert 0 < gap < 0.1  # queries and keys of 8 bits
    first, other = (one.tokens().iloc[0] for one in (seen, exact))  # what enters the first layer is the same
    assert first["effective_rank"] == pytest.approx(other["effective_rank"], rel=1e-5)


def test_sums_go_on_from_inference_mode_into_training():
    model, batch = made("llama"), inputs("llama")
    with observe(model) as seen:
        with torch.inference_mode():
            model(**batch)
        model(**batch).logits.sum().backward()
    assert (seen.table()["queries"] == 2 * batch["input_ids"].numel()).all()


def test_a_forward_that_accelerate_has_replaced_is_observed():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules

    for name in ("llama", "bloom"):
        model, batch = made(name), inputs(name)
        for module in model.modules():
            add_hook_to_module(module, ModelHook())
        with torch.no_grad(), observe(model, every=2) as seen:
            for _ in range(3):
                model(**batch)
        remove_hook_from_submodules(model)
        assert (seen.table()["queries"] == 2 * batch["input_ids"].numel()).all()
        assert len(seen.tokens()) == 2


@pytest.mark.gpu
@torch.no_grad()
def test_a_model_that_moves_while_it_is_observed_goes_on_with_its_sums():
    model, batch = made("llama"), inputs("llama")
    with observe(model, covariances=3) as seen:
        for device in ("cpu", "cuda", "cpu"):
            model.to(device)(**{name: value.to(device) for name, value in batch.items()})
    with observe(model) as once:
        model(**batch)
    assert (seen.table()["queries"] == 3 * once.table()["queries"]).all()
    assert (seen.tokens()["sequences"] == 3 * once.tokens()["sequences"]).all()
    np.testing.assert_allclose(seen.table()["entropy"], once.table()["entropy"], rtol=1e-3)  # the GPU's TF32


def test_only_every_third_forward_is_measured():
    model, batch = made("llama"), inputs("llama")
    with torch.no_grad(), observe(model, every=3) as seen:
        for _ in range(7):  # the first, the fourth and the seventh
            model(**batch)
    assert (seen.table()["queries"] == 3 * batch["input_ids"].numel()).all()
    seen.reset()
    assert seen.table().empty


def test_layers_may_be_chosen():
    model = made("gemma3")
    with torch.no_grad(), observe(model, layers=[0, 5]) as seen:
        model(**inputs("gemma3"))
    assert set(seen.table()["layer"]) == {0, 5}


def state_of_the_world(model):
    modeling = sys.modules[type(model).__module__]
    return (
        dict(ALL_ATTENTION_FUNCTIONS._local_mapping),
        dict(ALL_ATTENTION_FUNCTIONS._global_mapping),
        getattr(modeling, "eager_attention_forward", None),
        nn.MultiheadAttention.forward,
        nn.TransformerEncoderLayer.forward,
        [(len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()],
        torch.overrides._len_torch_function_stack(),
    )


@pytest.mark.parametrize("name", ["llama", "bloom", "t5"])
def test_an_exception_leaves_everything_as_it_was(name):
    model = made(name)
    before = state_of_the_world(model)

    def fail(*_):
        raise KeyboardInterrupt

    # interrupted inside an attention module, where no hook of ours runs
    inner = next(m for m in model.modules() if "Attention" in type(m).__name__)
    handle = next(m for m in inner.modules() if isinstance(m, nn.Linear)).register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt), observe(model):
        model(**inputs(name))
    handle.remove()
    assert state_of_the_world(model) == before
    output, *_ = outcome(model, inputs(name), watching=True)
    assert torch.isfinite(output).all()


def test_observers_of_two_models_and_of_one_do_not_mix_in_any_order():
    one, other = made("llama"), made("llama")
    before = state_of_the_world(one)
    first, second, third = observe(one), observe(other), observe(one)
    a, b = first.__enter__(), second.__enter__()
    with torch.no_grad():
        one(**inputs("llama", tokens=5))
        other(**inputs("llama", tokens=7))
        c = third.__enter__()
        first.__exit__(None, None, None)  # not the last to come
        one(**inputs("llama", tokens=9))
    second.__exit__(None, None, None)
    third.__exit__(None, None, None)
    assert [set(seen.table()["queries"]) for seen in (a, b, c)] == [{10}, {14}, {18}]
    assert state_of_the_world(one) == before


def test_a_copy_made_inside_the_block_is_not_observed_and_works():
    model = made("llama")
    with torch.no_grad(), observe(model) as seen:
        twin = copy.deepcopy(model)
        output = twin(**inputs("llama")).logits
        assert seen.table().empty
        assert torch.equal(output, model(**inputs("llama")).logits)


# ---------------------------------------------------------------------- torch's own modules


def encoder(layers=2, **more):
    torch.manual_seed(0)
    options = {"batch_first": True, "dropout": 0.0, "dim_feedforward": 24, **more}
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, **options), layers, enable_nested_tensor=False)


def test_multihead_attention_gives_the_entropy_of_its_weights():
    torch.manual_seed(0)
    query, key = torch.randn(3, 5, 16), torch.randn(3, 7, 12)
    for batch_first in (True, False):
        module = nn.MultiheadAttention(16, 4, kdim=12, vdim=12, batch_first=batch_first)
        a, b = (query, key) if batch_first else (query.transpose(0, 1), key.transpose(0, 1))
        padding = torch.zeros(3, 7, dtype=torch.bool)
        padding[1, 4:] = True
        mask = torch.randn(12, 5, 7)
        for training in (True, False):
            module.train(training)
            with observe(module) as seen:
                _, weights = module(a, b, b, key_padding_mask=torch.zeros(3, 7).masked_fill(padding, -torch.inf),
                                    attn_mask=mask, average_attn_weights=False)  # fmt: skip
            expected = torch.special.entr(weights).sum(-1).mean((0, 2)).detach()
            np.testing.assert_allclose(seen.table()["entropy"], expected, rtol=1e-5)
            assert (seen.table()["queries"] == 15).all()


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "nested"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fast_path_of_torchs_encoder_is_kept_and_observed(norm_first, mask):
    model = encoder(norm_first=norm_first).eval()
    model.use_nested_tensor = mask == "nested" and not norm_first
    x = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(1))
    options = {}
    if mask == "causal":
        options = {"mask": nn.Transformer.generate_square_subsequent_mask(6), "is_causal": True}
    if mask in ("padding", "nested"):
        options = {"src_key_padding_mask": torch.arange(6) >= torch.tensor([6, 4, 2])[:, None]}
    with torch.inference_mode():
        plain = model(x, **options)
        with observe(model) as fast:
            assert torch.equal(model(x, **options), plain)
    with observe(model) as slow:  # with gradients there is no fast path
        model(x, **options)
    assert_tables_equal(fast.table(), slow.table())
    assert (fast.table()["queries"] == (12 if options.get("src_key_padding_mask") is not None else 18)).all()


def test_an_encoder_layer_by_itself_keeps_its_fast_path_and_counts_every_other_call():
    model = encoder().eval().layers[0]
    x = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        plain = model(x)
        with observe(model, every=2) as seen:
            assert all(torch.equal(model(x), plain) for _ in range(3))
    assert (seen.table()["queries"] == 36).all()


def test_torchs_encoder_trains_bitwise_the_same():
    model = encoder().train()
    x = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(1))
    output, gradients, _ = outcome(model, {"src": x}, watching=False)
    watched, watched_gradients, seen = outcome(model, {"src": x}, watching=True)
    assert torch.equal(output, watched)
    assert all(torch.equal(gradients[key], watched_gradients[key]) for key in gradients)
    assert (seen.table()["queries"] == 18).all()
    assert list(seen.table()["layer"].unique()) == [0, 1]


@pytest.mark.parametrize("sizes", [(0, 6, 6), (3, 6, 0)], ids=["no sequence", "no key"])
def test_a_call_with_nothing_in_it_is_let_through_and_does_not_count(sizes):
    b, queries, keys = sizes
    module, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(3, 6, 16)
    query, key = torch.randn(b, queries, 16), torch.randn(b, keys, 16)
    with torch.no_grad(), observe(module) as seen:
        assert torch.equal(module(query, key, key)[0], module(query, key, key)[0])
        assert seen.table().empty
        module(x, x, x)
    assert (seen.table()["queries"] == 18).all()


def test_a_module_of_ones_own_is_intercepted():
    torch.manual_seed(0)
    model, x = nn.Sequential(OwnAttention(), OwnAttention()), torch.randn(2, 6, 16)
    with torch.no_grad():
        plain = model(x)
        with observe(model) as seen:
            assert torch.equal(model(x), plain)
        q, k, _ = (a.unflatten(-1, (4, 4)).transpose(1, 2) for a in model[0].c_attn(x).chunk(3, -1))
    logits = (q @ k.mT / 2).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    assert_same(seen.table(), "0", logits)


class Shaped(nn.Module):
    """Queries and keys of other shapes than (batch, heads, tokens, width)."""

    def __init__(self, shape):
        super().__init__()
        self.q_proj, self.k_proj, self.shape = nn.Linear(16, 16), nn.Linear(16, 16), shape

    def forward(self, x):
        q, k, v = (y.view(self.shape) for y in (self.q_proj(x), self.k_proj(x), x))
        return functional.scaled_dot_product_attention(q, k, v)


def test_one_head_of_one_sequence_is_intercepted_and_what_has_more_sizes_is_refused_by_its_shape():
    torch.manual_seed(0)
    x = torch.randn(6, 16)
    one = Shaped((6, 16))
    with torch.no_grad(), observe(one) as seen:
        one(x)
        logits = one.q_proj(x) @ one.k_proj(x).mT / 4
    assert_same(seen.table(), "", logits[None, None])
    more = Shaped((1, 2, 3, 4, 4))
    with pytest.raises(LocaterError, match=r"Shaped hands queries of shape \(1, 2, 3, 4, 4\)"), observe(more):
        more(x)
    assert torch.overrides._len_torch_function_stack() == 0


# ---------------------------------------------------------------------- flash attention, as its table calls it


@pytest.mark.parametrize("window", [None, 4])
def test_flash_attention_is_read_as_it_reads_its_arguments(window):
    model = stirred(lambda: tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=window)))
    _, mask = padded("left")

    def flash(module, query, key, value, attention_mask, **kwargs):  # noqa: ARG001
        return query.transpose(1, 2).contiguous(), None

    table, own = ALL_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    q, k = torch.randn(2, 3, 4, 11, 8).unbind()
    layer = model.model.layers[0].self_attn
    layer.config._attn_implementation = "flash_attention_2"
    table["flash_attention_2"] = flash
    try:
        with observe(model, layers=[0]) as padded_call:
            table["flash_attention_2"](layer, q, k[:, :2], k[:, :2], mask.long(), scaling=0.3, sliding_window=window)
        with observe(model, layers=[0]) as packed:
            starts = torch.tensor([0, 4, 11])
            table["flash_attention_2"](layer, q[:1], k[:1, :2], k[:1, :2], None, scaling=0.3, sliding_window=window,
                                       cu_seq_lens_q=starts, cu_seq_lens_k=starts)  # fmt: skip
    finally:
        del table["flash_attention_2"]
    assert table["flash_attention_2"] is own
    logits = q @ k[:, :2].repeat_interleave(2, 1).mT * 0.3
    distance = torch.arange(11)[:, None] - torch.arange(11)
    seen = (distance >= 0) & (distance < (window or 99))
    assert_same(padded_call.table(), "model.layers.0.self_attn",
                logits.masked_fill(~(seen & mask[:, None, None]), -torch.inf), mask)  # fmt: skip
    apart = torch.block_diag(torch.ones(4, 4), torch.ones(7, 7)).bool()
    assert_same(packed.table(), "model.layers.0.self_attn", logits[:1].masked_fill(~(seen & apart), -torch.inf))


def test_sequences_packed_into_one_are_measured_each_by_itself():
    model, table = made("llama"), ALL_ATTENTION_FUNCTIONS

    def flash(module, query, key, value, attention_mask, **kwargs):  # noqa: ARG001
        return query.transpose(1, 2).contiguous(), None

    ids = torch.randint(3, VOCABULARY, (1, 11), generator=torch.Generator().manual_seed(0))
    model.config._attn_implementation = "flash_attention_2"
    table["flash_attention_2"] = flash
    try:
        with torch.no_grad():
            with observe(model, covariances=4) as packed:
                model(ids, position_ids=torch.tensor([[*range(4), *range(7)]]))
            with observe(model, covariances=4) as apart:
                for part in ids.split([4, 7], 1):
                    model(part)
    finally:
        del table["flash_attention_2"]
    assert_tables_equal(packed.table(), apart.table())
    one, other = packed.tokens(), apart.tokens()
    assert (one["sequences"] == 2).all()
    for name in ("rank_residual", "effective_rank", "mean_cosine"):
        # in float32; a mean cosine near 0 is a difference of larger ones, off by their rounding
        np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-6)
    module = one["module"].iloc[1]
    for found, expected in zip(packed.covariances(module), apart.covariances(module), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- refusals


class WindowsOnly(nn.Module):
    """Not a softmax over all keys of a query: blocks of two tokens."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q, k = (f(x).unflatten(1, (-1, 2)) for f in (self.q_proj, self.k_proj))  # (B, blocks, 2, K)
        return (q @ k.mT).softmax(-1)


def test_a_softmax_of_another_shape_is_not_taken_for_attention():
    model = WindowsOnly()
    before = state_of_the_world(model)
    with pytest.raises(LocaterError, match=r"WindowsOnly.* cannot be observed: it ran without a softmax over"), \
            observe(model):  # fmt: skip
        model(torch.randn(3, 6, 8))
    assert state_of_the_world(model) == before


def with_attention_of_ones_own():
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED))
    model.config._attn_implementation = "my_own"
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), "no attention to observe in Sequential"),
        (lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True), "add_bias_kv"),
        (
            with_attention_of_ones_own,
            r"model.layers.0.self_attn .*'my_own' reads its mask.*set_attn_implementation\(\"sdpa\"\)",
        ),
        (lambda: "model", "expected a torch module"),
    ],
)
def test_what_cannot_be_observed_says_which_layer_why_and_what_would_work(make, words):
    with pytest.raises(LocaterError, match=words), observe(make()):
        pass


def test_settings_that_make_no_sense_are_refused():
    model = made("llama")
    for options, words in (({"every": 0}, "every must be"), ({"layers": [7]}, r"some of \[0, 1\], got \[7\]")):
        with pytest.raises(LocaterError, match=words), observe(model, **options):
            pass
    with observe(model) as seen:
        pass
    first = "model.layers.0.self_attn"
    for arguments, words in (
        (("nowhere",), f"these are: {first}"),
        ((first, 3), "not for 3"),
        ((first,), "was not called"),
    ):
        with pytest.raises(LocaterError, match=words):
            seen.rho(*arguments)
    with pytest.raises(LocaterError, match="by_position=True"):
        seen.entropy_by_position(first)
