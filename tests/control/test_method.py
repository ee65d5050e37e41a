"""The protocol: every method on every family, what cannot be is refused, and what is refused leaves no trace."""

from __future__ import annotations

import copy
import gc
import itertools
import re
import weakref
from pathlib import Path

import pytest
import torch
from rivals import METHODS, batch, gradients, loss_of, one_step, ready, traces
from torch import nn
from zoo import FAMILIES, build

from locater import LocAteR, LocaterError
from locater.control import (
    DecoupledLocAteR,
    DecoupledLocAteRMethod,
    LocAteRMethod,
    QKClip,
    QKDecay,
    QKNorm,
    SigmaReparam,
    Softcap,
    ZLoss,
    applied,
)

NORMALISED = {"QK-clip", "QK-norm", "σReparam"}
REFUSALS = {
    **{name: {"softcap"} for name in ("gptj", "bloom", "falcon-new", "falcon-multi-query", "falcon-alibi", "gemma2")},
    **dict.fromkeys(("qwen3", "gemma3"), NORMALISED),
}

CONTRADICTIONS = [
    {"QK-norm", "QK-clip"},
    *(
        {one, other}
        for one in ("σReparam", "σReparam on all")
        for other in ("QK-norm", "QK-clip", "QK weight decay", "LocAteR", "LocAteR, decoupled")
    ),
]


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_trains_every_family_or_is_refused(family):
    given = batch(family)
    original, groups = ready(family), 1
    for name, method in METHODS.items():
        model = copy.deepcopy(original)
        optimizer = optimizer_of(model)
        before = traces(model)
        if name in REFUSALS.get(family, ()):
            with pytest.raises(LocaterError, match=r"itself|already"):
                method().apply(model, optimizer)
            assert not applied(model)
        else:
            handle = method().apply(model, optimizer)
            assert [one.name for one in applied(model)] == [handle.method.name]
            assert torch.isfinite(torch.tensor(one_step(model, optimizer, given)))
            handle.remove()
            assert not applied(model)
            assert handle.at_inference
            assert handle.at_start
        assert traces(model) == before, name
        assert len(optimizer.param_groups) == groups, name
        assert all(torch.isfinite(x).all() for x in model.state_dict().values() if x.is_floating_point())


@pytest.mark.parametrize("name", METHODS)
def test_a_method_applied_twice_is_refused(name):
    model = ready("llama")
    optimizer = optimizer_of(model)
    handle = METHODS[name]().apply(model, optimizer)
    before = traces(model)
    for part in (model, model.model, nn.Sequential(model)):
        with pytest.raises(LocaterError, match="already"):
            METHODS[name]().apply(part, optimizer)
    assert traces(model) == before
    handle.remove()
    METHODS[name]().apply(model, optimizer).remove()


FORMS = [{"σReparam", "σReparam on all"}, {"LocAteR", "LocAteR, decoupled"}]  # of one method: the same as twice
PAIRS = [pair for pair in itertools.permutations(METHODS, 2) if {*pair} not in FORMS]


@pytest.mark.parametrize("pair", PAIRS, ids=" then ".join)
def test_two_methods_work_together_or_contradict_each_other(pair):
    first, second = pair
    model, given = ready("llama"), batch("llama")
    optimizer = optimizer_of(model)
    one = METHODS[first]().apply(model, optimizer)
    if set(pair) in CONTRADICTIONS:
        before = traces(model)
        with pytest.raises(LocaterError, match="contradict each other: "):
            METHODS[second]().apply(model, optimizer)
        assert traces(model) == before
        assert len(applied(model)) == 1
        return
    other = METHODS[second]().apply(model, optimizer)
    one_step(model, optimizer, given)
    one.remove()  # in the order they came, not the reverse
    one_step(model, optimizer, given)
    other.remove()
    assert traces(model) == traces(ready("llama"))


@pytest.mark.parametrize("name", METHODS)
def test_what_is_removed_cannot_be_removed_again(name):
    model = ready("gpt2")
    handle = METHODS[name]().apply(model, optimizer_of(model))
    handle.remove()
    with pytest.raises(LocaterError, match="not applied any more"):
        handle.remove()


