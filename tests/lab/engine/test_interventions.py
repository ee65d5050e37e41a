"""What an intervention holds is held in every batch, measured another way; controls change what they say, no more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.optimize import brentq
from torch.utils._python_dispatch import TorchDispatchMode

from locater import QK, LocaterError
from locater.lab import Config, Intervention, Member, ModelConfig, Stack, train
from locater.lab.data import PAD
from locater.lab.engine import loss
from locater.lab.engine.interventions import Interventions, random_directions, with_trace
from locater.lab.intervention import check_interventions, largest_entropy
from replaying import Graph, recording

MODEL = ModelConfig(width=16, ffn=16, layers=2, heads=2, tokens=8)
CONFIG = Config(model=MODEL, batch=6, steps=40, probe_blocks=8, valid_blocks=8)
STRENGTHS = {"scale_strength": 1e-2, "mean_strength": 1e-1}
RATE = 1e-2


def member(name, seed=0, rate=RATE, **intervention):
    """With LocAteR if the name begins so."""
    strengths = STRENGTHS if name.startswith("locater") else {}
    return Member(name, seed, rate, **strengths, intervention=Intervention(**intervention) if intervention else None)


NONE, LOCATER = member("none"), member("locater")
LEVELS = (0.2, 0.7, 1.3)
HELD = [member(f"entropy-{level}", entropy=level) for level in LEVELS]
FOLLOWERS = [member("as-locater", entropy_of="locater"), member("locater-as-none", entropy_of="none")]
WEIGHTS = [member("trace-1", trace=1.0), member("trace--3", trace=-3.0), member("scale-2", scale=2.0)]
NOISE = [member("noise", noise_of="locater"), member("one-way", noise_of="locater", noise_fixed=True)]
PLACES = [member("locater-0", layers=(0,)), member("locater-begins", until=0.25)]
ALL = [NONE, LOCATER, *HELD, *FOLLOWERS, *WEIGHTS, *NOISE, *PLACES]


def stack_of(members, corpus, config=CONFIG):
    return Stack(config, members, corpus, torch.device("cpu"))


def advanced(stack, steps):
    for _ in range(steps):
        stack.advance()
    return stack


def softmax_entropy(q, k, scale):
    """(E, B, H, T) of every query, from the whole T × T."""
    logits = (q.double() @ k.double().mT) * scale
    masked = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return torch.special.entr(logits.masked_fill(masked, -torch.inf).softmax(-1)).sum(-1)


class Watched:
    """The mean entropy (E, L, H) that training has in every batch, over queries whose loss counts."""

    def __init__(self, stack):
        self.stack, self.found = stack, []
        stack.watch(self._begin)

    def _begin(self, _):
        self.found.append([])
        _, targets = self.stack.train(self.stack._blocks())
        real = (targets != PAD).unflatten(1, (-1, MODEL.tokens))[:, :, None].double()

        def record(_layer, _x, q, k, scale):
            self.found[-1].append((softmax_entropy(q, k, scale) * real).sum((1, 3)) / real.sum((1, 3)))

        return record

    def entropies(self):
        return torch.stack([torch.stack(layers, 1) for layers in self.found])  # (steps, E, L, H)


def dense_heads(stack, e):
    """W_QK as D × D matrices, (L, H, D, D)."""
    weights = [stack.parameters(e)[f"layers.{layer}.qkv.weight"].double() for layer in range(MODEL.layers)]
    w_q, w_k, _ = torch.stack(weights).unflatten(1, (3, MODEL.heads, -1)).unbind(1)
    return w_q.mT @ w_k


# ---------------------------------------------------------------------- what is held


# in float32, against float64; in bfloat16 queries are rounded by 2⁻⁹, and dH = Var(c s) dc/c with a variance below 2
@pytest.mark.parametrize(
    ("norm", "precision", "tolerance"), [("post", "fp32", 1e-5), ("pre", "fp32", 1e-5), ("pre", "bf16", 2**-8)]
)
def test_entropy_is_held_in_every_batch_from_the_first_and_followers_have_their_leaders(
    corpus, norm, precision, tolerance
):
    members = [NONE, LOCATER, *HELD, *FOLLOWERS, member("noise-as-none", noise_of="locater", entropy_of="none")]
    stack = stack_of(members, corpus, CONFIG.changed(norm=norm, precision=precision))
    stack._clock += stack._batches - 8  # so that the last batch of an epoch, which has padding, is seen
    stack.step = int(stack._clock)
    watched = Watched(stack)
    advanced(stack, 12)
    found = watched.entropies()
    for e, level in enumerate(LEVELS, start=2):
        assert (found[:, e] - level).abs().max() < tolerance
    for follower, leader in ((5, 1), (6, 0), (7, 0)):
        assert (found[:, follower] - found[:, leader]).abs().max() < tolerance
    assert (found[-1, 1] - found[-1, 0]).abs().max() > 1e-3  # these two are not the same anyway


def test_trace_and_scale_are_held_after_every_update_and_before_the_first(corpus):
    stack = stack_of([*WEIGHTS, member("one-layer", trace=2.0, layers=(1,)), NONE], corpus)
    for _ in range(6):
        for e, trace in ((0, 1.0), (1, -3.0)):
            assert (torch.einsum("lhii->lh", dense_heads(stack, e)) - trace).abs().max() < 1e-5
        assert (dense_heads(stack, 2).square().sum((-2, -1)) - 2.0).abs().max() < 1e-5
        one, free = (torch.einsum("lhii->lh", dense_heads(stack, e)) for e in (3, 4))
        assert (one[1] - 2).abs().max() < 1e-5
        assert (one[0] - free[0]).abs().max() < 0.5
        stack.advance()


def test_no_w_q_and_w_k_of_the_trace_are_closer():
    """Those near the ones found, and with the same trace, are farther from where it began."""
    torch.manual_seed(0)
    old = QK(*torch.randn(2, 5, 3, 7, dtype=torch.float64))
    for trace in (-4.0, 0.0, 30.0):
        new = with_trace(old, torch.full((5,), trace, dtype=torch.float64))
        torch.testing.assert_close(new.trace(), torch.full((5,), trace, dtype=torch.float64))

        def distance(qk):
            return (qk.w_q - old.w_q).square().sum((-2, -1)) + (qk.w_k - old.w_k).square().sum((-2, -1))

        for _ in range(50):
            moved = QK(*(w + 0.05 * torch.randn_like(w) for w in (new.w_q, new.w_k)))
            other = with_trace(moved, torch.full((5,), trace, dtype=torch.float64))
            assert (distance(other) > distance(new)).all()


@pytest.mark.parametrize(("width", "head"), [(64, 64), (8, 2)])
@pytest.mark.parametrize("far", [1.0, 3.0, 30.0, 100.0, 1e6])
def test_a_trace_far_from_where_it_began_is_reached(width, head, far):
    """So many times ‖W_Q‖², of 100 pairs drawn at random; 1e-12 is what rounding leaves of the terms' difference."""
    torch.manual_seed(0)
    old = QK(*torch.randn(2, 100, head, width, dtype=torch.float64) / width**0.5)
    for trace in (far * head, -far * head):
        held = torch.full((100,), trace, dtype=torch.float64)
        torch.testing.assert_close(with_trace(old, held).trace(), held, rtol=1e-11, atol=0)


