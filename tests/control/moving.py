"""What tests of `DecoupledLocAteR` share: steps of any size, and what they do to logits."""

from __future__ import annotations

import torch
from torch import nn

from locater.models import attentions


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def spread_of(logits):
    """The standard deviation of each query's logits over the keys up to it (…, n, n), pair by pair."""
    total, pairs = 0.0, 0
    for row in range(1, logits.shape[-1]):
        seen = logits[..., row, : row + 1].double()
        total = total + (seen - seen.mean(-1, keepdim=True)).square().sum(-1)
        pairs += row + 1
    return (total / pairs).mean(-1).sqrt()


def ids_of(model, batch=4, tokens=12):
    random = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (batch, tokens), generator=random)


def run(model, tokens=12):
    """A training forward, so that states are known."""
    ids = ids_of(model, tokens=tokens)
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    return ids


@torch.no_grad()
def sampled_logits(reg, attention):
    """(B, heads, n, n), on the states that entered last."""
    states, positions, _ = reg._states.of(attention)
    return attention.logits(states, positions=(positions, positions))


@torch.no_grad()
def moved(model, size, seed=0):
    """The gradients of SGD with a rate of 1 that moves every query and key weight by `size` at random."""
    random = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for attention in attentions(model):
        for one in (attention.query, attention.key):
            one.view(one.tensor.grad).copy_(size * torch.randn(one.shape, generator=random))


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.scale = 2, 0.5
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q, k = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q_proj, self.k_proj))
        return (self.scale * q @ k.mT).softmax(-1)
