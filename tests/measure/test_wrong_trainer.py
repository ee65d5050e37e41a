"""Callbacks of one name for two trainers: the wrong one is refused, and told which import is right."""

from __future__ import annotations

import copy
import re

import pytest
from torch.utils.data import DataLoader
from zoo import build

import locater.control.hf
import locater.control.lightning
import locater.measure.hf
import locater.measure.lightning
from locater import LocAteR, LocaterError
from trainers import InOrder, Module, Text, lightning_trainer

CALLBACKS = {
    "measure": ("ObserveCallback", lambda kind, _, folder: kind(file=folder / "attention.jsonl")),
    "control": ("LocAteRCallback", lambda kind, model, _: kind(LocAteR(model, scale_strength=1e-3, mean_strength=0))),
}


@pytest.fixture
def model():
    return build("gpt2")


def callback(room, trainer, model, folder):
    name, make = CALLBACKS[room]
    return make(getattr(getattr(getattr(locater, room), trainer), name), model, folder)


def to_hugging_face(wrong, model, folder):
    InOrder(model, folder, [wrong])


def to_lightning(wrong, model, folder):
    lightning_trainer(folder, [wrong]).fit(Module(model), DataLoader(Text(), batch_size=2))


@pytest.mark.parametrize("room", CALLBACKS)
@pytest.mark.parametrize(
    ("own", "whose", "others", "right", "give"),
    [
        ("lightning", "Lightning's", "Hugging Face's", "hf", to_hugging_face),
        ("hf", "Hugging Face's", "Lightning's", "lightning", to_lightning),
    ],
)
def test_the_other_librarys_trainer_refuses_it(room, own, whose, others, right, give, model, tmp_path):
    wrong, name = callback(room, own, model, tmp_path), CALLBACKS[room][0]
    said = (
        f"locater.{room}.{own}.{name} is for {whose} Trainer; for {others}: from locater.{room}.{right} import {name}"
    )
    with pytest.raises(LocaterError, match=re.escape(said)):
        give(wrong, model, tmp_path)


def test_a_subclass_is_told_of_the_class_it_can_import(model, tmp_path):
    class Mine(locater.measure.lightning.ObserveCallback):
        pass

    with pytest.raises(LocaterError, match=r"from locater\.measure\.hf import ObserveCallback"):
        InOrder(model, tmp_path, [Mine(file=tmp_path / "attention.jsonl")])


@pytest.mark.parametrize("room", CALLBACKS)
@pytest.mark.parametrize("trainer", ["hf", "lightning"])
def test_other_attributes_are_missing_as_they_ever_were(room, trainer, model, tmp_path):
    one = callback(room, trainer, model, tmp_path)
    assert f"locater.{room}.{trainer}." in repr(one)
    assert not hasattr(one, "nothing")
    assert isinstance(copy.copy(one), type(one))


def test_a_callback_cannot_add_itself_to_lightnings_trainer(model, tmp_path):
    with pytest.raises(LocaterError, match=r"add_to is for Hugging Face's Trainer, got lightning\."):
        callback("control", "hf", model, tmp_path).add_to(lightning_trainer(tmp_path, []))