def test_a_trace_that_is_there_changes_nothing():
    same = torch.eye(3)[None]
    for w_k in (same, -same):  # one of two terms is zero
        found = with_trace(QK(same, w_k), torch.einsum("nij,nij->n", same, w_k))
        assert torch.equal(found.w_q, same)
        assert torch.equal(found.w_k, w_k)


def test_the_temperature_is_a_constant_to_the_gradient(corpus):
    """The gradient is that of a model whose queries are larger by the factor, which nothing holds."""
    config = replace(CONFIG.changed(dropout=0.0), precision="fp64")
    held, plain = (stack_of([each], corpus, config) for each in (member("held", entropy=0.7), NONE))
    held.forward_backward()
    factors = held.method._log_factors.exp()[0]  # of one batch: the batch's own
    body = plain.body(plain.segments["body"].value)
    gradients = [s.body(s.segments["body"].gradient) for s in (held, plain)]
    rows = factors.repeat_interleave(MODEL.head_width, 1)  # (L, D)
    for layer in range(MODEL.layers):
        body[f"layers.{layer}.qkv.weight"][0, : MODEL.width] *= rows[layer, :, None]
        body[f"layers.{layer}.qkv.bias"][0, : MODEL.width] *= rows[layer]
    plain.forward_backward()
    for layer in range(MODEL.layers):
        gradients[1][f"layers.{layer}.qkv.weight"][0, : MODEL.width] *= rows[layer, :, None]
        gradients[1][f"layers.{layer}.qkv.bias"][0, : MODEL.width] *= rows[layer]
    for name, found in gradients[0].items():
        torch.testing.assert_close(found, gradients[1][name], rtol=1e-9, atol=1e-12)


