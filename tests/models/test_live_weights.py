"""Scans of live models: compiled, on the meta device, quantised, with and without QK-norm.

Sharded ones: tests/control/test_distributed.py, on two ranks.
"""

from __future__ import annotations

import pandas as pd
import pytest
import torch
import transformers as tf
from torch import nn
from zoo import GROUPED, build

from locater import LocaterError, scan


def test_a_compiled_models_modules_have_the_names_they_have_uncompiled():
    model = build("llama")
    compiled = torch.compile(model, backend="eager")
    pd.testing.assert_frame_equal(scan(compiled), scan(model))
    named = {f"_orig_mod.{module}": 2 * torch.eye(32) for module in scan(model)["module"].unique()}
    pd.testing.assert_frame_equal(scan(compiled, covariance=named), scan(model, covariance=2 * torch.eye(32)))


def test_parameters_without_values_are_one_sentence():
    with torch.device("meta"):
        everywhere = build("llama")
    partly = build("llama")
    partly.model.layers[1].self_attn.k_proj.to("meta")
    for model in (everywhere, partly, everywhere.model.layers[0].self_attn):
        with pytest.raises(LocaterError, match=r"weight is on the meta device and has no values: load the weights"):
            scan(model)


class Packed(torch.Tensor):
    """As torchao's are: numbers of their own, behind torch's functions."""


Packed.__module__ = "torchao.quantization"


def test_quantised_parameters_are_one_sentence():
    model = build("llama")
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Packed), requires_grad=False)
    with pytest.raises(LocaterError, match=r"q_proj.weight is torchao's Packed, .*16-bit model"):
        scan(model)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(torch.Tensor).to(torch.float8_e4m3fn))
    with pytest.raises(LocaterError, match=r"q_proj.weight is torch.float8_e4m3fn"):
        scan(model)


@pytest.mark.parametrize("there", [False, True])
def test_qk_norm_is_said_where_there_is_one(there):
    config = tf.CohereConfig(**GROUPED, use_qk_norm=there, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    assert scan(tf.CohereForCausalLM(config))["qk_norm"].tolist() == [there] * 8
