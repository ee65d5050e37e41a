"""`observe` on attention of other shapes: more queries than keys, windows, folded heads, queries that come second, and
modules whose first softmax is not the attention, or that have none.

What is expected is the model's own probabilities.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional
from zoo import VOCABULARY

from locater import LocaterError, observe
from locater.hooks._calls import of_interface
from own_attention import OwnAttention

BART = tf.BartConfig(
    vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    max_position_embeddings=64,
)  # fmt: skip
SMALL_IMAGES = {
    "segformer": lambda: tf.SegformerModel(
        tf.SegformerConfig(
            num_encoder_blocks=2, depths=[1, 1], sr_ratios=[4, 2], hidden_sizes=[8, 16], num_attention_heads=[1, 2],
            patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=8,
        )
    ),
    "pvt": lambda: tf.PvtModel(
        tf.PvtConfig(
            image_size=32, num_encoder_blocks=2, depths=[1, 1], sequence_reduction_ratios=[4, 1], hidden_sizes=[8, 16],
            num_attention_heads=[1, 2], patch_sizes=[4, 2], strides=[4, 2], mlp_ratios=[2, 2],
        )
    ),
    "swin": lambda: tf.SwinModel(
        tf.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 4], window_size=4)
    ),
}  # fmt: skip


def shaken(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def assert_entropy(rows, p, real=None):
    """That of probabilities (B, H, Tq, Tk), over the queries (B, Tq) that are real."""
    real = torch.ones(p.shape[0], p.shape[2], dtype=torch.bool) if real is None else real
    entropy = torch.special.entr(p.double()).sum(-1)
    expected = [entropy[:, head][real].mean().item() for head in range(p.shape[1])]
    np.testing.assert_allclose(rows["entropy"], expected, rtol=1e-5, atol=1e-6)
    assert (rows["queries"] == real.sum().item()).all()
    assert (rows["entropy_share"] <= 1).all()


def rows_of(seen, module):
    table = seen.table()
    return table[table["module"] == module]


# ---------------------------------------------------------------------- models of transformers


def test_cross_attention_of_bart_with_twice_as_many_queries_as_keys():
    model = shaken(tf.BartModel(BART))
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(3, VOCABULARY, (2, n), generator=generator) for n in (12, 24))
    mask = torch.ones_like(source)
    mask[1, 8:] = 0
    with torch.no_grad(), observe(model) as seen:
        made = model(input_ids=source, attention_mask=mask, decoder_input_ids=target, output_attentions=True)
    assert list(seen.table()["kind"].unique()) == ["encoder", "decoder", "cross"]
    assert_entropy(rows_of(seen, "decoder.layers.0.encoder_attn"), made.cross_attentions[0])
    assert_entropy(rows_of(seen, "decoder.layers.0.self_attn"), made.decoder_attentions[0])
    assert_entropy(rows_of(seen, "encoder.layers.0.self_attn"), made.encoder_attentions[0], mask.bool())
    share = rows_of(seen, "decoder.layers.0.encoder_attn")["entropy_share"]
    p = made.cross_attentions[0].double()
    entropy = torch.special.entr(p).sum(-1) / torch.tensor([12, 8]).log()[:, None, None]
    np.testing.assert_allclose(share, entropy.mean((0, 2)), rtol=1e-5)


@pytest.mark.parametrize("name", SMALL_IMAGES)
def test_images_whose_keys_are_fewer_than_queries_or_in_windows(name):
    model = shaken(SMALL_IMAGES[name]())
    model.config._attn_implementation = "eager"
    with torch.no_grad(), observe(model) as seen:
        made = model(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)), output_attentions=True)
    names = seen.table()["module"].unique()
    for module, p in zip(names, made.attentions, strict=True):
        assert_entropy(rows_of(seen, module), p)


# ---------------------------------------------------------------------- modules of one's own


class OfImages(nn.Module):
    """A UNet's cross-attention, as diffusers has it: many pixels, few words."""

    def __init__(self, how):
        super().__init__()
        self.heads, self.how = 2, how
        self.to_q, self.to_k, self.to_v = nn.Linear(8, 8), nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, hidden_states, encoder_hidden_states):
        q = self.to_q(hidden_states)
        k, v = self.to_k(encoder_hidden_states), self.to_v(encoder_hidden_states)
        q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in (q, k, v))
        if "folded" in self.how:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        if "sdpa" in self.how:
            return functional.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT / 2).softmax(-1) @ v


@pytest.mark.parametrize("how", ["softmax", "folded softmax", "sdpa", "folded sdpa"])
def test_more_pixels_than_words(how):
    torch.manual_seed(0)
    module, pixels, words = OfImages(how), torch.randn(3, 16, 8), torch.randn(3, 5, 6)
    with torch.no_grad(), observe(module) as seen:
        module(pixels, encoder_hidden_states=words)
        q, k = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f, x in ((module.to_q, pixels), (module.to_k, words)))
    assert_entropy(seen.table(), (q @ k.mT / 2).softmax(-1))
    assert seen.tokens()["sequences"].tolist() == [3]


class Gated(nn.Module):
    """Its first softmax mixes what entered; queries are of the second argument; time comes first if asked."""

    def __init__(self, time_first=False):
        super().__init__()
        self.num_heads, self.time_first = 2, time_first
        self.q_proj, self.k_proj, self.gate = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, memory, query):
        mixture = self.gate(memory).softmax(-1)  # (·, ·, 3)
        q, k = self.q_proj(query), self.k_proj(memory) * mixture[..., :1]
        if self.time_first:
            q, k = q.transpose(0, 1), k.transpose(0, 1)
        q, k = (x.unflatten(-1, (2, -1)).transpose(1, 2).flatten(0, 1) for x in (q, k))
        self.p = (torch.bmm(q, k.mT) / 2).softmax(-1)
        return self.p


