"""QK-clip: no head's largest logit above τ on the batch that set it, by scaling what it should and nothing else."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
import transformers as tf
from rivals import ByHand, Joint, batch, loss_of, one_step, ready
from torch import nn
from zoo import recorded_logits

from locater import LocaterError, observe
from locater.control import QKClip
from locater.models import attentions
from locater.models.twin import randomise

FAMILIES = [
    "gpt2",  # fused, stored transposed
    "gpt-neox",  # fused head by head, partly rotary
    "llama",  # a key head for two query heads
    "qwen2",  # biases too
    "phi3",  # fused and grouped
    "falcon-new",
    "falcon-multi-query",
    "falcon-alibi",  # computes by itself, with a position bias
    "bloom",
    "t5",
    "gptj",
    "whisper",  # cross-attention; a key without a bias
    "bert",
    "modernbert",
    "gemma2",  # a softcap of its own
]
CAUSAL = {"gpt2", "gpt-neox", "llama", "qwen2", "phi3", "falcon-new", "falcon-multi-query", "falcon-alibi", "bloom"}
CAUSAL |= {"gptj", "gemma2"}


def still(model):
    """An optimizer whose steps change nothing: what QK-clip does is all that happens."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def clip(model, given, threshold):
    """One such step under QK-clip."""
    optimizer = still(model)
    handle = QKClip(threshold).apply(model, optimizer)
    one_step(model, optimizer, given)
    return handle


def products(model, states):
    """scale · q·k of every head (B, heads, Tq, Tk) by module, for the states that entered, as the registry has it."""
    found = {}
    for attention in attentions(model):
        query, key, _ = states[attention.module]
        bare = replace(attention, position_bias=None, softcap=None)
        found[attention.module] = bare.logits(query, key).detach()
    return found


def visible(family, name, shape):
    causal = family in CAUSAL or (family in ("t5", "whisper") and "decoder" in name and "ncoder_attn" not in name)
    causal = causal and "EncDec" not in name
    return torch.ones(shape[-2:], dtype=torch.bool).tril() if causal else torch.ones(shape[-2:], dtype=torch.bool)


