"""What runs around an optimizer's step, whatever the optimizer's class makes of it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from locater.control._steps import around_step


class Inherited(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class InheritedTwice(Inherited):
    def step(self, closure=None):
        return super().step(closure)


class Failing(Inherited):
    fails = True

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise RuntimeError("out of luck")


def parameter():
    made = torch.nn.Parameter(torch.ones(2))
    made.grad = torch.ones(2)
    return made


def watched(optimizer, **settings):
    ran = []
    around_step(
        optimizer, ExitStack(), before=lambda: ran.append("before"), after=lambda: ran.append("after"), **settings
    )
    return ran


@pytest.mark.parametrize("kind", [torch.optim.SGD, Inherited, InheritedTwice])
def test_a_step_that_calls_the_one_it_inherits_is_one_step(kind):
    torch.optim.SGD([parameter()], lr=1.0)  # so that torch runs hooks around its steps, too
    Inherited([parameter()], lr=1.0)
    p = parameter()
    optimizer = kind([p], lr=1.0)
    ran = watched(optimizer)
    for _ in range(3):
        optimizer.step()
    assert ran == ["before", "after"] * 3
    assert p.tolist() == [-2.0, -2.0]


@pytest.mark.parametrize("once", [True, False])
def test_and_so_it_is_with_a_closure(once):
    torch.optim.SGD([parameter()], lr=1.0)
    optimizer = Inherited([parameter()], lr=1.0)
    ran = watched(optimizer, once=once)
    optimizer.step(lambda: ran.append("closure"))
    assert ran == ["closure", "before", "after"]


def test_after_a_step_that_failed_the_next_one_counts():
    torch.optim.SGD([parameter()], lr=1.0)
    optimizer = Failing([parameter()], lr=1.0)
    ran = watched(optimizer)
    with pytest.raises(RuntimeError, match="out of luck"):
        optimizer.step()
    optimizer.fails = False
    optimizer.step()
    assert ran == ["before", "before", "after"]


@pytest.mark.parametrize("closure", [None, lambda: None])
def test_what_is_innermost_sees_the_optimizer_s_work_alone_whenever_it_was_added(closure):
    optimizer, ran, undo = torch.optim.SGD([parameter()], lr=1.0), [], ExitStack()

    def add(name, **settings):
        around_step(
            optimizer, undo, before=lambda: ran.append(name), after=lambda: ran.append(f"after {name}"), **settings
        )

    add("first")
    add("inner", innermost=True)
    add("last")
    optimizer.step(closure)
    assert ran == ["first", "last", "inner", "after inner", "after first", "after last"]
    undo.close()
    optimizer.step()
    assert len(ran) == 6
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
