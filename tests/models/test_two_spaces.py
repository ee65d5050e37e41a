"""Queries and keys made of different states: W_QK has a scale and singular values, and no trace."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from locater import LocAteR, LocaterError, scan
from locater.control import DecoupledLocAteR, QKClip, QKDecay, SigmaReparam
from locater.figures import draw_scan
from locater.models import Scan, attentions
from locater.pages.report import report
from locater.qk import QK
from locater.theory import TokenProcess, attention, rho

NOTHING = [
    "trace", "trace_square", "xi", "r", "eigenvalue_mean", "eigenvalue_variance", "symmetric_share",
    "attention_entropy", "rho_first", "rho_middle", "rho_last",
]  # fmt: skip


class Model(nn.Module):
    """Self-attention, and cross attention to keys of another width."""

    def __init__(self, key_width=7):
        super().__init__()
        torch.manual_seed(0)
        self.self_attn = nn.MultiheadAttention(12, 3, batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(12, 3, kdim=key_width, vdim=key_width, batch_first=True)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)

    def forward(self, x, other):
        return self.multihead_attn(self.self_attn(x, x, x)[0], other, other)[0]


@pytest.fixture
def factors():
    torch.manual_seed(1)
    return torch.randn(2, 3, 9, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)


@pytest.mark.parametrize("cut", [(9, 5), (2, 5), (9, 2), (2, 2)])  # wider than a head, narrower, on either side
def test_scale_and_singular_values_are_those_of_the_dense_matrix(factors, cut):
    qk = QK(factors[0][..., : cut[0]], factors[1][..., : cut[1]], one_input=False)
    dense = torch.linalg.svdvals(qk.dense())
    torch.testing.assert_close(qk.scale(), dense.square().sum(-1))
    found = qk.singular_values()
    torch.testing.assert_close(found, dense[..., : found.shape[-1]])


@pytest.mark.parametrize("name", ["trace", "trace_square", "eigenvalues", "symmetric_eigenvalues"])
def test_what_needs_one_space_is_refused(factors, name):
    with pytest.raises(LocaterError, match="queries of width 9 and keys of width 5 are made of different states"):
        getattr(QK(*factors), name)()
    with pytest.raises(LocaterError, match="different states"):  # equal widths do not make it one space
        getattr(QK(factors[0], factors[0], one_input=False), name)()


def test_the_theory_of_one_kind_of_token_refuses_it(factors):
    for law in (rho, attention):
        with pytest.raises(LocaterError, match="made of different states"):
            law(QK(*factors), TokenProcess.random_walk(4), 1.0)


def test_logits_are_the_modules_own():
    module = Model().multihead_attn
    x, other = torch.randn(2, 4, 12), torch.randn(2, 5, 7)
    weights = module(x, other, other, average_attn_weights=False)[1]
    torch.testing.assert_close(attentions(module)[0].logits(x, other).softmax(-1), weights)


def test_a_scan_has_rows_of_what_exists():
    table = scan(Model())
    two = table[table["module"] == "multihead_attn"]
    assert (two["kind"] == "cross").all()
    assert two[NOTHING].isna().all(axis=None)
    assert (two[["regime", "attention_regime"]] == "").all(axis=None)
    rest = two.drop(columns=[*NOTHING, "softcap"])
    assert rest.notna().all(axis=None)
    dense = attentions(Model())[1].qk().dense().flatten(0, 1).double()
    singular = np.linalg.svd(dense.detach().numpy(), compute_uv=False)
    np.testing.assert_allclose(two["scale"], (singular**2).sum(-1), rtol=1e-6)
    np.testing.assert_allclose(two["spectral_norm"], singular[:, 0], rtol=1e-6)
    pd.testing.assert_frame_equal(table[:3], scan(Model().self_attn).assign(module="self_attn"))


@pytest.mark.parametrize("part", [lambda m: m, lambda m: m.multihead_attn])  # among others, and alone
def test_its_file_and_its_pictures(part, tmp_path):
    made = Scan.of(part(Model()), name="model")
    text = json.dumps(made.to_json(), allow_nan=False)
    (tmp_path / "scan.json").write_text(text)
    again = Scan.from_json(json.loads(text))
    pd.testing.assert_frame_equal(again.table, made.table)
    assert again.eigenvalues.keys() == made.eigenvalues.keys()
    assert np.isnan(again.eigenvalues[made.table["module"].iloc[-1]]).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(draw_scan(again, tmp_path)) == 4
        assert report([tmp_path / "scan.json"]).html


def test_a_covariance_is_refused():
    with pytest.raises(LocaterError, match="multihead_attn are made of different states"):
        scan(Model(), covariance=torch.eye(12))


@pytest.mark.parametrize("frozen", [(), ("q_proj_weight",), ("k_proj_weight",)])
def test_locater_counts_the_scale_alone(frozen):
    model = Model()
    for name in frozen:
        getattr(model.multihead_attn, name).requires_grad_(False)
    reg = LocAteR(model.multihead_attn, scale_strength=0.3, mean_strength=0.7)
    torch.testing.assert_close(reg.penalty(), 0.3 * reg.attentions[0].qk().dense().square().sum())
    reg.penalty().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    reg.add_gradient_()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, expected)
    assert reg.measure().keys() == {"penalty", "/scale"}


def test_a_regulariser_trains_beside_an_optimizer():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = LocAteR(model, scale_strength=0.01, mean_strength=0.01).attach(optimizer)
    before = scan(model)["scale"].to_numpy()[3:]
    for _ in range(3):
        optimizer.zero_grad()
        (0.0 * model(torch.randn(1, 4, 12), torch.randn(1, 5, 7)).sum()).backward()
        optimizer.step()
    assert (scan(model)["scale"].to_numpy()[3:] < before).all()
    assert "multihead_attn/trace" not in reg.measure()
    assert "self_attn/trace" in reg.measure()


def test_decoupled_locater_bounds_what_a_step_does_to_them():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    DecoupledLocAteR(model, change=1e-3).attach(optimizer)
    model(torch.randn(1, 4, 12), torch.randn(1, 5, 7)).square().sum().backward()
    weight = model.multihead_attn.q_proj_weight
    before, update = weight.detach().clone(), weight.grad.clone()
    optimizer.step()
    kept = ((weight.detach() - before) / -update).median()
    assert 0 < kept < 0.5


@pytest.mark.parametrize("method", [QKClip(1e-3), QKDecay(0.1), SigmaReparam()])
def test_rivals_act_on_it_as_on_any(method):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method.apply(model, optimizer)
    model(torch.randn(1, 4, 12), torch.randn(1, 5, 7)).square().sum().backward()
    optimizer.step()