def test_validation_has_the_geometric_mean_of_trainings_temperatures(corpus):
    """Nothing is learned here, so that each batch's can be found again, by another algorithm."""
    model = replace(MODEL, layers=1, heads=1, dropout=0.0)
    stack = stack_of([member("held", rate=0.0, entropy=0.7)], corpus, replace(CONFIG, model=model))
    plain = stack_of([member("none", rate=0.0)], corpus, replace(CONFIG, model=model))
    seen = []
    plain.watch(lambda real: lambda _layer, _x, q, k, scale: seen.append((q, k, scale, real[:, :, None])))
    advanced(plain, 3)
    advanced(stack, 3)

    def factor(q, k, scale, real):
        return brentq(lambda c: float((softmax_entropy(c * q, k, scale) * real).sum() / real.sum()) - 0.7, 1e-2, 1e3)

    logs = [math.log(factor(*each)) for each in seen]
    (record,), (without,) = stack.measure(), plain.measure()
    assert record["temperature"][0][0] == pytest.approx(math.exp(-sum(logs) / 3), rel=1e-4)
    assert "temperature" not in without
    q, k, scale, _ = seen[-1]  # of the validation text, which `measure` has just read
    entropy = float(softmax_entropy(q / record["temperature"][0][0], k, scale).mean())
    assert record["entropy"][0][0] == pytest.approx(entropy, rel=1e-4)


# ---------------------------------------------------------------------- LocAteR, elsewhere or otherwise


def penalty_gradients(stack):
    """W_Q's and W_K's of the penalty alone, (E, L, 2, H, K, D)."""
    gradient = stack.segments["body"].gradient.zero_()
    stack._add_penalty_gradient(torch.ones(()))
    layers = [stack.body(gradient)[f"layers.{layer}.qkv.weight"] for layer in range(MODEL.layers)]
    return torch.stack(layers, 1).unflatten(2, (3, MODEL.heads, -1))[:, :, :2].clone()


