"""Softmax attention on a measurement's page: every law beside what was measured, and a click chooses a head."""

from __future__ import annotations

import json

import numpy as np
import pytest
from report_inputs import write_measurement

from locater import LocaterError
from locater.pages.report import report

pytest_plugins = ["browser"]

MODULES, HEADS, KEYS = 2, 3, 12


def write(file, change=None):
    """Head h of module m has an entropy of 1 + m + h/10; the general law adds 0.05, K ⊗ Σ 0.5."""
    content = json.loads(write_measurement(file, modules=MODULES, heads=HEADS, length=KEYS).read_text())
    for m, one in enumerate(content["predicted"].values()):
        entropy = 1 + m + 0.1 * np.arange(HEADS)
        weights = np.full((HEADS, KEYS), 1 / KEYS)
        weights[:, 0] = 1e-4
        one["attention"] = [
            {
                "query": KEYS - 1,
                "entropy": {
                    "measured": entropy.tolist(), "error": [0.01] * HEADS,
                    "general": (entropy + 0.05).tolist(), "separable": (entropy + 0.5).tolist(),
                },
                "weights": {"measured": weights.tolist(), "general": weights.tolist(), "separable": weights.tolist()},
            }
        ]  # fmt: skip
    row = {"law": "general", "heads": 6, "median": 0.05, "percentile_90": 0.06, "rank_correlation": 1.0, "floor": 0.008}
    content["entropy_agreement"] = [row]
    if change is not None:
        change(content)
    file.write_text(json.dumps(content))
    return file


def test_a_measurement_has_the_entropies_and_weights_of_every_law_it_names(tmp_path):
    (section,) = report([write(tmp_path / "measured.json")]).sections
    softmax = section["softmax"]
    assert softmax["laws"] == ["general", "separable"]
    assert softmax["query"] == KEYS
    assert softmax["modules"][1]["entropy"]["general"] == pytest.approx([2.05, 2.15, 2.25])
    assert softmax["agreement"][0]["median"] == 0.05
    (before,) = report([write_measurement(tmp_path / "before.json")]).sections
    assert before["softmax"] is None  # a file of a version that predicted ρ alone


def test_predictions_of_another_shape_than_what_was_measured_are_refused(tmp_path):
    def cut(content):
        content["predicted"]["layers.0.attn"]["attention"][0]["entropy"]["general"].pop()

    def without(content):
        del content["predicted"]["layers.1.attn"]["attention"][0]["weights"]["measured"]

    with pytest.raises(LocaterError, match=r"layers\.0\.attn .* differ in shape"):
        report([write(tmp_path / "cut.json", cut)])
    with pytest.raises(LocaterError, match=r"layers\.1\.attn .* has no measured weights"):
        report([write(tmp_path / "without.json", without)])


def test_a_click_on_a_head_shows_its_weights(tmp_path, browser_page):
    file = tmp_path / "page.html"
    report([write(tmp_path / "measured.json")]).write(file)
    page = browser_page(file)
    page.wait_for_selector("html[data-plots=drawn]")
    plot = "[aria-label='predicted against measured entropy']"
    names, measured, general = page.evaluate(
        f"""() => {{ const d = document.querySelector("{plot}").data;
        return [d.map((t) => t.name), d[1].x, d[1].y]; }}"""
    )
    assert names[:2] == ["K ⊗ Σ", "general law"]
    np.testing.assert_allclose(np.subtract(general, measured), 0.05, atol=1e-4)
    page.evaluate(f"""() => {{ const p = document.querySelector("{plot}");
        p.emit("plotly_click", {{ points: [{{ data: p.data[1], pointNumber: 4 }}] }}); }}""")
    assert page.locator("h4").first.text_content().startswith("layer 1, head 1")
    weights = page.evaluate("""() => document.querySelector("[aria-label='weights by key']").data.at(-1).y""")
    np.testing.assert_allclose(weights, [1e-4] + [1 / KEYS] * (KEYS - 1), rtol=1e-5)
    assert page.locator("td", has_text="general law").count() == 1