@pytest.mark.parametrize("name", ["LocAteR", "LocAteR, decoupled", "QK-clip", "QK weight decay"])
def test_methods_that_act_in_a_step_say_that_they_need_the_optimizer(name):
    with pytest.raises(LocaterError, match="needs the optimizer"):
        METHODS[name]().apply(ready("gpt2"))


@pytest.mark.parametrize("name", METHODS)
def test_a_model_without_attention_is_refused(name):
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(LocaterError, match=r"no attention"):
        METHODS[name]().apply(model, optimizer_of(model))
    with pytest.raises(LocaterError, match="applied to a torch module, got dict"):
        METHODS[name]().apply({}, optimizer_of(model))


@pytest.mark.parametrize("name", ["LocAteR", "QK-clip", "QK weight decay", "QK-norm", "σReparam"])
def test_an_optimizer_of_something_else_is_refused_and_the_model_stays_as_it_was(name):
    """For QK-norm and σReparam this shows only after all layers have been changed."""
    model = ready("gpt2")
    before, values = traces(model), copy.deepcopy(model.state_dict())
    with pytest.raises(LocaterError, match=r"holds none|trains neither"):
        METHODS[name]().apply(model, optimizer_of(nn.Linear(2, 2)))
    assert traces(model) == before
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in values.items())
    assert not applied(model)


@pytest.mark.parametrize("method", [SigmaReparam(), QKNorm()], ids=["σReparam", "QK-norm"])
def test_methods_that_add_parameters_come_before_the_scheduler(method):
    model = ready("gpt2")
    optimizer = optimizer_of(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    before = traces(model)
    with pytest.raises(LocaterError, match="make the scheduler afterwards"):
        method.apply(model, optimizer)
    assert traces(model) == before


def test_a_scheduler_made_afterwards_goes_on_when_the_method_is_removed():
    model, given = ready("gpt2"), batch("gpt2")
    optimizer = optimizer_of(model)
    handle = SigmaReparam().apply(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(2):
        one_step(model, optimizer, given)
        scheduler.step()
    assert optimizer.param_groups[1]["lr"] == pytest.approx(1e-3 / 4)
    handle.remove()
    one_step(model, optimizer, given)
    scheduler.step()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: QKClip(0.0), "threshold"),
        (lambda: QKClip(float("inf")), "threshold"),
        (lambda: QKDecay(-1.0), "decay"),
        (lambda: QKNorm(eps=float("nan")), "eps"),
        (lambda: SigmaReparam("qkv"), "where"),
        (lambda: Softcap(0), "cap"),
        (lambda: ZLoss(-1e-4), "strength"),
        (lambda: ZLoss(1e-4, loss_scale=0.0), "loss_scale"),
    ],
)
def test_bad_settings_are_refused(make, says):
    with pytest.raises(LocaterError, match=f"^{says} must be"):
        make()


def test_locater_by_the_protocol_is_locater_attached():
    model, other, given = ready("llama"), ready("llama"), batch("llama")
    optimizer, plain = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    handle = METHODS["LocAteR"]().apply(model, optimizer)
    reg = LocAteR(other, scale_strength=0.01, mean_strength=0.01).attach(plain)
    for _ in range(2):
        one_step(model, optimizer, given)
        one_step(other, plain, given)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert handle.measure() == reg.measure()
    handle.remove()
    model.zero_grad()
    loss_of(model, given).backward()
    expected = gradients(model)
    optimizer.step()
    assert all(torch.equal(g, expected[name]) for name, g in gradients(model).items())


@pytest.mark.parametrize("name", METHODS)
def test_a_model_that_is_dropped_with_its_method_on_is_forgotten(name):
    model = build("gpt-neox")
    optimizer = optimizer_of(model)
    METHODS[name]().apply(model, optimizer)
    gone = weakref.ref(model.gpt_neox.layers[0].attention)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_the_python_of_the_page_runs():
    page = Path(__file__).parent.parent.parent / "docs" / "rivals.md"
    names = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)
    assert [method.name for method in applied(names["model"])] == ["softcap", "attention z-loss"]


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_remembers_is_in_its_state_and_goes_on_from_there(name):
    """Besides the model's own state: LocAteR's step, and what the decoupled form takes for a baseline."""
    model = ready("llama")
    handle = METHODS[name]().apply(model, optimizer_of(model))
    state = handle.state_dict()
    assert ("step" in state) == name.startswith("LocAteR")
    other = ready("llama")
    resumed = METHODS[name]().apply(other, optimizer_of(other))
    resumed.load_state_dict({**state, "step": 7} if state else {})
    assert resumed.state_dict() == ({**state, "step": 7} if state else {})
    with pytest.raises(LocaterError):
        resumed.load_state_dict({"nonsense": 1})


