"""The proof for each family: from hidden states and the extracted parts, the model's own logits."""

from __future__ import annotations

import pytest
import torch
from zoo import FAMILIES, build, inputs, recorded_logits

from locater.models import attentions


@pytest.mark.parametrize("name", FAMILIES)
def test_predicted_logits_equal_the_models_own(name):
    model = build(name)
    with torch.no_grad(), recorded_logits(model) as recorded:
        model(**inputs(name))
    sites = attentions(model)
    assert {site.module for site in sites} == set(recorded)
    for site in sites:
        query_states, key_states, own = recorded[site.module]
        with torch.no_grad():
            predicted = site.logits(query_states, key_states)
        own = own.reshape(predicted.shape)
        visible = own > -1e30  # the rest is masked
        assert visible.float().mean() > 0.4
        gap = (predicted - own)[visible].abs().max()
        assert gap <= 1e-4 * own[visible].abs().max(), f"{site.module}: off by {gap:.2e}"