def test_noise_is_as_large_as_locater_s_pull_and_points_elsewhere(corpus):
    stack = stack_of([LOCATER, *NOISE, NONE], corpus)
    found = []
    for _ in range(2):
        stack.advance()
        found.append(penalty_gradients(stack))
        w_q, w_k, _ = (
            torch.stack([stack.parameters(0)[f"layers.{i}.qkv.weight"] for i in range(MODEL.layers)])
            .unflatten(1, (3, MODEL.heads, -1)).unbind(1)
        )  # fmt: skip
        w_q, w_k = (w.clone().requires_grad_() for w in (w_q, w_k))
        joint = w_q.mT @ w_k
        trace = torch.einsum("lhii->lh", joint)
        penalty = 1e-2 * joint.square().sum() + 1e-1 * (trace - 1).square().sum()
        expected = torch.stack(torch.autograd.grad(penalty, (w_q, w_k)), 1)  # (L, 2, H, K, D)
        torch.testing.assert_close(found[-1][0], expected, rtol=1e-4, atol=1e-6)
        for e in (1, 2):
            torch.testing.assert_close(found[-1][e].norm(dim=(-2, -1)), expected.norm(dim=(-2, -1)))
        assert not found[-1][3].any()
    cosines = torch.cosine_similarity(*(each[1:3].flatten(-2) for each in found), dim=-1)  # of one step and the next
    assert cosines[0].abs().max() < 0.5  # 128 dimensions: 0.09 each
    torch.testing.assert_close(cosines[1], torch.ones_like(cosines[1]))


def test_random_directions_favour_none():
    units = random_directions(torch.arange(4000), (2, 3, 4))
    torch.testing.assert_close(units.norm(dim=(-2, -1)), torch.ones(4000, 2))
    covariance = torch.einsum("nai,nbj->aibj", *[units.flatten(2)] * 2) / 4000
    expected = torch.eye(24).view(2, 12, 2, 12) / 12
    assert (covariance - expected).abs().max() < 5 / 12 / math.sqrt(4000)  # five standard errors


def test_locater_on_one_layer_leaves_the_other_to_the_loss(corpus):
    """The first update has the same gradient of the loss for all; later ones differ by what the loss sees."""
    stack = stack_of([NONE, LOCATER, PLACES[0]], corpus, replace(CONFIG, precision="fp64"))
    gradients = penalty_gradients(stack)
    torch.testing.assert_close(gradients[2, 0], gradients[1, 0])
    assert not gradients[2, 1].any()
    stack.advance()
    none, everywhere, first = (stack.parameters(e) for e in range(3))
    # to rounding, which Adam's first step divides by the gradient's size or 1e-8
    torch.testing.assert_close(first["layers.1.qkv.weight"], none["layers.1.qkv.weight"])
    torch.testing.assert_close(first["layers.0.qkv.weight"], everywhere["layers.0.qkv.weight"])
    assert (first["layers.0.qkv.weight"] - none["layers.0.qkv.weight"]).abs().max() > 1e-4


def test_locater_for_a_time_is_locater_and_then_none(corpus):
    begins = PLACES[1]  # ends after a quarter of 40 updates
    stack, whole = stack_of([begins, NONE], corpus), stack_of([LOCATER, NONE], corpus)
    advanced(stack, 10)
    advanced(whole, 10)
    after = stack_of([replace(NONE, name="after"), NONE], corpus)
    state = {name: value.clone() for name, value in stack.state().items()}
    for name, value in whole.state().items():
        assert torch.equal(state[name], value), name
    after.load_state(state)
    for each in (stack, whole, after):
        advanced(each, 10)
    for name, value in after.state().items():
        assert torch.equal(stack.state()[name], value), name
    assert not torch.equal(whole.state()["body.value"], stack.state()["body.value"])


# ---------------------------------------------------------------------- the others, and going on


