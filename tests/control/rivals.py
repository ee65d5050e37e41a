"""What the tests of the rivals share: models ready to train, and what their attention hands to softmax."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn
from zoo import build, inputs

from locater.control import DecoupledLocAteRMethod, LocAteRMethod, QKClip, QKDecay, QKNorm, SigmaReparam, Softcap, ZLoss

METHODS = {
    "LocAteR": lambda: LocAteRMethod(scale_strength=0.01, mean_strength=0.01),
    "LocAteR, decoupled": lambda: DecoupledLocAteRMethod(change=1e-3),
    "QK-clip": lambda: QKClip(1.0),
    "QK weight decay": lambda: QKDecay(0.1),
    "QK-norm": QKNorm,
    "σReparam": SigmaReparam,
    "σReparam on all": lambda: SigmaReparam("all"),
    "softcap": lambda: Softcap(3.0),
    "attention z-loss": lambda: ZLoss(0.01),
}


def ready(name, seed=0, **changes):
    """In training mode, without dropout, in float64."""
    model = build(name, seed).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    for attribute, value in changes.items():
        setattr(model.config, attribute, value)
    return model


def batch(name, **more):
    given = {**inputs(name), **more}
    return {key: x.double() if x.is_floating_point() else x for key, x in given.items()}


def loss_of(model, given):
    output = model(**given)
    first = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return first.square().mean()


def one_step(model, optimizer, given):
    optimizer.zero_grad()
    loss = loss_of(model, given)
    loss.backward()
    optimizer.step()
    return loss.item()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def traces(model):
    """All that a method could leave behind in a model, but for its weights' values."""
    hooks = [
        (name, len(m._forward_hooks), len(m._forward_pre_hooks), type(m).__name__) for name, m in model.named_modules()
    ]
    return hooks, sorted(model.state_dict())


@contextmanager
def softmax_inputs():
    """Every (batch, heads, queries, keys) that softmax is given, with its graph."""
    seen, softmax, other = [], nn.functional.softmax, torch.softmax

    def spy(x, *args, **kwargs):
        if x.ndim >= 3:
            seen.append(x)
        return softmax(x, *args, **kwargs)

    nn.functional.softmax = torch.softmax = spy
    try:
        yield seen
    finally:
        nn.functional.softmax, torch.softmax = softmax, other


class ByHand(nn.Module):
    """A user's own attention, grouped, with products of three dimensions; the registry knows its names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.num_kv_heads, self.scale = 4, 2, 0.25
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(12, 16), nn.Linear(12, 8), nn.Linear(12, 16)

    def forward(self, x):
        b, t, _ = x.shape
        q, v = (layer(x).view(b, t, 4, 4).transpose(1, 2).reshape(-1, t, 4) for layer in (self.q_proj, self.v_proj))
        k = self.k_proj(x).view(b, t, 2, 4).transpose(1, 2).repeat_interleave(2, 1).reshape(-1, t, 4)
        p = torch.softmax(self.scale * torch.bmm(q, k.transpose(1, 2)), dim=-1)
        return torch.bmm(p, v)


class Joint(nn.Module):
    """The paper's Section 2: W_QK of three heads trained itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w_qk = nn.Parameter(torch.randn(3, 12, 12))
        self.temperature = 12**0.5

    def forward(self, x):
        p = torch.softmax(torch.einsum("btd,hde,bse->bhts", x, self.w_qk, x) / self.temperature, -1)
        return p @ x[:, None]


def stand_in_for_flash(monkeypatch, model):
    """Puts a model on flash attention, computed here as its functions read their arguments; gives the caps told."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    caps = []

    def flash(module, query, key, value, attention_mask, scaling=None, softcap=None, position_ids=None, **_):
        del module
        caps.append(softcap)
        groups, t = query.shape[1] // key.shape[1], query.shape[2]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        s = query @ key.mT * scaling
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        seen = torch.ones(t, t, dtype=torch.bool).tril()
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None].bool()
        elif position_ids is not None and len(query) == 1:  # sequences packed into one
            number = (position_ids[0] == 0).cumsum(0)
            seen = seen & (number[:, None] == number)
        p = s.masked_fill(~seen, -1e30).softmax(-1)
        return (p @ value).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", flash)
    model.config._attn_implementation = "flash_attention_2"
    return caps