def test_a_second_locater_on_one_optimizer_is_refused_and_one_on_another_is_not():
    model = build("gpt2")
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    reg = LocAteR(model, scale_strength=1e-4, mean_strength=1e-4).attach(first).attach(first).attach(second)
    again = LocAteR(model, scale_strength=1e-4, mean_strength=1e-4)
    with pytest.raises(LocaterError, match="another LocAteR is attached to this optimizer already; detach"):
        again.attach(first)
    reg.detach()
    again.attach(first)
    assert [method.name for method in applied(model)] == ["LocAteR"]


@pytest.mark.parametrize("first", [LocAteRMethod(scale_strength=1e-4, mean_strength=1e-4), DecoupledLocAteRMethod()])
@pytest.mark.parametrize("second", [LocAteRMethod(scale_strength=1e-4, mean_strength=1e-4), DecoupledLocAteRMethod()])
@pytest.mark.parametrize("attached", [(False, True), (True, False)], ids=["attach last", "attach first"])
def test_one_locater_as_a_method_and_another_attached_do_not_act_on_one_model(first, second, attached):
    """Its penalty would count twice."""
    model = build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def put(method, attach):
        kind = DecoupledLocAteR if isinstance(method, DecoupledLocAteRMethod) else LocAteR
        return kind(model, **method.settings).attach(optimizer) if attach else method.apply(model, optimizer)

    kept = put(first, attached[0])
    with pytest.raises(LocaterError, match=r"LocAteR is applied to this model already; remove\(\) that first"):
        put(second, attached[1])
    (kept.detach if attached[0] else kept.remove)()
    put(second, attached[1])


@pytest.mark.parametrize("together", [False, True], ids=["optimizer", "list"])
def test_a_model_whose_query_and_key_weights_are_frozen_is_refused_as_such(together):
    """As under LoRA on other layers: there is no optimizer to attach to, and silence would look like protection."""
    model = ready("gpt2")
    optimizer = optimizer_of(model)
    model.requires_grad_(False).lm_head.requires_grad_(True)
    for reg in (DecoupledLocAteR(model), LocAteR(model, scale_strength=1e-4, mean_strength=1e-4)):
        with pytest.raises(LocaterError, match=r"^all query and key weights of the model are frozen"):
            reg.attach([optimizer] if together else optimizer)
        assert not applied(model)


def test_what_contradicts_an_attached_locater_is_refused():
    model = build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = LocAteR(model, scale_strength=1e-4, mean_strength=1e-4).attach(optimizer)
    with pytest.raises(LocaterError, match="σReparam and LocAteR contradict each other"):
        SigmaReparam().apply(model)
    reg.detach()
    SigmaReparam().apply(model).remove()


@pytest.mark.parametrize("kind", [LocAteR, DecoupledLocAteR])
def test_a_model_that_is_dropped_with_its_optimizer_is_freed_though_locater_was_attached(kind):
    settings = {"scale_strength": 1e-4, "mean_strength": 1e-4} if kind is LocAteR else {}
    model = build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind(model, **settings).attach(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    left = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer, parameter
    gc.collect()
    assert [one() for one in left] == [None, None]


def test_what_was_attached_to_an_optimizer_that_is_gone_stands_in_nobodys_way():
    model = build("gpt2")
    LocAteR(model, scale_strength=1e-4, mean_strength=1e-4).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    gc.collect()
    assert applied(model) == []
    SigmaReparam().apply(model).remove()


def test_a_detached_regulariser_holds_no_optimizer():
    model = build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = DecoupledLocAteR(model).attach(optimizer)
    optimizer.step()
    reg.detach()
    left = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert left() is None