def test_members_without_an_intervention_train_as_before(corpus):
    config = replace(CONFIG, precision="fp64")
    beside, alone = advanced(stack_of(ALL, corpus, config), 12), advanced(stack_of([NONE, LOCATER], corpus, config), 12)
    for e in (0, 1):
        for name, value in beside.parameters(e).items():
            found, expected = value, alone.parameters(e)[name]
            if name.endswith("qkv.bias"):  # a key's has a gradient of rounding only, which Adam makes a step
                found, expected = (x.unflatten(0, (3, -1))[[0, 2]] for x in (found, expected))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_killed_run_goes_on_as_if_nothing_had_been(corpus, tmp_path, monkeypatch):
    config = replace(CONFIG, steps=24, record_every=4, checkpoint_every=5)
    settings = {"corpus": corpus, "device": "cpu"}
    train(config, ALL, tmp_path / "whole", **settings)
    advance = Stack.advance

    def dies(stack):
        if stack.step == 13:
            raise MemoryError("killed")
        advance(stack)

    with monkeypatch.context() as patch:
        patch.setattr(Stack, "advance", dies)
        with pytest.raises(MemoryError):
            train(config, ALL, tmp_path / "killed", **settings)
    seen = []
    train(config, ALL, tmp_path / "killed", watch=seen.append, **settings)
    assert seen[0].note == "going on from step 10"
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "killed")]
    assert metrics[0] == metrics[1]
    with monkeypatch.context() as patch:
        patch.setattr(Interventions, "version", 2)
        with pytest.raises(LocaterError, match="is the checkpoint of a run with another configuration"):
            train(config, ALL, tmp_path / "whole", **settings)
    with pytest.raises(LocaterError, match="belongs to another run: intervention of its members differs"):
        train(config, [*ALL[:-1], replace(ALL[-1], intervention=None)], tmp_path / "whole", **settings)


