"""A module that several layers use (ALBERT): rows for each of them in a scan, counted once by a regulariser."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
import transformers as tf
from zoo import SMALL, recorded_logits

from locater import LocAteR, scan
from locater.control import DecoupledLocAteR
from locater.models import Scan, attentions


def albert(**more):
    torch.manual_seed(0)
    options = {**SMALL, "embedding_size": 16, "num_hidden_layers": 4, **more}
    return tf.AlbertModel(tf.AlbertConfig(**options), add_pooling_layer=False).eval()


# layers, groups, modules in a group, and the module (group, inner) of every layer as they run
USES = [
    (4, 1, 1, [(0, 0)] * 4),
    (4, 2, 1, [(0, 0), (0, 0), (1, 0), (1, 0)]),
    (3, 1, 2, [(0, 0), (0, 1)] * 3),
    (2, 2, 1, [(0, 0), (1, 0)]),
]


@pytest.mark.parametrize(("layers", "groups", "inner", "modules"), USES)
def test_a_scan_has_rows_for_every_layer(layers, groups, inner, modules):
    model = albert(num_hidden_layers=layers, num_hidden_groups=groups, inner_group_num=inner)
    ran = []
    for name, module in model.named_modules():
        if name.endswith(".attention"):
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    model(input_ids=torch.tensor([[3, 4, 5]]))
    table = scan(model).sort_values(["layer", "head"], kind="stable")
    found = table[table["head"] == 0]
    assert list(found["layer"]) == list(range(layers * inner))
    assert [name.split("@")[0] for name in found["module"]] == ran
    assert found["module"].is_unique
    names = [f"encoder.albert_layer_groups.{group}.albert_layers.{step}.attention" for group, step in modules]
    assert ran == names


def test_rebuilt_logits_are_the_models_own():
    model = albert()
    with torch.no_grad(), recorded_logits(model) as seen:
        model(input_ids=torch.tensor([[3, 4, 5, 6]]))
    (attention,) = attentions(model)
    query, key, logits = seen[attention.module]
    torch.testing.assert_close(attention.logits(query, key).detach(), logits)


def test_some_layers_its_file_and_a_checkpoint(tmp_path):
    model = albert()
    assert list(scan(model, layers=[1, 3])["layer"].unique()) == [1, 3]
    made = Scan.of(model, name="albert")
    again = Scan.from_json(json.loads(json.dumps(made.to_json())))
    pd.testing.assert_frame_equal(again.table, made.table)
    model.save_pretrained(tmp_path)
    pd.testing.assert_frame_equal(scan(tmp_path), made.table)


@pytest.mark.parametrize("make", [lambda m: LocAteR(m, scale_strength=0.3, mean_strength=0.7), DecoupledLocAteR])
def test_a_regulariser_counts_it_once(make):
    assert len(make(albert()).attentions) == 1
    reg = LocAteR(albert(), scale_strength=0.3, mean_strength=0.0)
    weight = reg.attentions[0].qk().dense()
    torch.testing.assert_close(reg.penalty(), 0.3 * weight.square().sum())