@pytest.mark.parametrize("time_first", [False, True])
def test_queries_of_the_second_argument_behind_another_softmax(time_first):
    torch.manual_seed(0)
    module, memory, query = Gated(time_first), torch.randn(3, 5, 8), torch.randn(3, 7, 8)
    given = [x.transpose(0, 1) if time_first else x for x in (memory, query)]
    with torch.no_grad(), observe(module) as seen:
        module(*given)
    assert_entropy(seen.table(), module.p.unflatten(0, (3, 2)))
    apart = query - query.mean(1, keepdim=True)
    expected = (apart.square().sum((1, 2)) / query.square().sum((1, 2))).sqrt().mean()
    assert seen.tokens()["rank_residual"].item() == pytest.approx(expected.item(), rel=1e-5)


class WithSink(nn.Module):
    """Causal, with a logit of 0 at the end of each row."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q, k = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj))
        s = (q @ k.mT).masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -torch.inf)
        self.p = functional.pad(s, (0, 1)).softmax(-1)
        return self.p


def test_a_key_of_no_token_after_the_others_hides_no_query():
    module = WithSink()
    with torch.no_grad(), observe(module) as seen:
        module(torch.randn(3, 5, 8))
    assert_entropy(seen.table(), module.p)


def test_keys_of_another_sequence_after_ones_own_do_not_make_padding_of_queries():
    """As in T5Gemma 2, whose decoder attends to itself, causally, and to an encoder's padded sequence at once."""
    q, k = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 12, 4)
    own, other = torch.ones(2, 5, 5, dtype=torch.bool).tril(), torch.ones(2, 5, 7, dtype=torch.bool)
    other[1, :, 4:] = False
    (call,) = of_interface("eager", arguments(q, k, torch.cat([own, other], 2)[:, None]), cross=False)
    assert call.real.all()
    own[0, :, 3:] = False  # the last two of the first sequence are padding themselves
    (call,) = of_interface("eager", arguments(q, k, torch.cat([own, other], 2)[:, None]), cross=False)
    assert call.real.tolist() == [[True, True, True, False, False], [True] * 5]


def arguments(query, key, attention_mask):
    return {"module": nn.Identity(), "query": query, "key": key, "attention_mask": attention_mask}


def test_a_key_of_zeros_of_torchs_own_module_is_a_sink():
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(8, 2, add_zero_attn=True, batch_first=True), torch.randn(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    with torch.no_grad(), observe(module) as seen:
        p = module(x, x, x, key_padding_mask=padding, average_attn_weights=False)[1]  # (B, H, Tq, Tk + 1)
    assert_entropy(seen.table(), p, ~padding)


@pytest.mark.parametrize("name", ["nystrom", "big bird"])
def test_attention_put_together_of_several_softmaxes_is_refused(name):
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    small |= {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
    if name == "nystrom":
        model = tf.NystromformerModel(tf.NystromformerConfig(**small, num_landmarks=4, segment_means_seq_len=16))
    else:
        model = tf.BigBirdModel(tf.BigBirdConfig(**small, block_size=4, num_random_blocks=1))
    ids = torch.randint(3, VOCABULARY, (2, 16 if name == "nystrom" else 64))
    with pytest.raises(LocaterError, match="cannot be observed: it puts its attention together of several softmaxes"), \
            torch.no_grad(), observe(model.eval()):  # fmt: skip
        model(ids)


# ---------------------------------------------------------------------- without a softmax


def attend(q, k):
    return (q @ k.mT).softmax(-1)


class ByFunction(nn.Module):
    """Its softmax is in a function outside of it."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        q, k = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q_proj, self.k_proj))
        return attend(q, k).sum(1) @ x


class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.q_proj(x).relu() @ (self.k_proj(x).relu().mT @ x)


class DeformableAttention(nn.Module):
    """A softmax over four points of each head, which are no keys."""

    def __init__(self):
        super().__init__()
        self.points = nn.Linear(16, 8)

    def forward(self, x):
        return x * self.points(x).unflatten(-1, (2, 4)).softmax(-1).amax((2, 3))[..., None]


@pytest.mark.parametrize("other", [LinearAttention, DeformableAttention])
@pytest.mark.parametrize("own", [OwnAttention, ByFunction])
def test_attention_without_keys_or_softmax_is_left_out_of_a_model_that_has_both(own, other):
    model = nn.Sequential(own(), other(), own())
    with torch.no_grad(), observe(model) as seen:
        model(torch.randn(2, 6, 16))
    assert list(seen.table()["module"].unique()) == ["0", "2"]


def test_a_model_of_linear_attention_alone_is_refused():
    with pytest.raises(LocaterError, match=r"0 \(LinearAttention\) cannot be observed: its code calls neither softmax"):
        observe(nn.Sequential(LinearAttention())).__enter__()


# ---------------------------------------------------------------------- layers


def test_layers_may_be_numbers_of_any_kind():
    model, x = nn.Sequential(OwnAttention(), OwnAttention()), torch.randn(2, 6, 16)
    for layers in ([1], (1,), {1}, np.array([1]), torch.tensor([1]), range(1, 2), iter([1])):
        with torch.no_grad(), observe(model, layers=layers) as seen:
            model(x)
        assert list(seen.table()["layer"].unique()) == [1]


@pytest.mark.parametrize("layers", [5, 1.0, "1", [0.5], [None], [[0]]])
def test_what_is_no_list_of_layers_is_refused_in_one_sentence(layers):
    with pytest.raises(LocaterError, match=r"layers must be a list of some of \[0, 1\], got "):
        observe(nn.Sequential(OwnAttention(), OwnAttention()), layers=layers).__enter__()
