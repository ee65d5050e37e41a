"""E models in training as one program: their state, an update of all of them, and a record of each.

Everything random is a function of a member's seed, the step and the place; nothing is carried from step to step but
the tensors in `state()`. So a member does not notice its neighbours, and a run that goes on from a checkpoint is the
run that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from locater.control import penalty_gradient
from locater.errors import LocaterError
from locater.lab.config import Config, Member
from locater.lab.data import PAD, Corpus
from locater.lab.engine._recorders import Begin, Recorders
from locater.lab.engine._validation import attention_metrics, valid_loss
from locater.lab.engine.heads import query_key_matrix, split_qkv
from locater.lab.engine.interventions import method_for
from locater.lab.engine.loss import loss_and_gradient
from locater.lab.engine.model import (
    Dropout,
    add_rows_,
    body_shapes,
    dropout_sites,
    embed,
    hidden_states,
    initial,
)
from locater.lab.engine.optimizer import AdamW, Segment
from locater.qk import QK

__all__ = ["Stack", "TokenBlocks", "check_sizes"]

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE, _GROWTH_INTERVAL = 128.0, 2_000  # of the loss under fp16
_WARM_UP = 2  # updates on a GPU before one is recorded: kernels are compiled, workspaces made


def check_sizes(config: Config, corpus: Corpus) -> None:
    """Whether the text is long enough for the configuration."""
    tokens = config.model.tokens
    if corpus.blocks("train", tokens) < config.batch:
        raise LocaterError(
            f"a batch of {config.batch} blocks of {tokens} tokens is larger than the training text, "
            f"which has {corpus.blocks('train', tokens)}; choose a smaller batch"
        )
    if len(corpus.splits["valid"]) < tokens:
        raise LocaterError(f"the validation text is shorter than one block of {tokens} tokens")


class TokenBlocks:
    """A split as blocks of T tokens on the training device; block n, one past the last, is empty."""

    def __init__(self, stream: np.ndarray[Any, Any], tokens: int, device: torch.device) -> None:
        self.tokens = tokens
        self.count = -(-len(stream) // tokens)
        self.whole = len(stream) // tokens  # those that are full
        padded = np.full((self.count + 1) * tokens + 1, PAD, dtype=np.int64)
        padded[0] = stream[-1]  # what stands before the first token (`Corpus.batch`)
        padded[1 : len(stream) + 1] = stream
        self._stream = torch.from_numpy(padded).to(device)
        self._within = torch.arange(tokens, device=device)

    def __call__(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets (E, N) of blocks (E, B): each input stands before its target."""
        at = (blocks[..., None] * self.tokens + self._within).flatten(1)
        return self._stream[at], self._stream[at + 1]


