"""The explorer's numbers, computed in a browser, are Python's."""

from __future__ import annotations

import numpy as np
import pytest
from explorer_page import (
    CORNERS,
    CORRECTED,
    DEFAULT,
    EXACT,
    PRINTED,
    SHOWN,
    drawn,
    process_of,
    python_rho,
    random_states,
    regimes_of,
)

from locater import TokenProcess, rho
from locater.figures import _paper
from locater.theory import moments, normal_spectrum, regime, regime_map, regime_map_at, simulate

pytest_plugins = ["browser"]


def test_rho_in_the_page_is_pythons_by_every_formula(explorer, full):
    states = CORNERS + list(random_states(2000 if full else 90, seed=0))
    page = explorer()
    found = page.evaluate(
        """async (states) => {
          const results = [];
          for (const state of states) {
            const { rho, xi, eta, nu, regime } = await explorer.compute(state);
            const lists = Object.fromEntries(Object.entries(rho).map(([form, y]) => [form, Array.from(y)]));
            results.push({ rho: lists, xi, eta, nu, regime });
          }
          return results;
        }""",
        states,
    )
    for state, result in zip(states, found, strict=True):
        assert set(result["rho"]) >= {"exact", "gaussian"}
        assert ("printed" in result["rho"]) == (state["process"] == "walk")
        for form, values in result["rho"].items():
            # the law's own promise is 1e-6, and what the page settles for is 1e-7 before a last halving; the others are
            # closed forms, apart from it by rounding (of covariances of nearly equal tokens, at worst)
            tolerance = 1e-7 if form == "exact" else 1e-9
            np.testing.assert_allclose(
                values, python_rho(state, form), rtol=0, atol=tolerance, err_msg=f"{form} {state}"
            )
        assert result["regime"] == regime(python_rho(state))
        w = normal_spectrum(state["mean"], state["std"], state["d"])
        lam = state["temperature"] or np.sqrt(state["d"])
        if w.any():
            np.testing.assert_allclose(result["xi"], w.sum() / np.sqrt((w**2).sum()), rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(result["eta"], np.sqrt((w**2).sum()) / lam, rtol=1e-9)
        law = moments(w, process_of(state), lam)  # E‖ω − ω̄‖², as z = 1/T + (ω − ω̄)/T
        norm = state["T"] * np.sqrt((law.variance + (law.mean - 1 / state["T"]) ** 2).sum())
        np.testing.assert_allclose(result["nu"], norm, rtol=1e-7, atol=1e-9)


def test_the_law_of_the_page_takes_any_spectrum(explorer):
    rng = np.random.default_rng(0)
    spectra = [
        rng.standard_normal(7) ** 3,
        np.concatenate([[5.0], 1e-3 * rng.standard_normal(63)]),  # one dominates
        -rng.exponential(size=12),
        np.array([1.0, -1.0, 1e-16]),  # the last a rounding error of zero
        10.0 ** -np.arange(16),
    ]
    page = explorer()
    for spectrum in spectra:
        found = page.evaluate(
            "(w) => Array.from(theory.exactRho(w, theory.tokenProcess('walk', 12), 1.5))", spectrum.tolist()
        )
        np.testing.assert_allclose(found, rho(spectrum, TokenProcess.random_walk(12), 1.5), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "state",
    [
        DEFAULT | {"d": 16, "T": 12},
        DEFAULT | {"d": 9, "T": 30, "process": "ar", "decay": -0.7},
        DEFAULT | {"d": 1, "T": 4},
    ],
)
def test_the_plane_shows_the_regimes_of_the_exact_law(explorer, state):
    page = explorer()
    page.evaluate("(state) => explorer.change(state)", state)
    page.evaluate("explorer.settled()")
    plane = regimes_of(page)
    assert plane["xi"][-1] == pytest.approx(np.sqrt(state["d"]))
    rows, columns = np.arange(0, 97, 4), np.arange(0, 129, 4)
    expected = regime_map_at(
        np.clip(plane["xi"][columns], -np.sqrt(state["d"]), np.sqrt(state["d"])),
        plane["eta"][rows],
        dim=state["d"],
        process=process_of(state),
    )
    assert (plane["regimes"][np.ix_(rows, columns)] == expected.T).all()


def test_the_plane_of_the_limit_shows_the_regimes_of_equation_6(explorer):
    page = explorer("#mode=limit&xi=40&eta=0.1")
    plane = regimes_of(page)
    assert (plane["regimes"] == regime_map(plane["xi"], plane["eta"]).T).all()
    assert len(np.unique(plane["regimes"])) == 5


def test_a_plane_that_is_no_longer_asked_for_is_given_up(explorer):
    page = explorer()
    for dim in (256, 200, 7):
        page.evaluate("(d) => explorer.change({ d, T: 20 })", dim)
        page.wait_for_timeout(300)  # long enough for the work to begin
    page.evaluate("explorer.settled()")
    assert regimes_of(page)["xi"][-1] == pytest.approx(np.sqrt(7))


# ---------------------------------------------------------------------- the paper's figures


def presets(page, figure):
    return [n for n, preset in enumerate(page.evaluate("explorer.presets")) if preset["figure"] == figure]


def choose(page, preset):
    page.locator("#preset").select_option(str(preset))
    return page.evaluate(SHOWN)


def silent(_share):
    pass


def test_presets_of_figures_1_and_4_draw_its_curves(explorer):
    page = explorer()
    data = _paper.figure_1(silent).data
    for preset, (title, curves) in zip(presets(page, 1), data.items(), strict=True):
        choose(page, preset)
        assert page.evaluate("`T=${explorer.state().T}`") == title
        for name, line in drawn(page, "softmax").items():
            np.testing.assert_allclose(line["x"], curves["omega_1"], rtol=0, atol=1e-12)
            np.testing.assert_allclose(line["y"], curves[name], rtol=0, atol=1e-12)
    data = _paper.figure_4(silent).data
    (preset,) = presets(page, 4)
    choose(page, preset)
    lines = drawn(page, "entropy")
    for name, key in (("Eq. (9) printed", "printed"), ("Zhai et al.", "zhai")):
        np.testing.assert_allclose(lines[name]["x"], data["nu"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(lines[name]["y"], data[key], rtol=1e-12)


def test_presets_of_figure_2_draw_its_columns(explorer, monkeypatch):
    page = explorer()
    monkeypatch.setattr(_paper.np, "geomspace", lambda *_: np.array([0.5, 1.0, 2.0]))  # for its 41 η, of which one is 1
    data = _paper.figure_2(silent).data
    column = int(np.abs(np.array(data["eta"]) - 1).argmin())
    exact = next(name for name in data if name.startswith("exact"))
    chosen = presets(page, 2)
    assert len(chosen) == len(data["printed"]) == 7
    for preset, xi in zip(chosen, data["printed"], strict=True):
        shown = choose(page, preset)
        for name, key, tolerance in ((EXACT, exact, 1e-6), (CORRECTED, "corrected", 1e-9), (PRINTED, "printed", 1e-9)):
            np.testing.assert_allclose(shown[name], np.array(data[key][xi])[:, column], rtol=0, atol=tolerance)


def test_presets_of_figure_3_draw_its_curves(explorer):
    page = explorer()
    data = _paper.figure_3(silent).data
    for preset, xi in zip(presets(page, 3), ("xi=128", "xi=512"), strict=True):
        shown = choose(page, preset)
        assert set(shown) == {CORRECTED, PRINTED}  # no spectrum of d ≤ 256 is that concentrated
        np.testing.assert_allclose(shown[CORRECTED], data[xi]["corrected"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(shown[PRINTED], data[xi]["printed"], rtol=0, atol=1e-12)


def test_presets_of_figure_5_draw_its_lines_up_to_the_draw_of_spectra(explorer):
    page = explorer()
    experiments = simulate((0.05, 0.2, 0.4), [0.05]), simulate([0.3], (0.05, 0.2, 0.8))  # as figure_5 asks for them
    spectra = np.concatenate([each.eigenvalues.reshape(-1, 10, 128) for each in experiments])
    lines = rho(spectra, TokenProcess.random_walk(40), np.sqrt(128))  # (6, 10, 40): the figure shows the mean of ten
    for preset, line in zip(presets(page, 5), lines, strict=True):
        shown = np.array(choose(page, preset)[EXACT])
        # a preset has the quantiles of the normal that each of the ten spectra is a sample of
        error = line.std(0, ddof=1) / np.sqrt(10)
        assert (np.abs(shown - line.mean(0)) < 4 * error + 1e-4).all()
    on_its_spectra = page.evaluate(
        """(spectra) => {
          const process = theory.tokenProcess("walk", 40);
          return spectra.map((w) => Array.from(theory.exactRho(w, process, Math.sqrt(128))));
        }""",
        spectra[0].tolist(),
    )
    np.testing.assert_allclose(np.mean(on_its_spectra, 0), lines[0].mean(0), rtol=0, atol=1e-6)
