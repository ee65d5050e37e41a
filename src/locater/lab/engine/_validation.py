"""What the members of a stack do with the validation text: loss, entropy, largest logit and ρ.

Legend: E stacked models, B blocks, T tokens a block, N = B·T, H heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from locater.lab.data import PAD
from locater.lab.engine.loss import losses
from locater.lab.engine.model import Probe, embed, hidden_states
from locater.measure import AttentionStatistics, attention_statistics, rank_residual

if TYPE_CHECKING:
    from locater.lab.engine.stack import Stack


_EVALUATED_TOKENS = 1 << 18  # of all members together, at a time


def valid_loss(stack: Stack) -> Tensor:
    """(E,): the mean over the tokens of the validation text."""
    total = torch.zeros(len(stack), dtype=torch.float64, device=stack.device)
    tokens = 0
    count = min(stack.valid.count, stack.config.valid_blocks or stack.valid.count)
    size = max(1, _EVALUATED_TOKENS // (len(stack) * stack.config.model.tokens))
    for start in range(0, count, size):
        blocks = torch.arange(start, min(start + size, count), device=stack.device)
        x, targets = _forward(stack, blocks)
        counted = targets != PAD
        total += (losses(x, stack.output.low, targets) * counted).sum(1, dtype=torch.float64)
        tokens += int(counted[0].sum())
    return total / tokens


def attention_metrics(stack: Stack) -> dict[str, Tensor]:
    """Entropy, largest logit and ρ on the first whole blocks of the validation text."""
    model = stack.config.model
    heads: dict[str, list[Tensor]] = {"entropy": [], "max_logit": [], "rho": []}
    residual: list[Tensor] = []
    count = min(stack.config.probe_blocks, stack.valid.whole)

    def record(layer: int, x: Tensor, _: Tensor, q: Tensor, k: Tensor) -> None:
        residual.append(rank_residual(x.unflatten(1, (-1, model.tokens))).mean(1))
        if layer == model.layers:
            return
        # members beside heads: both are apart from the batch
        q, k = (a.transpose(0, 1).flatten(1, 2) for a in (q, k))  # (B, E·H, T, ·)
        found = _statistics(stack, q, k)
        by_member = (len(stack), model.heads)
        heads["entropy"].append(found.entropy.mean((0, 2)).view(by_member))
        heads["max_logit"].append(found.max_logit.amax((0, 2)).view(by_member))
        assert found.rho is not None
        heads["rho"].append(found.rho.view(*by_member, -1))

    _forward(stack, torch.arange(count, device=stack.device), record)
    if not stack.config.details:
        del heads["rho"]
    return {name: torch.stack(parts, dim=1) for name, parts in heads.items()} | {
        "rank_residual": torch.stack(residual, dim=1)
    }


def _forward(stack: Stack, blocks: Tensor, own: Probe | None = None) -> tuple[Tensor, Tensor]:
    """Hidden states and targets of the same validation blocks for all members."""
    inputs, targets = stack.valid(blocks.expand(len(stack), -1))
    low = stack.body(stack.segments["body"].low)
    embedded = embed(stack.segments["embedding"].low, inputs)
    probe, method = stack._recorders.probe(inputs, own), stack.method.at_inference()
    return hidden_states(low, embedded, stack.config.model, probe=probe, method=method), targets


def _statistics(stack: Stack, q: Tensor, k: Tensor) -> AttentionStatistics:
    """Of queries and keys (B, E·H, T, ·)."""
    scale, heads = stack.config.model.head_width**-0.5, stack.config.model.heads
    caps = [stack.method.cap(e) for e in range(len(stack))]
    if caps[0] is None:
        return attention_statistics(q, k, causal=True, scale=scale)
    parts = [
        attention_statistics(*(x[:, e * heads : (e + 1) * heads] for x in (q, k)), scale=scale, softcap=cap)
        for e, cap in enumerate(caps)
    ]
    entropy, top, lse = (torch.cat(x, dim=1) for x in list(zip(*parts, strict=True))[:3])
    return AttentionStatistics(entropy, top, lse, torch.cat([part.rho for part in parts if part.rho is not None]))