class Stack:
    """The members of a run on one device."""

    def __init__(self, config: Config, members: Sequence[Member], corpus: Corpus, device: torch.device) -> None:
        self.config, self.members, self.device = config, tuple(members), device
        if config.precision == "fp64" and device.type != "cpu":
            raise LocaterError(f"fp64 is for comparisons on a CPU, not on {device}: train in fp32, bf16 or fp16")
        check_sizes(config, corpus)
        self._wide = torch.promote_types(_DTYPES[config.precision], torch.float32)  # what is summed up and updated
        self.train, self.valid = (
            TokenBlocks(corpus.splits[split], config.model.tokens, device) for split in ("train", "valid")
        )
        self.segments = self._initial_segments(len(corpus.words))
        self.method = method_for(config, self.members, self._settings("strength"))
        self.method.start(self.body(self.segments["body"].value))
        self._copy_low()
        rates = self._settings("learning_rate"), self._settings("decay")
        self._optimizer = AdamW(list(self.segments.values()), *rates)
        self._penalty = [self._settings(name)[:, None] for name in ("scale_strength", "mean_strength", "target")]
        self._regularised = any(m.scale_strength or m.mean_strength for m in self.members)
        self.seeds = torch.tensor([m.seed for m in self.members], device=device)
        self._start_counting()
        self._batches = -(-self.train.count // config.batch)  # in an epoch
        self._epoch, self._order = -1, self._zeros(torch.int64)[:, None].repeat(1, self._batches * config.batch)
        self._within = torch.arange(config.batch, device=device)
        self._recorders = Recorders(config.model)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = 0
        self._shuffle(0)

    def _initial_segments(self, words: int) -> dict[str, Segment]:
        """Every member's parameters as its seed draws them: the tables, and all others in one tensor, the body."""
        shape, dtype = self.config.model, _DTYPES[self.config.precision]
        starts = [initial(shape, words, member.seed) for member in self.members]
        stacked = {name: torch.stack([start[name] for start in starts]).to(self._wide) for name in starts[0]}
        body = torch.cat([stacked[name].flatten(1) for name in body_shapes(shape)], dim=1)
        # padded so that every member's row starts where wide loads can
        stacked["body"] = functional.pad(body, (0, -body.shape[1] % 16))
        names = [name for name in ("embedding", "output", "body") if name in stacked]
        return {name: Segment.of(stacked.pop(name).to(self.device), dtype) for name in names}

    def _settings(self, name: str) -> Tensor:
        """One of the members' numbers, (E,)."""
        return torch.tensor([getattr(m, name) for m in self.members], dtype=self._wide, device=self.device)

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(self.members), dtype=dtype, device=self.device)

    def _start_counting(self) -> None:
        """What is carried from step to step beside the parameters, (E,) each."""
        self.step = 0
        self._clock = torch.zeros((), dtype=torch.int64, device=self.device)  # the same, where the device can read it
        self.losses = self._zeros(self._wide)  # of the last batch
        self.updates = self._zeros(torch.int64)  # skipped ones do not count
        self.broke_at = self._zeros(torch.int64) - 1  # the step at which the loss was not finite
        self.loss_scale = self._zeros(self._wide) + (_FIRST_SCALE if self.config.precision == "fp16" else 1.0)
        self.good_steps = self._zeros(torch.int64)  # since the loss scale changed
        self.loss_sum = self._zeros(torch.float64)  # since the last record
        self.loss_count = self._zeros(torch.int64)
        self._finite = self._zeros(torch.bool)

    def __len__(self) -> int:
        return len(self.members)

    # ------------------------------------------------------------------ parameters

    def body(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a (E, P) tensor, one a parameter."""
        shapes = body_shapes(self.config.model)
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        parts = flat.split([*sizes, flat.shape[1] - sum(sizes)], dim=1)
        return {name: part.unflatten(1, shape) for part, (name, shape) in zip(parts, shapes.items(), strict=False)}

    @property
    def output(self) -> Segment:
        return self.segments.get("output", self.segments["embedding"])

    def parameters(self, e: int) -> dict[str, Tensor]:
        """One member's, in float32 (or float64), as `initial` names them."""
        tables = {name: s.value[e] for name, s in self.segments.items() if name != "body"}
        return tables | {name: value[e] for name, value in self.body(self.segments["body"].value).items()}

    # ------------------------------------------------------------------ being observed

    @property
    def attention_modules(self) -> tuple[str, ...]:
        """What `locater.observe` calls the attention of each layer."""
        return tuple(f"layers.{i}" for i in range(self.config.model.layers))

    def watch(self, begin: Begin) -> Callable[[], None]:
        """Records every forward for `locater.observe`; gives what ends it. Until then no update is replayed."""
        return self._recorders.add(begin)

    # ------------------------------------------------------------------ an update

    def advance(self) -> None:
        """One update of every member that has not broken.

        On a GPU it is recorded once and then replayed: some hundred small operations would wait for their launches.
        """
        self._shuffle(self.step // self._batches)
        if self._graph is not None and not self._recorders:  # what is replayed is not recorded
            self._graph.replay()
        elif self.device.type == "cuda" and self._warm >= _WARM_UP and not self._recorders:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._advance()
            self._graph.replay()  # recording does nothing
        else:
            self._warm += 1
            self._advance()
        self.step += 1

    def _advance(self) -> None:
        """What happens on the device; reads the step from its clock and writes to tensors that stay where they are."""
        self.forward_backward()
        self.update()

    def forward_backward(self) -> Tensor:
        """Fills the gradients of the loss (the penalty not included); gives the losses (E,)."""
        model, config = self.config.model, self.config
        inputs, targets = self.train(self._blocks())
        counted = targets != PAD
        weights = counted.to(self._wide) / counted.sum(1, keepdim=True)
        drop = Dropout(model.dropout, self.seeds, self._clock, dropout_sites(model)) if model.dropout else None
        table = self.segments["embedding"]
        low = self.body(self.segments["body"].low)
        embedded = embed(table.low, inputs).requires_grad_()
        for value in low.values():
            value.requires_grad_()
        self.method.refresh(self.body(self.segments["body"].value))
        self.method.begin(counted)
        with torch.enable_grad():
            x = hidden_states(low, embedded, model, drop, self._recorders.probe(inputs), self.method)
        found = loss_and_gradient(x.detach(), self.output.low, targets, weights, self.output.gradient)
        up = found.x if config.precision != "fp16" else found.x * self.loss_scale[:, None, None]
        of_embedded, *of_body = torch.autograd.grad(x, [embedded, *low.values()], up.to(x.dtype))
        gradient = self.segments["body"].gradient
        together = torch.cat([part.flatten(1) for part in of_body], dim=1)
        gradient[:, : together.shape[1]] = together
        rows = of_embedded.to(self._wide)
        if config.precision == "fp16":
            gradient /= self.loss_scale[:, None]
            rows = rows / self.loss_scale[:, None, None]
        if "output" in self.segments:
            table.gradient.zero_()
        add_rows_(table.gradient, inputs, rows)
        # a sum is finite only if all are; the output table's gradient is then finite too, products of finite numbers,
        # and the body's is looked at when the penalty has been added
        self._finite.copy_(torch.isfinite(rows.sum((1, 2))))
        return self.losses.copy_((found.losses * weights).sum(1))

    @torch.no_grad()
    def update(self) -> None:
        """Adds the penalty's gradient and updates; a member whose numbers are not finite skips, or breaks."""
        if self.config.clip is not None:
            self._clip_gradient(self.config.clip)
        factor = self._strength_factor()
        if self._regularised:
            self._add_penalty_gradient(factor)
        rate = self._optimizer.learning_rate * self._schedule()
        self._clock += 1
        finite = torch.isfinite(self.losses) & self._finite & torch.isfinite(self.segments["body"].gradient.sum(1))
        intact = self.broke_at < 0
        if self.config.precision == "fp16":
            # an overflow is the loss scale's, and only a scale that cannot fall further is the model's
            broken = intact & ~finite & (self.loss_scale < 1e-4)
            self._update_loss_scale(finite)
        else:
            broken = intact & ~finite
        self.broke_at.copy_(torch.where(broken, self._clock, self.broke_at))
        active = finite & (self.broke_at < 0)
        self.updates += active
        self.loss_sum += torch.where(active, self.losses, 0).double()
        self.loss_count += active
        body, rate = self.segments["body"], rate * active
        values = self.body(body.value)
        self.method.before_update(values, rate, self._optimizer.decay, factor)
        self._optimizer.update(self.updates, active, rate)
        if self.method.after_update(values, rate, factor) and body.low is not body.value:
            low = self.body(body.low)
            for layer in range(self.config.model.layers):
                for kind in ("weight", "bias"):
                    name = f"layers.{layer}.qkv.{kind}"
                    low[name].copy_(values[name])

    def _clip_gradient(self, most: float) -> None:
        gradients = [s.gradient.flatten(1) for s in self.segments.values()]
        norm = torch.stack([torch.linalg.vector_norm(g, dim=1) for g in gradients]).square().sum(0).sqrt()
        factor = (most / norm).clamp(max=1)[:, None]
        for gradient in gradients:
            gradient *= factor

    def _schedule(self) -> Tensor:
        """What the learning rates are multiplied by at the update the clock is at."""
        config = self.config
        at = (self._clock + 1).to(self._wide)
        whole = max(1, config.steps - config.warmup)
        done = ((at - config.warmup) / whole).clamp(0, 1)
        cosine = config.final_rate + (1 - config.final_rate) * (1 + torch.cos(math.pi * done)) / 2
        return cosine * (at / config.warmup).clamp(max=1) if config.warmup else cosine

    def _update_loss_scale(self, finite: Tensor) -> None:
        counted = torch.where(finite, self.good_steps + 1, 0)
        grow = counted >= _GROWTH_INTERVAL
        self.good_steps.copy_(torch.where(grow, 0, counted))
        self.loss_scale *= torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)

    def _strength_factor(self) -> Tensor:
        """1, and down to 0 over the last part of the training, in which penalties and methods are released."""
        left = (self.config.steps - self._clock.to(self._wide)) / self.config.steps
        return (left / self.config.release).clamp(max=1) if self.config.release else torch.ones_like(left)

    def _add_penalty_gradient(self, factor: Tensor) -> None:
        model = self.config.model
        scale, mean, target = self._penalty
        body = self.segments["body"]
        values, gradients = self.body(body.value), self.body(body.gradient)
        for layer in range(model.layers):
            of_q, of_k = penalty_gradient(query_key_matrix(values, layer, model), scale * factor, mean * factor, target)
            of_q, of_k = self.method.pull(layer, of_q, of_k, self._clock)
            at = f"layers.{layer}."
            if model.joint_qk:
                gradients[at + "qk.weight"] += of_k
            else:
                to_q, to_k, _ = split_qkv(gradients[at + "qkv.weight"], model)
                to_q += of_q
                to_k += of_k

    def _shuffle(self, epoch: int) -> None:
        """Every epoch has an order of its own, for each member; the last batch is filled up with empty blocks."""
        if epoch == self._epoch:
            return
        order = np.full(self._order.shape, self.train.count)
        for e, member in enumerate(self.members):
            order[e, : self.train.count] = np.random.default_rng([member.seed, epoch]).permutation(self.train.count)
        self._epoch = epoch
        self._order.copy_(torch.from_numpy(order))

    def _blocks(self) -> Tensor:
        """(E, B): the blocks each member takes now."""
        return self._order.index_select(1, self._clock % self._batches * self.config.batch + self._within)

    # ------------------------------------------------------------------ measuring

    @torch.no_grad()
    def measure(self) -> list[dict[str, Any]]:
        """A record of every member, as `records` describes it; the mean of the training loss starts anew."""
        columns = {"valid_loss": valid_loss(self)} | self._spectrum() | attention_metrics(self)
        broke_at, count = self.broke_at.tolist(), self.loss_count.tolist()
        train = (self.loss_sum / self.loss_count).tolist()
        self.loss_sum.zero_()
        self.loss_count.zero_()
        rows: list[dict[str, Any]] = []
        for e, member in enumerate(self.members):
            row: dict[str, Any] = {"step": self.step, "member": member.name}
            row["train_loss"] = _rounded(train[e]) if count[e] else None
            row |= {name: _rounded(value[e].tolist()) for name, value in columns.items()}
            loss = row["valid_loss"]
            row["perplexity"] = None if loss is None else _rounded(float(np.exp(loss)))
            if (temperatures := self.method.temperatures(e)) is not None:
                row["temperature"] = _rounded(temperatures.tolist())
            if broke_at[e] >= 0:
                row["broke_at"] = broke_at[e]
            rows.append(row)
        return rows

    def _spectrum(self) -> dict[str, Tensor]:
        """Traces of W_QK, (E, L, H)."""
        values = self.method.at_inference().weights(self.body(self.segments["body"].value))
        layers = [query_key_matrix(values, i, self.config.model) for i in range(self.config.model.layers)]
        found = {
            name: torch.stack([getattr(qk, name)() for qk in layers], dim=1)
            for name in ("trace", "scale", "trace_square")
        }
        if self.config.details and self.step == self.config.steps:
            # the whole spectrum once, at the end: (E, L, H, K, 2), real and imaginary
            broken = ~torch.isfinite(self.segments["body"].value.sum(1))  # these have none
            whole = [QK(*(w.masked_fill(broken[:, None, None, None], 0) for w in (qk.w_q, qk.w_k))) for qk in layers]
            found["eigenvalues"] = torch.view_as_real(torch.stack([qk.eigenvalues() for qk in whole], dim=1))
            found["eigenvalues"][broken.to(found["eigenvalues"].device)] = torch.nan
        return found

    # ------------------------------------------------------------------ going on

    _COUNTERS = ("updates", "broke_at", "loss_scale", "good_steps", "loss_sum", "loss_count")

    def state(self) -> dict[str, Tensor]:
        """All that is carried from step to step."""
        tensors = {f"{name}.{key}": value for name, s in self.segments.items() for key, value in s.state().items()}
        tensors |= {f"method.{name}": value for name, value in self.method.state().items()}
        return tensors | {name: getattr(self, name) for name in self._COUNTERS} | {"step": torch.tensor(self.step)}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Takes what `state` gave, all of it or nothing."""
        own = self.state()
        wrong = [name for name in own if name not in state or state[name].shape != own[name].shape]
        if wrong:
            found = tuple(state[wrong[0]].shape) if wrong[0] in state else "nothing"
            raise LocaterError(
                f"the checkpoint does not fit the run: {wrong[0]} should be {tuple(own[wrong[0]].shape)}, it is {found}"
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.step = int(state["step"])
        self._clock.fill_(self.step)
        self._copy_low()

    def _copy_low(self) -> None:
        for segment in self.segments.values():
            if segment.low is not segment.value:
                segment.low.copy_(segment.value)


def _rounded(value: Any) -> Any:
    """Seven significant digits, which is what float32 has; None for what JSON cannot hold."""
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.7g}") if np.isfinite(value) else None
