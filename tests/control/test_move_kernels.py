"""The kernels that read and write weights for a rule, against the same in plain PyTorch; and steps made with them.

Without a GPU they run in Triton's interpreter, as `interpreter` says.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from layouts import fused, rows, transposed, unaligned

from interpreter import DEVICE, ON_GPU, runs
from locater.control import DecoupledLocAteR, _moves
from locater.control._move_kernels import Modules
from locater.control.grams import Move
from locater.control.heads import Heads
from locater.models import Norm, attentions
from locater.models.twin import randomise
from locater.qk import QK

pytest.importorskip("triton")

# TF32 cuts both factors off after 10 bits, in the product and in what it is made of: 4 · 2^-10 of the sum of the
# magnitudes. The interpreter multiplies in float32.
CLOSE = 2.0**-8 if ON_GPU else 1e-5


class Case:
    """Modules of one shape, as the kernels and as PyTorch see them."""

    def __init__(self, layout, groups, heads, k, d, *, norm=None, dtype=torch.float32, modules=2):
        torch.manual_seed(0)
        stored = [layout(groups, heads, k, d, dtype=dtype, device=DEVICE) for _ in range(modules)]
        self.w_q = [view(query, key) for query, key, view, _ in stored]
        self.w_k = [view(query, key) for query, key, _, view in stored]
        self.stored = [x for query, key, *_ in stored for x in (query, key)]
        self.norms = [] if norm is None else [norm(d) for _ in range(modules)]

    def modules(self):
        made = Modules.of(self.w_q, self.w_k, self.norms)
        assert made is not None
        return made

    def heads(self):
        """In float64."""
        norm = None
        if self.norms:
            gain, bias = (
                None if x[0] is None else torch.stack(x).double()[:, None, None, None]
                for x in ([n.gain for n in self.norms], [n.bias for n in self.norms])
            )
            norm = Norm(gain, 0.0, self.norms[0].centred, bias)
        return Heads(QK(torch.stack(self.w_q).double(), torch.stack(self.w_k).double()), 1.0, norm=norm)


def rms(d):
    return Norm(0.3 * torch.randn(d, device=DEVICE), 1e-6, base=1.0)


def layer(d):
    return Norm(1 + 0.3 * torch.randn(d, device=DEVICE), 1e-6, True, torch.randn(d, device=DEVICE))


def close(found, wanted, tolerance=CLOSE):
    assert (found.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


@runs
@pytest.mark.parametrize("norm", [None, rms, layer])
@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize(
    ("layout", "shape"), [(rows, (2, 1, 16, 40)), (transposed, (1, 1, 24, 40)), (fused, (1, 3, 16, 33))]
)
def test_grams_are_the_products_of_the_weights(layout, shape, pulled, norm):
    case = Case(layout, *shape, norm=norm)
    found = case.modules().grams((None, None), None, pulled=pulled)
    wanted = case.heads().grams(pulled=pulled)
    for one, other in [
        (found.q, wanted.q), (found.k, wanted.k), (found.trace, wanted.trace),
        *zip(found.folded, wanted.folded, strict=True),
        *([(found.cross, wanted.cross)] if pulled else []),
        *([pair for pair in zip(found.shifts, wanted.shifts, strict=True) if norm is layer]),
    ]:  # fmt: skip
        close(one, other)
    close(found.effective_scale(), wanted.effective_scale())


@runs
@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize(
    ("layout", "shape"),
    [(rows, (2, 1, 16, 40)), (transposed, (1, 1, 24, 70)), (fused, (1, 3, 16, 33)), (unaligned, (1, 2, 32, 40))],
)
def test_a_move_changes_the_weights_that_are_trained_and_nothing_else(layout, shape, pulled, trained):
    case, (groups, heads, k, _) = Case(layout, *shape), shape
    before, old = [x.clone() for x in case.stored], case.heads()
    was_q, was_k = ([x.clone() for x in views] for views in (case.w_q, case.w_k))
    shrink = tuple(0.1 * torch.randn(2, groups, n, k, k, device=DEVICE) for n in (heads, 1))
    shrink = tuple(x + x.mT for x in shrink)
    pull = tuple(torch.randn(2, groups, heads, device=DEVICE) for _ in range(2)) if pulled else None
    factors = torch.rand(2, groups, heads, device=DEVICE), torch.rand(2, groups, 1, device=DEVICE)
    shrunk = torch.ones(1, 1, 1, dtype=torch.bool, device=DEVICE)
    move = Move(shrink, pull, shrunk, factors)
    case.modules().move_(move, trained)
    wide = Move(*(None if x is None else tuple(y.double() for y in x) for x in (shrink, pull)), shrunk, factors)
    wanted = old.moved(wide).qk
    for found, want, is_trained, was in (
        (case.w_q, wanted.w_q, trained[0], old.qk.w_q), (case.w_k, wanted.w_k, trained[1], old.qk.w_k),
    ):  # fmt: skip
        close(torch.stack(found), want if is_trained else was)
    for views in (case.w_q, case.w_k):  # all else is as it was
        for view in views:
            view.fill_(0.0)
    for view, old_view in zip((*case.w_q, *case.w_k), (*was_q, *was_k), strict=True):
        view.copy_(old_view)
    assert all(torch.equal(after, value) for after, value in zip(case.stored, before, strict=True))


@runs
def test_heads_that_do_not_move_are_not_written():
    case = Case(rows, 2, 1, 16, 40)
    before = [x.clone() for x in case.stored]
    shrink = tuple(torch.zeros(2, 2, 1, 16, 16, device=DEVICE) for _ in range(2))
    ones = tuple(torch.ones(2, 2, 1, device=DEVICE) for _ in range(2))
    case.modules().move_(Move(shrink, None, torch.zeros(1, 1, 1, dtype=torch.bool, device=DEVICE), ones), (True, True))
    assert all(torch.equal(x, y) for x, y in zip(case.stored, before, strict=True))


LAYERS, STEPS = (2, 4) if ON_GPU else (1, 1)  # the first step is no replay; the interpreter takes its time
WIDE = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 50,
}
MODELS = {
    "gpt2": lambda: tf.GPT2Model(tf.GPT2Config(n_embd=64, n_layer=LAYERS, n_head=4, n_positions=32, vocab_size=50)),
    "llama": lambda: tf.LlamaModel(tf.LlamaConfig(**WIDE, num_key_value_heads=2)),
    "bert": lambda: tf.BertModel(tf.BertConfig(**WIDE)),
    "gemma": lambda: tf.GemmaModel(tf.GemmaConfig(**WIDE, num_key_value_heads=1, head_dim=24)),
    "opt": lambda: tf.OPTModel(
        tf.OPTConfig(
            hidden_size=64, word_embed_proj_dim=64, num_hidden_layers=LAYERS, num_attention_heads=4, ffn_dim=32,
            vocab_size=50,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("target", [None, 2.0])
@pytest.mark.parametrize("family", MODELS)
def test_steps_by_kernels_are_the_steps_of_pytorch(family, target, monkeypatch, request):
    """Of a model whose heads have grown, so that they are shrunk, limited and, without RoPE, pulled."""
    torch.manual_seed(0)
    plain = MODELS[family]().to(DEVICE)
    randomise(plain, seed=1)  # gains and biases too
    other = copy.deepcopy(plain)
    regs = [DecoupledLocAteR(model, target=target, growing_only=target is None) for model in (plain, other)]
    start = copy.deepcopy(plain.state_dict())
    for model in (plain, other):
        with torch.no_grad():
            for attention in attentions(model):
                attention.query.weight.mul_(4.0)
    with monkeypatch.context() as patch:
        patch.setattr(_moves, "available", lambda _: False)
        for _ in range(STEPS):
            regs[0].step_(1e-2)
    request.getfixturevalue("kernels")
    ready, made = [], _moves.MovedGroup.on_device
    monkeypatch.setattr(_moves.MovedGroup, "on_device", lambda *args: ready.append(made(*args)) or ready[-1])
    for _ in range(STEPS):
        regs[1].step_(1e-2)
    shared_pull = target is not None and attentions(plain)[0].query.shape[1] > 1
    assert [work is None for work in ready] == [shared_pull] * STEPS
    found = other.state_dict()
    for name, one in plain.state_dict().items():
        moved = max(float((one - start[name]).abs().max()), 1e-3)
        assert (found[name] - one).abs().max() <= (0.02 if ON_GPU else 1e-4) * moved, name  # of what the steps change


@runs
def test_shards_are_left_to_pytorch(monkeypatch):
    """A tensor that wraps others has no address."""
    reg = DecoupledLocAteR(MODELS["opt"]().to(DEVICE))
    group = _moves.MovedGroup(reg.attentions, (0, 0), (0, 0))
    step = _moves.Step(reg.rule, 1.0, (True, True), (True, True), True)
    assert group.on_device(step, reg._initial) is not None
    monkeypatch.setattr(_moves, "is_sharded", lambda _: True)
    monkeypatch.setattr(_moves, "_stored", lambda _: pytest.fail("asked for addresses"))
    assert group.on_device(step, reg._initial) is None
