"""Figures 1 to 5 and those of softmax: three files each, all or none, and data that says what the figure claims."""

from __future__ import annotations

import json
import struct
import xml.etree.ElementTree

import numpy as np
import pytest

from locater import LocaterError
from locater.figures import FIGURES, FROM_RUNS, OF_SOFTMAX, _softmax, draw
from locater.theory import ATTENTION_REGIMES

FROM_THEORY = [*(number for number in FIGURES if number not in FROM_RUNS), *OF_SOFTMAX]


def figure_2_shows_printed_corrected_and_exact(data):
    exact = next(name for name in data if name.startswith("exact"))
    for name in ("printed", "corrected", exact):
        values = np.array([data[name][xi] for xi in ("-10", "0", "10")])
        assert values.shape == (3, len(data["theta"]), len(data["eta"]))
        assert ((values >= 0) & (values <= 1)).all()
    # mirror images, and only for the right variance
    np.testing.assert_allclose(np.array(data["corrected"]["5"])[30], np.array(data["corrected"]["-5"])[32], atol=1e-9)


def figure_4_shows_the_printed_bound_above_ln_t(data):
    assert max(data["printed"]) > data["ln_T"] > max(data["zhai"]) - 1e-9


def figure_5_draws_the_exact_law_through_the_simulated_points(data):
    for kind in ("isotropic", "anisotropic"):
        for panel in ("std=0.05", "mean=0.3"):
            for line in data[kind][panel].values():
                gap = np.abs(np.array(line["simulated"]) - np.array(line["exact"]))
                assert gap.max() < 5 * np.sqrt(0.25 / 3000)


def the_spectra_show_every_regime_of_softmax_and_the_law_through_the_points(data):
    shown = [spectrum["regime"].partition(":")[0] for spectrum in data["spectra"]]
    assert sorted(shown) == sorted(ATTENTION_REGIMES.values())
    for spectrum in data["spectra"]:
        exact, counted = (np.array(spectrum["weights"][name]) for name in ("exact", "simulated"))
        error = np.sqrt(exact * (1 - exact) / data["walks"])  # at most: a weight is within 0 and 1
        assert (np.abs(exact - counted) < 4 * error + 1 / data["walks"]).all()
        assert sum(spectrum["weights"]["exact"]) == pytest.approx(1, abs=1e-9)


def the_regimes_of_the_three_processes_are_the_same_rule_over_other_numbers(data):
    middle = len(data["trace"]) // 2
    for process in _softmax.PROCESSES:
        names, share = np.array(data[process]["name"]), np.array(data[process]["entropy_share"])
        assert (names[share >= 0.9] == "uniform").all()
        assert (np.char.startswith(names, "collapsed") == (share <= 0.1)).all()
        assert names[middle][0] == "uniform"
        assert names[middle][-1] == "collapsed others"


CLAIMS = {
    2: figure_2_shows_printed_corrected_and_exact,
    4: figure_4_shows_the_printed_bound_above_ln_t,
    5: figure_5_draws_the_exact_law_through_the_simulated_points,
    "spectra": the_spectra_show_every_regime_of_softmax_and_the_law_through_the_points,
    "regimes": the_regimes_of_the_three_processes_are_the_same_rule_over_other_numbers,
}
"""What the data of a figure say, beside the picture so that it is drawn once."""


@pytest.mark.parametrize("which", FROM_THEORY)
def test_a_figure_is_a_picture_a_drawing_and_data_that_say_what_it_claims(which, tmp_path, monkeypatch):
    monkeypatch.setattr(_softmax, "_GRID", (7, 5))  # half a minute less
    written = draw(which, tmp_path)
    png, svg, data = written
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 900
    assert height >= 500
    assert xml.etree.ElementTree.parse(svg).getroot().tag.endswith("svg")
    shown = json.loads(data.read_text())
    assert shown["figure"] == which
    name = which if isinstance(which, str) else f"figure-{which}"
    assert [path.name for path in written] == [f"{name}.{kind}" for kind in ("png", "svg", "json")]
    assert sorted(tmp_path.iterdir()) == sorted(written)
    if which in CLAIMS:
        CLAIMS[which](shown)


def test_a_folder_that_cannot_be_written_is_named_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LocaterError, match=r"cannot write into the folder .*file"):
        draw(5, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_unknown_figure_is_refused(tmp_path):
    with pytest.raises(LocaterError, match=r"figure must be one of .*, 11, 12, spectra, regimes, got 13"):
        draw(13, tmp_path / "new")
    assert not (tmp_path / "new").exists()
