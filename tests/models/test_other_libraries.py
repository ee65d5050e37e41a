"""Attention of other libraries: nanoGPT, x-transformers, diffusers, timm. Read, proven, trained with LocAteR.

The modules here are built as theirs are; where a library is installed, its own are tested too.
"""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from locater.control import LocAteR
from locater.errors import LocaterError
from locater.models import attentions, prove, scan

CLOSE = 1e-5  # of the range: float32


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class CausalSelfAttention(nn.Module):
    """nanoGPT's: one layer for q, k and v, torch's attention."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        q, k, v = (split(part, self.n_head) for part in self.c_attn(x).chunk(3, -1))
        return self.c_proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Attend(nn.Module):
    """x-transformers': where logits and softmax are computed, without a parameter."""

    def __init__(self, scale, **options):
        super().__init__()
        self.scale, self.options = scale, options
        self.logit_softclamp_value = options.get("softclamp")
        self.normalise = torch.sigmoid if options.get("sigmoid") else lambda logits: logits.softmax(-1)

    def forward(self, q, k, v, bias=None):
        logits = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        if self.logit_softclamp_value is not None:
            logits = (logits / self.logit_softclamp_value).tanh() * self.logit_softclamp_value
        logits = logits if bias is None else logits + bias
        if k.shape[2] == q.shape[2]:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -1e9)
        return self.normalise(logits) @ v


class XAttention(nn.Module):
    def __init__(self, width=32, heads=4, width_of_head=16, width_of_context=None, **options):
        super().__init__()
        inner = heads * width_of_head
        self.heads, self.options, self.qk_norm_scale = heads, options, 10.0
        self.to_q = nn.Linear(width, inner, bias=False)
        self.to_k, self.to_v = (nn.Linear(width_of_context or width, inner, bias=False) for _ in range(2))
        self.to_out = nn.Linear(inner, width, bias=False)
        l2 = options.get("qk_norm")
        self.attend = Attend(self.qk_norm_scale if l2 else width_of_head**-0.5, **options)
        if l2 == "learned":
            self.q_scale, self.k_scale = (nn.Parameter(torch.ones(heads, 1, width_of_head)) for _ in range(2))
        if options.get("null"):
            self.null = nn.Parameter(torch.randn(2, heads, 1, width_of_head))

    def forward(self, x, context=None, rotary_pos_emb=None, attn_bias=None):
        states = x if context is None else context
        q, k, v = (
            split(layer(y), self.heads) for layer, y in ((self.to_q, x), (self.to_k, states), (self.to_v, states))
        )
        if self.options.get("qk_norm"):
            q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        if self.options.get("qk_norm") == "learned":
            q, k = q * self.q_scale, k * self.k_scale
        if rotary_pos_emb is not None:
            q, k = rotated(q, rotary_pos_emb), rotated(k, rotary_pos_emb)
        if self.options.get("null"):
            k, v = (
                torch.cat([null.expand(len(x), -1, -1, -1), y], 2) for null, y in zip(self.null, (k, v), strict=True)
            )
        return self.to_out(self.attend(q, k, v, attn_bias).transpose(1, 2).flatten(2))