def largest(family, logits):
    """(heads,) by module, over the pairs that see each other."""
    return {
        name: s.masked_fill(~visible(family, name, s.shape), -torch.inf).amax((0, 2, 3)) for name, s in logits.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_no_head_exceeds_the_threshold_on_the_batch_that_set_it(family):
    model, given = ready(family), batch(family)
    with recorded_logits(model) as states:
        loss_of(model, given)
    before = products(model, states)
    tops = torch.cat(list(largest(family, before).values()))
    threshold = tops.median().item()
    handle = clip(model, given, threshold)
    after = products(model, states)
    for name, top in largest(family, before).items():
        # logits of each head by the factor of that head alone: those below are as they were
        gamma = (threshold / top).clamp(max=1)[:, None, None]
        torch.testing.assert_close(after[name], gamma * before[name], rtol=1e-5, atol=1e-6)  # S is kept in float32
        assert handle.measure()[f"{name}/max_logit"] == pytest.approx(top.max().item(), rel=1e-6)
    assert torch.cat(list(largest(family, after).values())).max() <= threshold * (1 + 1e-6)


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox", "phi3", "falcon-new", "bloom"])
def test_in_fused_layouts_only_query_and_key_rows_change(family):
    model, given = ready(family), batch(family)
    before = copy.deepcopy(model.state_dict())
    clip(model, given, 0.01)
    scaled = {}
    for attention in attentions(model):
        for projection in (attention.query, attention.key):
            for tensor, view in ((projection.tensor, projection.view), (projection.bias_tensor, projection.bias_view)):
                if tensor is not None:
                    mask = scaled.setdefault(id(tensor), torch.zeros(tensor.shape, dtype=torch.bool))
                    view(mask).fill_(True)
    for name, parameter in model.named_parameters():
        changed = parameter != before[name]
        assert not changed[~scaled.get(id(parameter), torch.zeros_like(changed))].any(), name


def test_a_shared_key_head_is_left_alone_and_the_query_takes_all():
    model, given = ready("llama"), batch("llama")
    old = copy.deepcopy(attentions(model))
    clip(model, given, 0.01)
    for was, now in zip(old, attentions(model), strict=True):
        assert torch.equal(was.key.weight, now.key.weight)
        assert (now.query.weight.norm() < 0.1 * was.query.weight.norm()).all()


def test_a_key_head_of_ones_own_is_scaled_as_the_query_is():
    model, given = ready("gpt2"), batch("gpt2")
    old = copy.deepcopy(attentions(model))
    clip(model, given, 0.01)
    for was, now in zip(old, attentions(model), strict=True):
        ratios = [(b.weight / a.weight).mean((2, 3)) for a, b in ((was.query, now.query), (was.key, now.key))]
        torch.testing.assert_close(*ratios)
        assert (ratios[0] < 0.5).all()


@pytest.mark.parametrize("frozen", ["q_proj", "k_proj"])
def test_what_is_frozen_is_left_alone_and_the_other_takes_all(frozen):
    model, given = ready("llama"), batch("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    with recorded_logits(model) as states:
        loss_of(model, given)
    QKClip(0.1).apply(model, optimizer)
    one_step(model, optimizer, given)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items() if frozen in name)
    tops = torch.cat(list(largest("llama", products(model, states)).values()))
    assert tops.max() <= 0.1 * (1 + 1e-6)


def test_a_model_of_one_layer_runs_at_the_threshold_afterwards():
    """The same by another road: the model itself, observed."""
    model, given = ready("llama"), batch("llama")
    model.model.layers = model.model.layers[:1]
    with observe(model) as seen:
        loss_of(model, given)
    tops = torch.tensor(seen.table().max_logit)
    threshold = tops.sort().values[1].item()  # two of four heads above
    clip(model, given, threshold)
    with observe(model) as seen:
        loss_of(model, given)
    expected = tops.clamp(max=threshold)
    torch.testing.assert_close(torch.tensor(seen.table().max_logit), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_clip_acts_on_the_weights_after_the_step_by_the_logits_before_it(implementation):
    model, other, given = ready("llama"), ready("llama"), batch("llama")
    with recorded_logits(other) as states:
        loss_of(other, given)
    for one in (model, other):
        one.set_attn_implementation(implementation)
    gammas = {name: (0.5 / top).clamp(max=1) for name, top in largest("llama", products(other, states)).items()}
    optimizer, plain = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    QKClip(0.5).apply(model, optimizer)
    one_step(model, optimizer, given)
    one_step(other, plain, given)
    for clipped, stepped in zip(attentions(model), attentions(other), strict=True):
        gamma = gammas[clipped.module].view(clipped.qk().shape)[..., None, None]
        torch.testing.assert_close(clipped.query.weight, gamma * stepped.query.weight, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(clipped.key.weight, stepped.key.weight, rtol=1e-6, atol=1e-8)


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True), 1)


@pytest.mark.parametrize("make", [encoder, ByHand, Joint])
def test_torchs_own_module_a_users_and_a_joint_matrix(make):
    model = make().double()
    x = 5 * torch.randn(2, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    attention = attentions(model)[0]
    before = attention.logits(x)
    optimizer = still(model)
    QKClip(1.0).apply(model, optimizer)
    model(x).square().mean().backward()
    optimizer.step()
    gamma = (1.0 / before.amax((0, 2, 3))).clamp(max=1)
    torch.testing.assert_close(attention.logits(x), gamma[:, None, None] * before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of_layer", [True, False])
def test_a_layer_that_is_frozen_stays_as_it_is_and_the_others_are_clipped(of_layer):
    model, given = ready("llama"), batch("llama")
    frozen, trained = (layer.self_attn for layer in model.model.layers)
    for layer in (model.model.layers[0],) if of_layer else (frozen.q_proj, frozen.k_proj):
        layer.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    before = copy.deepcopy(model.state_dict())
    handle = QKClip(0.01).apply(model, optimizer)
    one_step(model, optimizer, given)
    assert list(handle.measure()) == ["model.layers.1.self_attn/max_logit"]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"model.layers.1.self_attn.q_proj.weight"}
    handle.remove()
    trained.requires_grad_(False)
    with pytest.raises(LocaterError, match="all query and key weights of the model are frozen"):
        QKClip(0.01).apply(model, optimizer)


def shared(which):
    """GPT-J of two layers, with weights of their own or with those of the first layer in both."""
    torch.manual_seed(0)
    model, given = ready("gptj"), batch("gptj")
    first, second = (block.attn for block in model.transformer.h)
    for name in ("q_proj", "k_proj"):
        getattr(second, name).weight.data.copy_(getattr(first, name).weight)
        if name in which:
            setattr(second, name, getattr(first, name))
    return model, given


@pytest.mark.parametrize("which", [(), ("q_proj",), ("q_proj", "k_proj")])
def test_what_layers_share_is_clipped_once_by_the_largest_of_their_logits(which):
    model, given = shared(which)
    with recorded_logits(model) as states:
        loss_of(model, given)
    tops = torch.stack(list(largest("gptj", products(model, states)).values()))
    threshold = tops.min().item() / 2
    old = [(a.query.weight.clone(), a.key.weight.clone()) for a in attentions(model)]
    handle = clip(model, given, threshold)
    own = (threshold / tops).sqrt()
    both = own.amin(0).expand_as(own)
    for index, attention in enumerate(attentions(model)):
        parts = zip((attention.query, attention.key), old[index], ("q_proj", "k_proj"), strict=True)
        for part, was, name in parts:
            factor = (both if name in which else own)[index]
            torch.testing.assert_close(part.weight, factor.view(-1, 1, 1, 1) * was, rtol=1e-5, atol=1e-8)
        measured = handle.measure()[f"{attention.module}/max_logit"]
        assert measured == pytest.approx(tops[index].max().item(), rel=1e-6)  # of each layer its own


class OneMatrix(ByHand):
    """Queries are keys."""

    def __init__(self):
        super().__init__()
        self.num_kv_heads = 4
        self.k_proj = self.q_proj

    def forward(self, x):
        b, t, _ = x.shape
        q, v = (layer(x).view(b, t, 4, 4).transpose(1, 2).reshape(-1, t, 4) for layer in (self.q_proj, self.v_proj))
        return torch.bmm(torch.softmax(self.scale * torch.bmm(q, q.transpose(1, 2)), dim=-1), v)


def test_a_matrix_of_queries_and_keys_is_clipped_once():
    model = OneMatrix().double()
    x = 5 * torch.randn(2, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (attention,) = attentions(model)
    before = attention.logits(x).detach()
    optimizer = still(model)
    QKClip(1.0).apply(model, optimizer)
    model(x).square().mean().backward()
    optimizer.step()
    gamma = (1.0 / before.amax((0, 2, 3))).clamp(max=1)[:, None, None]
    torch.testing.assert_close(attention.logits(x), gamma * before, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- what S is of


def clip_and_top(model, optimizer, threshold=1e9):
    handle = QKClip(threshold).apply(model, optimizer)

    def top():
        return max(handle.measure().values())

    return handle, top


def test_it_is_of_all_training_forwards_since_the_last_step():
    model = ready("llama")
    optimizer = still(model)
    handle, top = clip_and_top(model, optimizer)
    generator = torch.Generator().manual_seed(5)
    parts = [{"input_ids": torch.randint(3, 60, (2, 13), generator=generator)} for _ in range(3)]
    tops = []
    for part in parts:
        one_step(model, optimizer, part)
        tops.append(top())
    low, _, high = (parts[i] for i in sorted(range(3), key=lambda i: tops[i]))
    loss_of(model, high).backward()
    loss_of(model, low).backward()
    optimizer.step()
    assert top() == max(tops)  # accumulated
    with torch.no_grad():
        loss_of(model.eval(), high)
    one_step(model, optimizer, low)
    assert top() == min(tops)  # evaluation does not count, and the last step is forgotten
    one_step(model, optimizer, high)
    assert top() == max(tops)  # a model that is trained in evaluation mode, in which transformers loads it
    handle.remove()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_does_not_count(implementation):
    model, given = ready("llama").float(), batch("llama")
    model.set_attn_implementation(implementation)
    optimizer = still(model)
    _, top = clip_and_top(model, optimizer)
    whole = {"input_ids": given["input_ids"][:, 4:]}
    one_step(model, optimizer, {**whole, "position_ids": torch.arange(4, 13)[None]})
    expected = top()
    padded = {"attention_mask": (torch.arange(13) >= 4).long().expand(2, 13)}
    one_step(model, optimizer, {**given, **padded, "position_ids": torch.arange(13)[None]})
    assert top() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_after_an_overflow_clips_nothing(value):
    model, given = ready("llama"), batch("llama")
    optimizer = still(model)
    QKClip(0.01).apply(model, optimizer)
    with torch.no_grad():
        model.model.embed_tokens.weight[given["input_ids"][0, 0]] = value
    before = copy.deepcopy(model.state_dict())
    loss_of(model, given)
    optimizer.step()
    names = [name for name in before if "q_proj" in name or "k_proj" in name]
    assert all(torch.isfinite(model.state_dict()[name]).all() for name in names)


def test_gradient_checkpointing_and_bfloat16():
    model, given = ready("llama").bfloat16(), batch("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with recorded_logits(model) as states:
        loss_of(model, {**given, "use_cache": False})
    clip(model, {**given, "use_cache": False}, 0.5)
    after = largest("llama", products(model, states))
    assert max(float(top.max()) for top in after.values()) <= 0.5 * (1 + 2**-6)  # bfloat16 logits round by 2⁻⁹


def test_heads_spread_over_ranks_are_refused():
    model, given = ready("llama"), batch("llama")
    optimizer = still(model)
    QKClip(0.5).apply(model, optimizer)
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight = nn.Parameter(attention.q_proj.weight[:16])  # as tensor parallelism leaves it
    attention.o_proj.weight = nn.Parameter(attention.o_proj.weight[:, :16])
    attention.num_key_value_groups = 1
    with pytest.raises(LocaterError, match="4 heads and computed 2"):
        loss_of(model, given)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_queries_that_are_scaled_before_the_product_are_clipped_at_the_threshold(backend):
    """SAM's eager form multiplies them, and its softmax is given the product as it is."""
    torch.manual_seed(0)
    config = tf.SamVisionConfig(
        hidden_size=60, num_attention_heads=5, num_hidden_layers=1, image_size=48, patch_size=8, output_channels=16,
        window_size=0, global_attn_indexes=[], mlp_dim=40,
    )  # fmt: skip
    model = tf.SamVisionModel._from_config(config, attn_implementation=backend).float()
    randomise(model, seed=3)
    model.vision_encoder.layers[0].attn.qkv.weight.data.mul_(3)
    module, states = model.vision_encoder.layers[0].attn, []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: states.append([*args, *kwargs.values()][0]), with_kwargs=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip = QKClip(3.0).apply(model, optimizer)
    for most in (math.inf, 3.0):
        model.train()(torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0)))[0].sum().backward()
        with torch.no_grad():  # q·k as the weights make it, without positions
            products = replace(attentions(model)[0], position_keys=None).logits(states.pop().flatten(1, 2))
        optimizer.step()
        (largest,) = clip.measure().values()
        assert largest == pytest.approx(float(products.max()), rel=1e-4)
        assert largest < most * (1 + 1e-4)


def test_a_bias_of_the_queries_is_clipped_with_them():
    """Transformer-XL's, which is no bias of a layer."""
    torch.manual_seed(0)
    config = tf.ParakeetEncoderConfig(
        hidden_size=60, num_hidden_layers=1, num_attention_heads=5, intermediate_size=40, num_mel_bins=16, dropout=0.0,
        subsampling_conv_channels=8, conv_kernel_size=5, layerdrop=0.0, activation_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = tf.ParakeetEncoder(config).float()
    randomise(model, seed=3)
    model.layers[0].self_attn.bias_u.data.mul_(8)
    model.layers[0].self_attn.k_proj.weight.data.mul_(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip = QKClip(3.0).apply(model, optimizer)
    for most in (math.inf, 3.0):
        model.train()(torch.randn(2, 300, 16, generator=torch.Generator().manual_seed(0)))[0].sum().backward()
        optimizer.step()
        (largest,) = clip.measure().values()
        assert 2.9 < largest < most * (1 + 1e-4)
