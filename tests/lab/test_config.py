"""What runs may differ in, and what the paper's strengths are beside a loss that is averaged per token."""

from __future__ import annotations

from dataclasses import fields

import pytest

from locater.lab.config import (
    FREE_IN_ARENA,
    FREE_TO_COMPARE,
    FREE_TO_RESUME,
    READINGS,
    Config,
    ModelConfig,
    members_for,
    paper_strengths,
)


@pytest.mark.parametrize("free", [FREE_IN_ARENA, FREE_TO_COMPARE, FREE_TO_RESUME])
def test_what_may_differ_are_settings(free):
    assert set(free) <= {field.name for each in (Config, ModelConfig) for field in fields(each)}


def test_configurations_are_the_same_but_for_what_may_differ():
    one = Config()
    assert one.same_but(FREE_TO_RESUME, one.changed(steps=7, data="elsewhere"))
    assert not one.same_but(FREE_TO_RESUME, one.changed(record_every=7))
    assert one.same_but(FREE_IN_ARENA, one.changed(method="qk-norm"))  # a setting of the model
    assert not one.same_but(FREE_IN_ARENA, one.changed(width=64))


def test_without_nothing_is_all_of_it():
    assert Config().without(()) == Config().to_json()


@pytest.mark.parametrize(
    ("reading", "strengths"),
    [
        ("figures", (1 / 512, 100 / 512)),
        ("trace-mean", (1, 100)),
        ("scale-sum", (100 / 512, 1 / 512)),
        ("printed", (100, 1)),
    ],
)
def test_a_reading_says_what_stands_before_the_scale_and_the_trace(reading, strengths):
    assert paper_strengths(100, 1, 512, reading) == strengths
    assert reading in READINGS
    (member,) = members_for(Config(batch=8), [1.0], learning_rate=1e-3, reading=reading)
    assert (member.scale_strength, member.mean_strength) == strengths