class NoWaiting(TorchDispatchMode):
    """Refuses what would wait for a GPU's results: an update on one is recorded once and replayed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero"), name
        return func(*args, **(kwargs or {}))


def test_a_part_of_training_does_not_become_another_when_a_run_goes_on(corpus, tmp_path):
    config = replace(CONFIG, steps=4, record_every=4)
    train(config, [LOCATER, member("locater-begins", until=0.5)], tmp_path, corpus=corpus, device="cpu")
    with pytest.raises(LocaterError, match=r"locater-begins .* has LocAteR for a part of 4 updates"):
        train(replace(config, steps=8), [LOCATER, member("locater-begins", until=0.5)], tmp_path, corpus=corpus)


def test_interventions_wait_for_no_result(corpus):
    stack = advanced(stack_of(ALL, corpus), 1)
    method, values = stack.method, stack.body(stack.segments["body"].value)
    q, k = torch.randn(2, len(ALL), CONFIG.batch, MODEL.heads, MODEL.tokens, MODEL.head_width)
    of_q, of_k = torch.randn(2, len(ALL), MODEL.heads, MODEL.head_width, MODEL.width)
    real = torch.ones(len(ALL), CONFIG.tokens_per_batch, dtype=torch.bool)
    with NoWaiting():
        method.begin(real)
        for layer in range(MODEL.layers):
            method.compare({}, layer, q, k)
            method.at_inference().compare({}, layer, q, k)
            method.pull(layer, of_q, of_k, stack._clock)
        assert method.after_update(values, torch.ones(len(ALL)), torch.ones(()))


@pytest.mark.bitwise  # dispatch modes both
def test_the_forward_of_an_update_can_be_replayed(corpus, monkeypatch):
    """As a CUDA graph does it, on the tensors of the one that was recorded. The optimizer of a CPU asks for numbers."""
    monkeypatch.setattr(loss._Chunks, "_may_exceed_cap", lambda _: True)  # and so would this
    replayed, computed = advanced(stack_of(ALL, corpus), 2), advanced(stack_of(ALL, corpus), 7)
    with recording(graph := Graph()):
        replayed.forward_backward()
    monkeypatch.setattr(replayed, "forward_backward", graph.replay)
    for name, value in advanced(replayed, 5).state().items():
        assert torch.equal(value, computed.state()[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_what_is_replayed_is_what_was_computed(corpus, precision):
    config = replace(CONFIG, precision=precision)
    replayed, computed = (Stack(config, ALL, corpus, torch.device("cuda")) for _ in range(2))
    computed._warm = -(10**9)
    for each in (replayed, computed):
        advanced(each, 20)
    assert replayed._graph is not None
    for name, value in replayed.state().items():
        assert torch.equal(value, computed.state()[name]), name


# ---------------------------------------------------------------------- mistakes

WRONG = {
    "entropy held and followed": ({"entropy": 1.0, "entropy_of": "none"}, "holds one quantity, the others are free"),
    "two held": ({"trace": 1.0, "scale": 2.0}, "holds one quantity, the others are free; got trace and scale"),
    "a negative entropy": ({"entropy": -1.0}, "entropy must be a finite number above 0, got -1.0"),
    "no number": ({"trace": "much"}, "trace must be a finite number, got 'much'"),
    "no scale": ({"scale": 0.0}, "scale must be a finite number above 0, got 0.0"),
    "beyond the end": ({"until": 1.5}, "above 0 and at most 1, got 1.5"),
    "not begun": ({"until": 0.0}, "until must be a finite number above 0, got 0.0"),
    "a layer twice": ({"layers": (1, 1)}, "layers must be different whole numbers"),
    "a layer below all": ({"layers": (-1,)}, "layers must be different whole numbers"),
    "no layers": ({"layers": ()}, "layers must be a list"),
    "no name": ({"noise_of": 3}, "noise_of takes the name of a member"),
    "noise and more": ({"noise_of": "locater", "until": 0.5}, "takes layers and times from the member it names"),
    "noise of none": ({"noise_fixed": True}, "noise_of names no member"),
    "no flag": ({"noise_of": "locater", "noise_fixed": 1}, "noise_fixed must be true or false"),
    "nothing": ({}, "holds and changes nothing"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_an_intervention_that_contradicts_itself_is_refused_in_one_sentence(mistake):
    settings, says = WRONG[mistake]
    with pytest.raises(LocaterError, match=says) as refused:
        Intervention(**settings)
    assert len(str(refused.value).splitlines()) == 1


def test_one_that_contradicts_its_members_strengths_is_refused():
    for name, settings, says in (
        ("locater", {"noise_of": "other"}, "noise takes LocAteR's place"),
        ("none", {"until": 0.5}, "until 0.5 ends LocAteR, but the member has no strengths"),
        ("none", {"layers": (0,)}, "but the member has neither"),
        ("locater", {"trace": 0.0}, "the trace is held at 0 and pulled by LocAteR"),
        ("locater", {"scale": 1.0}, "the scale is held at 1 and pulled by LocAteR"),
    ):
        with pytest.raises(LocaterError, match=says):
            member(name, **settings)


def test_one_that_the_model_or_its_neighbours_do_not_allow_is_refused():
    far = member("far", layers=(2,), trace=1.0)
    for members, model, says in (
        ([far], MODEL, "far acts on layer 2, but layers are 0 to 1"),
        ([member("flat", entropy=1.33)], MODEL, "holds an entropy of 1.33 nats, .* lies between 0 and 1.326"),
        (FOLLOWERS[:1], MODEL, "as-locater follows locater, which does not train beside it"),
        ([NOISE[0], member("locater", seed=1)], MODEL, "give both the same seed"),
        ([FOLLOWERS[0], replace(FOLLOWERS[1], name="locater")], MODEL, "follows another member itself"),
        ([member("a", entropy_of="a")], MODEL, "follows another member itself"),
        ([member("n", noise_of="none"), NONE], MODEL, "as large as the LocAteR of none, which has none"),
        ([member("b", entropy_of="entropy-0.2"), HELD[0]], MODEL, "which is held: hold it at that level itself"),
        (HELD, replace(MODEL, joint_qk=True), "its model trains W_QK itself"),
        (HELD, replace(MODEL, method="qk-norm"), "its model has the method qk-norm"),
    ):
        with pytest.raises(LocaterError, match=says):
            check_interventions(model, members)
    assert largest_entropy(3) == pytest.approx((math.log(2) + math.log(3)) / 3)


def test_members_with_interventions_survive_json():
    for each in ALL:
        assert Member.from_json(each.to_json()) == each
    assert "intervention" not in NONE.to_json()  # as it was before there were any
    assert PLACES[0].to_json()["intervention"] == {"layers": (0,)}