def rotated(x, angles):
    """Pairs next to each other."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


class DiffusersAttention(nn.Module):
    """diffusers': RMSNorm of each head, keys of another width."""

    def __init__(self, width=32, heads=4, cross_attention_dim=None, norm=True):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k, self.to_v = (nn.Linear(cross_attention_dim or width, width, bias=False) for _ in range(2))
        self.norm_q, self.norm_k = (nn.RMSNorm(width // heads, eps=1e-5) if norm else None for _ in range(2))
        self.to_out = nn.ModuleList([nn.Linear(width, width), nn.Dropout(0.0)])

    def forward(self, hidden_states, encoder_hidden_states=None):
        states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (
            split(layer(y), self.heads)
            for layer, y in ((self.to_q, hidden_states), (self.to_k, states), (self.to_v, states))
        )
        if self.norm_q is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        return self.to_out[0](functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Words, two layers of attention, and what it hands to them."""

    def __init__(self, make, *, rotary=False, alibi=False):
        super().__init__()
        self.words, self.norms = nn.Embedding(50, 32), nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.layers, self.rotary, self.alibi = nn.ModuleList(make() for _ in range(2)), rotary, alibi

    def forward(self, x, context=None):
        x, given = self.words(x), {}
        position = torch.arange(x.shape[1])
        if context is not None:
            given["context"] = context
        if self.rotary:
            given["rotary_pos_emb"] = position[:, None] * 10000 ** (-torch.arange(8) / 8)
        if self.alibi:
            given["attn_bias"] = (0.25 ** torch.arange(1, 5)).view(4, 1, 1) * (position[None] - position[:, None])
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), **given)
        return x


class Crossed(nn.Module):
    """Images that look at words of another width."""

    def __init__(self):
        super().__init__()
        self.attn1, self.attn2 = DiffusersAttention(), DiffusersAttention(cross_attention_dim=48)

    def forward(self, sample, encoder_hidden_states):
        x = sample + self.attn1(sample)
        return x + self.attn2(x, encoder_hidden_states)


IDS = {"x": torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(0))}
WORDS = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(1))
IMAGE = {"sample": torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(2)), "encoder_hidden_states": WORDS}
READ = {
    "nanoGPT": (lambda: Model(CausalSelfAttention), IDS),
    "x-transformers": (lambda: Model(XAttention), IDS),
    "x-transformers, qk_norm": (lambda: Model(lambda: XAttention(qk_norm="l2")), IDS),
    "x-transformers, qk_norm learned": (lambda: Model(lambda: XAttention(qk_norm="learned")), IDS),
    "x-transformers, rotary": (lambda: Model(XAttention, rotary=True), IDS),
    "x-transformers, alibi": (lambda: Model(XAttention, alibi=True), IDS),
    "x-transformers, softclamp": (lambda: Model(lambda: XAttention(softclamp=20.0)), IDS),
    "x-transformers, cross": (lambda: Model(lambda: XAttention(width_of_context=48)), {**IDS, "context": WORDS}),
    "diffusers": (Crossed, IMAGE),
    "diffusers without norms": (lambda: nn.Sequential(DiffusersAttention(norm=False)), {"input": IMAGE["sample"]}),
}
REFUSED = {
    "null keys": (lambda: Model(lambda: XAttention(null=True)), "tokens"),
    "sigmoid": (lambda: Model(lambda: XAttention(sigmoid=True)), "no softmax"),
}


def built(make, seed=0):
    """Every parameter random, gains too."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


class Softmaxed(TorchFunctionMode):
    """What softmax and torch's attention are given, in the order of a forward."""

    def __init__(self):
        super().__init__()
        self.logits = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "softmax":
            self.logits.append(args[0].detach())
        if name == "scaled_dot_product_attention":
            self.logits.append((args[0] @ args[1].mT * args[0].shape[-1] ** -0.5).detach())
        return func(*args, **kwargs)


def entering(model, batch, names):
    """The states (queries', keys') that enter each module, and the logits of every softmax."""
    found, handles = {}, []
    for name in names:

        def enter(_, args, kwargs, name=name):
            states = [x for x in (*args, *kwargs.values()) if torch.is_tensor(x) and x.ndim == 3 and len(x) == 2]
            found[name] = states[0], states[-1]

        handles.append(model.get_submodule(name).register_forward_pre_hook(enter, with_kwargs=True))
    with torch.no_grad(), Softmaxed() as seen:
        model(**batch)
    for handle in handles:
        handle.remove()
    return found, seen.logits


def assert_read(model, batch):
    """Rebuilt logits are those that softmax is given, here and in the table of `prove`."""
    found = attentions(model)
    states, real = entering(model, batch, [attention.module for attention in found])
    assert len(found) == len(real)
    for attention, logits in zip(found, real, strict=True):
        with torch.no_grad():
            rebuilt = attention.logits(*states[attention.module])
        shown = logits > -1e8
        count = shown.sum(-1, keepdim=True)  # a shift of all logits of a query is ALiBi's: no softmax sees it
        ours, theirs = (x - x.masked_fill(~shown, 0).sum(-1, keepdim=True) / count for x in (rebuilt, logits))
        assert (ours - theirs)[shown].abs().max() <= CLOSE * (theirs[shown].max() - theirs[shown].min())
    table = prove(model, batch)
    assert len(table) == len(found)
    assert (table.reason == "").all()
    assert (table.difference <= CLOSE * table.range).all()
    assert len(scan(model)) == sum(attention.heads for attention in found)


def dense_penalty(model):
    """Of the factors (H, K, D), each head's W_QK a matrix."""
    total = 0.0
    for attention in attentions(model):
        module = model.get_submodule(attention.module)
        if hasattr(module, "c_attn"):
            w_q, w_k, _ = module.c_attn.weight.chunk(3)
            heads = module.n_head
        else:
            w_q, w_k, heads = module.to_q.weight, module.to_k.weight, module.heads
        w_qk = w_q.unflatten(0, (heads, -1)).mT @ w_k.unflatten(0, (heads, -1))
        total = total + 0.01 * w_qk.square().sum()
        if w_qk.shape[-1] == w_qk.shape[-2]:
            total = total + 0.02 * (w_qk.diagonal(dim1=-2, dim2=-1).sum(-1) - 1).square().sum()
    return total


def assert_trained(model, batch, loss=lambda output: output.square().mean()):
    """LocAteR's gradient is autograd's of the definition; three steps lower the penalty."""
    regulariser = LocAteR(model, scale_strength=0.01, mean_strength=0.02)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(dense_penalty(model), parameters, allow_unused=True)
    model.zero_grad()
    regulariser.add_gradient_()
    for parameter, gradient in zip(parameters, wanted, strict=True):
        if gradient is None or not gradient.any():
            assert parameter.grad is None or not parameter.grad.any()
        else:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    before, optimizer = float(regulariser.penalty().detach()), torch.optim.AdamW(parameters, lr=1e-2)
    regulariser.attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(**batch)).backward()
        optimizer.step()
    assert float(regulariser.penalty().detach()) < before


@pytest.mark.parametrize("name", READ)
def test_their_attention_is_read_and_proven(name):
    make, batch = READ[name]
    assert_read(built(make), batch)


@pytest.mark.parametrize("name", READ)
def test_their_attention_is_trained_with_locater(name):
    make, batch = READ[name]
    assert_trained(built(make), batch)


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_is_no_softmax_of_their_products_is_refused(name):
    make, why = REFUSED[name]
    with pytest.raises(LocaterError, match=why):
        attentions(built(make))


def test_what_the_model_gives_its_attention_is_seen():
    plain, rotary, alibi = (
        attentions(built(lambda more=more: Model(XAttention, **more)))[0]
        for more in ({}, {"rotary": True}, {"alibi": True})
    )
    assert plain.rope is None
    assert plain.position_bias is None
    assert rotary.rope is not None
    assert rotary.rope.interleaved
    assert alibi.position_bias is not None


def test_a_model_of_other_settings_is_not_read_as_the_one_before():
    """The settings are those of a part, not of the attention module itself."""
    caps = [
        attentions(built(lambda cap=cap: Model(lambda: XAttention(softclamp=cap))))[0].softcap
        for cap in (None, 20.0, 30.0)
    ]
    assert caps == [None, 20.0, 30.0]


def test_keys_of_another_width_have_a_scale_and_no_trace():
    table = scan(built(Crossed)).set_index("module")
    assert table.trace.notna()["attn1"].all()
    assert table.trace.isna()["attn2"].all()
    assert (table.scale > 0).all()
    assert (table.kind["attn2"] == "cross").all()


def test_part_of_a_model_that_nobody_can_call_is_refused_where_it_may_be_given_positions():
    class Unknown(Model):
        def forward(self, *, secret):
            return super().forward(secret["ids"])

    with pytest.raises(LocaterError, match="rotary_pos_emb is not known"):
        attentions(built(lambda: Unknown(XAttention, rotary=True)))
    assert len(attentions(built(lambda: Unknown(CausalSelfAttention)))) == 2


# ---------------------------------------------------------------------- the libraries themselves


def library(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except Exception as error:  # one that is installed, and does not go with this torch
            pytest.skip(f"{name} cannot be imported: {error}")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_flash": True},
        {"attn_qk_norm": True, "rotary_pos_emb": True},
        {"alibi_pos_bias": True},
        {"attn_softclamp_logits": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_x_transformers(options):
    x = library("x_transformers")
    layers = x.Decoder(dim=32, depth=2, heads=4, attn_dim_head=32, **options)
    model = built(lambda: x.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers))
    table = prove(model, IDS)
    assert len(table) == 2
    assert (table.difference <= CLOSE * table.range).all()
    assert_trained(model, IDS)


@pytest.mark.filterwarnings("ignore")
def test_a_unet_of_diffusers():
    unet = library("diffusers").UNet2DConditionModel
    model = built(
        lambda: unet(
            sample_size=8, layers_per_block=1, block_out_channels=(32,), down_block_types=("CrossAttnDownBlock2D",),
            up_block_types=("CrossAttnUpBlock2D",), cross_attention_dim=48, attention_head_dim=4, norm_num_groups=8,
        )
    )  # fmt: skip
    batch = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 5]), "encoder_hidden_states": WORDS}
    table = prove(model, batch)
    assert len(table) > 2
    assert (table.difference <= CLOSE * table.range).all()
    assert_trained(model, batch, lambda output: output.sample.square().mean())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_vision_transformer_of_timm(qk_norm):
    create = library("timm").create_model
    model = built(lambda: create("vit_tiny_patch16_224", depth=2, num_classes=3, img_size=32, qk_norm=qk_norm))
    table = prove(model, {"x": torch.randn(2, 3, 32, 32)})
    assert len(table) == 2
    assert (table.difference <= CLOSE * table.range).all()
