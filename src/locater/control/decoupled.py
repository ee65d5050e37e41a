"""LocAteR beside the optimizer: a direct step on W_Q and W_K after each of its steps, as AdamW's decay is.

Through Adam, a penalty's gradient is divided by the size of the task's, so that a strength means something else at each
layer and step. Beside it, a step is learning rate × strength and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from locater.control._closed_form import projections, shapes
from locater.control._dense import gathered, is_sharded
from locater.control._parameters import spread, unwrapped
from locater.control.locater import Schedule
from locater.control.stacked import GROWTH, decoupled_step, growth_share, limited
from locater.errors import LocaterError
from locater.models import Attention, Projection, attentions
from locater.qk import QK

__all__ = ["DecoupledLocAteR"]

_STACK_BYTES = 64 << 20  # modules up to this size are worked on together: small ones wait for launches


class DecoupledLocAteR:
    """Holds the trace of every W_QK of `model`, and the scale of those that grow; needs no tuning.

    After each step of the optimizer, W_Q and W_K of every head make a step of learning rate × strength down

        share · tr(W_QKᵀW_QK) + (tr W_QK − target)²

    `share` is 0 while a head's scale is at most what it was when this was made, 1 from twice that on: where nothing
    grows, nothing is pressed; and no scale goes beyond four times its first, or, where that was small, beyond d_head (a
    logit's standard deviation of 1 between independent tokens), whatever the learning rate does. With
    `growing_only=False` share is 1 and there is no such end. `target`, 2 / (the logits' scale) unless given, is
    where the theory has tokens begin to localise: tr W_QK = 2 √d_head. Strengths from 1 to 10 do the same within
    seeds' spread (docs/arena.md). `schedule`, if given, multiplies the strength: a function of the number of steps
    taken, to let go at the end.

    Frozen parameters stay as they are; nothing is left at inference. Parameters in half precision round small steps
    away, as they do an optimizer's.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: float = 3.0,
        target: float | None = None,
        growing_only: bool = True,
        schedule: Schedule | None = None,
    ) -> None:
        if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 0 <= strength < math.inf:
            raise LocaterError(f"strength must be a finite number that is not negative, got {strength!r:.80}")
        if target is not None and not (isinstance(target, (int, float)) and abs(target) < math.inf):
            raise LocaterError(f"target must be a finite number, got {target!r:.80}")
        self.strength, self.target, self.growing_only, self.schedule = float(strength), target, growing_only, schedule
        self.step = 0
        self.attentions: list[Attention] = attentions(model)
        joint = [attention.module for attention in self.attentions if attention.query is None]
        if joint:
            raise LocaterError(f"{joint[0]} trains W_QK itself, not its factors: use LocAteR")
        self._first = {attention.module: _whole(attention).scale() for attention in self.attentions}
        self._handles: dict[int, RemovableHandle] = {}

    # ------------------------------------------------------------------ a step

    @torch.no_grad()
    def step_(self, learning_rate: float | Tensor, chosen: Callable[[Tensor], bool] | None = None) -> None:
        """One step on every head, or on the parameters that `chosen` picks."""
        size = learning_rate * self.strength * (1.0 if self.schedule is None else float(self.schedule(self.step)))
        for group in self._groups(chosen):
            self._step_together(group, size)

    def _groups(self, chosen: Callable[[Tensor], bool] | None) -> list[list[Attention]]:
        """Modules of one shape with something to move, up to a size; one that shares a parameter is alone."""
        kinds: dict[Any, list[Attention]] = {}
        for attention in self.attentions:
            tensors = [projection.tensor for projection in projections(attention)]
            moved = tuple(t.requires_grad and (chosen is None or chosen(t)) for t in tensors)
            if not any(moved):
                continue
            apart = is_sharded(tensors[0]) or not all(moved)
            kind = (shapes(attention), tensors[0].dtype, tensors[0].device, attention.scale)
            kinds.setdefault((*kind, attention.module if apart else "", moved), []).append(attention)
        groups = []
        for members in kinds.values():
            bytes_each = sum(projection.weight.numel() * 4 for projection in projections(members[0]))
            ids = [id(projection.tensor) for member in members for projection in (member.key,)]
            count = 1 if len(set(ids)) < len(ids) else max(1, _STACK_BYTES // (2 * bytes_each))
            groups += [members[start : start + count] for start in range(0, len(members), count)]
        return groups

    def _step_together(self, members: list[Attention], size: float | Tensor) -> None:
        wholes = [_whole(member) for member in members]
        wide = torch.promote_types(wholes[0].w_q.dtype, torch.float32)
        w_q, w_k = (torch.stack([getattr(qk, name) for qk in wholes]).to(wide) for name in ("w_q", "w_k"))
        qk = QK(w_q, w_k)  # (S, G, R, K, D) and (S, G, 1, K, D)
        step = torch.zeros(1, 1, 1, dtype=wide, device=w_q.device) + size
        press = step
        if self.growing_only:
            first = torch.stack([self._first[member.module].to(w_q.device, wide) for member in members])
            press = step * growth_share(qk, first)
        target = torch.full_like(step, 2 / members[0].scale if self.target is None else self.target)
        new_q, new_k = decoupled_step(qk, press, step, target)
        if self.growing_only:
            # weights that start small may grow to logits of ordinary size, a standard deviation of ½, first
            new_q, new_k = limited(QK(new_q, new_k), GROWTH * first.clamp(min=1 / (4 * members[0].scale ** 2)))
        for i, member in enumerate(members):
            assert member.query is not None
            for projection, old, new in ((member.query, w_q, new_q), (member.key, w_k, new_k)):
                if projection.tensor.requires_grad:
                    _set(projection, old[i], new[i])

    # ------------------------------------------------------------------ at work in a training loop

    def attach(self, optimizer: Optimizer) -> DecoupledLocAteR:
        """Runs a step after every step of `optimizer`, at its learning rates, on the parameters it holds.

        A step that GradScaler skips is skipped here too. Several optimizers: attach each.
        """
        optimizer = unwrapped(optimizer)

        def held(group: dict[str, Any]) -> Callable[[Tensor], bool]:
            ids = {id(parameter) for parameter in group["params"]}
            return lambda tensor: id(tensor) in ids

        tensors = [p.tensor for attention in self.attentions for p in projections(attention)]
        if not any(held(group)(t) for group in optimizer.param_groups for t in tensors if t.requires_grad):
            raise LocaterError(
                f"this {type(optimizer).__name__} holds none of the query and key weights of the model; "
                "attach LocAteR to the optimizer that trains them"
            )

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            del args, kwargs
            overflow = getattr(optimizer, "found_inf", None)
            for group in optimizer.param_groups:
                rate = group["lr"] if overflow is None else group["lr"] * (1 - overflow.float())
                self.step_(rate, held(group))
            self.step += 1

        if id(optimizer) in self._handles:  # attached twice, it acts once
            self._handles[id(optimizer)].remove()
        self._handles[id(optimizer)] = optimizer.register_step_post_hook(after_step)
        return self

    def detach(self) -> None:
        """Undoes every `attach`."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Trace, scale and its growth, averaged over the heads of each module: for logs."""
        values = {}
        for attention in self.attentions:
            qk = _whole(attention)
            values[f"{attention.module}/trace"] = float(qk.trace().mean())
            values[f"{attention.module}/scale"] = float(qk.scale().mean())
            first = self._first[attention.module].to(qk.w_q.device)
            values[f"{attention.module}/growth"] = float((qk.scale() / first).mean())
        return values

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on: the step, and every head's first scale."""
        return {"step": self.step, "first": {name: value.tolist() for name, value in self._first.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        first = state.get("first")
        if not isinstance(first, dict) or first.keys() != self._first.keys() or "step" not in state:
            raise LocaterError("this is not a state of DecoupledLocAteR for this model: its modules are others")
        made = {name: torch.tensor(first[name], dtype=value.dtype) for name, value in self._first.items()}
        wrong = [name for name, value in made.items() if value.shape != self._first[name].shape]
        if wrong:
            raise LocaterError(f"this is not a state of DecoupledLocAteR for this model: {wrong[0]} has other heads")
        self._first, self.step = made, int(state["step"])

    def __repr__(self) -> str:
        return f"DecoupledLocAteR({len(self.attentions)} attention modules, strength={self.strength:g})"


@torch.no_grad()
def _whole(attention: Attention) -> QK:
    """W_Q (G, R, K, D) and W_K (G, 1, K, D), of sharded parameters too; half precision as float32."""
    parts = []
    for projection in projections(attention):
        weight = projection.view(gathered(projection.tensor.detach()))
        parts.append(weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight)
    return QK(*parts)


def _set(projection: Projection, old: Tensor, new: Tensor) -> None:
    """Writes a weight in place; of a sharded one each rank its own part."""
    tensor = projection.tensor.detach()
    if not is_sharded(tensor):
        projection.view(tensor).copy_(new)
        return
    change = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    projection.view(change).copy_(new - old)
    tensor.add_(spread(change, tensor))
