"""Interceptors of attention calls: several share a module, and removing them restores it."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import torch
from rivals import Joint, batch, loss_of, ready
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from locater import observe
from locater.control import QKClip, ZLoss
from locater.hooks import Interceptor, attention_sites, intercept
from own_attention import OwnAttention


@pytest.mark.parametrize("first", ["observer", "method"])
@pytest.mark.parametrize("last", ["observer", "method"])
def test_an_observer_and_a_method_leave_the_table_as_it_was_in_whatever_order(first, last):
    model, given = ready("llama"), batch("llama")
    model.set_attn_implementation("sdpa")
    before, hooks = dict(ALL_ATTENTION_FUNCTIONS._local_mapping), [len(m._forward_pre_hooks) for m in model.modules()]
    leave = {}
    come = {
        "observer": lambda: leave.update(observer=ExitStack()) or leave["observer"].enter_context(observe(model)),
        "method": lambda: leave.update(method=ExitStack()) or leave["method"].callback(ZLoss(0.1).apply(model).remove),
    }
    for name in (first, *({*come} - {first})):
        come[name]()
    loss_of(model, given).backward()
    for name in (*({*leave} - {last}), last):
        leave[name].close()
        loss_of(model, given)
    assert dict(ALL_ATTENTION_FUNCTIONS._local_mapping) == before
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks


def test_a_method_leaves_the_fast_path_of_torchs_encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, batch_first=True, dropout=0.0, dim_feedforward=24)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(3, 6, 16)
    with torch.inference_mode():
        plain = model(x)
    slow = model(x).detach()  # with gradients there is no fast path
    assert not torch.equal(slow, plain)
    handle = ZLoss(0.1).apply(model)
    with torch.inference_mode():
        assert torch.equal(model(x), plain)
    handle.remove()


@pytest.mark.parametrize("changes", [True, False])
def test_a_result_is_changed_by_interceptors_that_change_and_by_no_others(changes):
    torch.manual_seed(0)
    x, calls = torch.randn(2, 6, 16), []
    for model in (OwnAttention(), nn.MultiheadAttention(16, 4, batch_first=True)):
        inputs = (x,) if isinstance(model, OwnAttention) else (x, x, x)

        def output(model=model, inputs=inputs):
            result = model(*inputs)
            return result if isinstance(result, torch.Tensor) else result[0]

        plain = output()
        with ExitStack() as undo:
            wants = Interceptor(lambda _: True, lambda call, result: calls.append(call) or 0 * result, changes=changes)
            intercept(attention_sites(model), wants, undo)
            assert torch.equal(output(), plain) is not changes
            assert calls.pop().calls[0].q.shape == (2, 4, 6, 4)
        assert torch.equal(output(), plain)
        assert not calls


def test_a_module_that_threads_share_is_intercepted_in_each():
    """Torch's modes belong to a thread: what is begun in one is ended there."""
    torch.manual_seed(0)
    model, x = OwnAttention(), torch.randn(2, 6, 16)
    both_inside, left = threading.Barrier(2, timeout=20), []

    class Waits(nn.Linear):
        def forward(self, x):
            both_inside.wait()
            return super().forward(x)

    model.c_attn.__class__ = Waits

    def run():
        with torch.no_grad():
            model(x)
        left.append(torch.overrides._len_torch_function_stack())

    with observe(model) as seen:
        threads = [threading.Thread(target=run) for _ in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert left == [0, 0]
    assert not seen.table().empty


def test_a_call_that_belongs_to_no_module_is_let_through():
    model = ready("llama")
    q = torch.randn(1, 2, 4, 8)
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"](nn.Module(), q, q, q, None)[0]
    with observe(model) as seen:
        assert torch.equal(ALL_ATTENTION_FUNCTIONS["sdpa"](nn.Module(), q, q, q, None)[0], plain)
    assert seen.table().empty


@pytest.mark.parametrize("method", [ZLoss, QKClip, None])
@pytest.mark.parametrize("way", ["torch's", "torch's, masked", "sdpa", "joint"])
def test_a_batch_of_no_sequences_goes_through(method, way):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 2, batch_first=True, dim_feedforward=24)
    x, more = torch.randn(0, 6, 16 if way == "sdpa" else 12), {}
    model = {"sdpa": OwnAttention, "joint": Joint}.get(way, lambda: layer)()
    if way == "torch's, masked":
        more = {"src_mask": torch.ones(6, 6).triu(1).bool()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ExitStack() as undo:
        undo.enter_context(observe(model)) if method is None else method().apply(model, optimizer)
        result = model(x, **more)
        assert len(result) == 0
        result.sum().backward()
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
