"""The explorer in a browser: it does what its controls say, quickly, and looks right."""

from __future__ import annotations

import numpy as np
import pytest
from explorer_page import CORRECTED, DEFAULT, EXACT, GAUSSIAN, PRINTED, SHOWN, drawn, python_rho

from clicking import click_plot, eventually
from locater import TokenProcess
from locater.theory import entropy_lower_bound, moments, normal_spectrum
from timing import least

pytest_plugins = ["browser"]


# ---------------------------------------------------------------------- controls


def test_each_slider_moves_the_curves_by_the_keyboard(explorer):
    page = explorer("#mean=0.3&std=0.1&d=16&T=20&process=ar&decay=0.5&temperature=4")
    page.evaluate("explorer.planeSettled()")
    before = page.evaluate(SHOWN)[EXACT]
    for field in ("mean", "std", "d", "T", "temperature", "decay"):
        slider = page.locator(f"#{field}")
        slider.focus()
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        shown = page.evaluate(SHOWN)
        state = page.evaluate("explorer.state()")
        np.testing.assert_allclose(shown[EXACT], python_rho(state), rtol=0, atol=1e-6)
        np.testing.assert_allclose(shown[GAUSSIAN], python_rho(state, "gaussian"), rtol=0, atol=1e-9)
        assert shown[EXACT] != before
        assert slider.get_attribute("aria-valuetext") == page.locator(f"#{field}-number").input_value()
        before = shown[EXACT]
    assert page.locator("#status").inner_text().startswith("ρ and softmax computed in ")


def test_every_position_of_a_slider_stands_for_a_value_that_leads_back_to_it(explorer):
    page = explorer()
    astray = page.evaluate(
        """() => Object.entries(settings.FIELDS).flatMap(([name, { steps, value, position, least, most }]) => {
          const places = Array.from({ length: steps[1] - steps[0] + 1 }, (_, n) => steps[0] + n);
          return places.filter((n) => Math.abs(position(value(n)) - n) > 0.5 || value(n) < least || value(n) > most)
            .map((n) => [name, n]);
        })"""
    )
    assert astray == []


def test_numbers_can_be_typed_and_nonsense_is_put_back(explorer):
    page = explorer()
    box = page.locator("#mean-number")
    box.fill("0.1234")
    box.press("Enter")
    np.testing.assert_allclose(page.evaluate(SHOWN)[EXACT], python_rho(DEFAULT | {"mean": 0.1234}), rtol=0, atol=1e-6)
    for field, nonsense, kept in (
        ("T", "1000", "40"),
        ("d", "0", "128"),
        ("std", "-1", "0.1"),
        ("temperature", "", "11.314"),
    ):
        box = page.locator(f"#{field}-number")
        box.fill(nonsense)
        box.press("Enter")
        assert box.input_value() == kept
    page.get_by_role("button", name="Reset").click()
    page.evaluate("explorer.settled()")
    assert page.evaluate("explorer.state().mean") == 0.3


def test_the_temperature_follows_d_until_it_is_set(explorer):
    page = explorer()
    page.evaluate("explorer.change({ d: 64 })")
    assert page.locator("#temperature-number").input_value() == "8"
    page.locator("#root-d").uncheck()
    page.evaluate("explorer.change({ d: 100 })")
    assert page.locator("#temperature-number").input_value() == "8"
    page.locator("#root-d").check()
    assert page.locator("#temperature-number").input_value() == "10"
    page.evaluate("explorer.settled()")


def test_formulas_of_the_random_walk_are_not_shown_for_other_tokens(explorer):
    page = explorer()
    page.get_by_label("independent").check()
    assert set(page.evaluate(SHOWN)) == {EXACT, GAUSSIAN}
    assert page.locator("#forms tr", has_text="printed").inner_text().endswith("for the random walk only")
    page.get_by_label("a random walk").check()
    shown = page.evaluate(SHOWN)
    assert set(shown) == {EXACT, GAUSSIAN, CORRECTED, PRINTED}
    gap = np.abs(np.array(shown[PRINTED]) - shown[EXACT]).max()
    assert page.locator("#forms tr", has_text="printed").inner_text().endswith(f"{gap:.4f}")


def test_the_address_keeps_the_state(fresh_explorer):
    page = fresh_explorer("#mean=-0.2&std=0.05&d=12&T=17&process=ar&decay=0.8&temperature=2.5")
    state = page.evaluate("explorer.state()")
    asked = {"mean": -0.2, "std": 0.05, "d": 12, "T": 17, "process": "ar", "decay": 0.8, "temperature": 2.5}
    assert state | asked == state
    page.evaluate("explorer.change({ T: 21 })")
    assert eventually(page, "location.hash.includes('T=21')")  # the address follows when things are at rest
    page.reload()
    page.evaluate("explorer.settled()")
    assert page.evaluate("explorer.state()") == state | {"T": 21}
    page.evaluate("() => { location.hash = '#mode=limit&xi=12&eta=0.5' }")
    assert eventually(page, "explorer.state().xi === 12")
    assert set(page.evaluate(SHOWN)) == {CORRECTED, PRINTED}


def test_an_address_of_nonsense_gives_the_default(fresh_explorer):
    page = fresh_explorer("#mean=much&d=1e9&T=-3&process=__proto__&mode=<img>&constructor=1&temperature=0")
    state = page.evaluate("explorer.state()")
    assert state | DEFAULT == state


def test_a_click_on_the_plane_moves_the_spectrum_there(explorer):
    page = explorer("#d=16&T=12")
    page.evaluate("explorer.planeSettled()")
    page.locator("#plane").scroll_into_view_if_needed()
    box = page.locator("#plane .nsewdrag").bounding_box()
    place = (box["x"] + 0.75 * box["width"], box["y"] + 0.4 * box["height"])
    click_plot(page, "document.getElementById('plane')", place)
    page.evaluate("explorer.settled()")
    # ξ from −4 to 4, log₁₀ η from 2 at the top to −3; a cell is 1/128 wide and 1/96 high
    assert float(page.locator("#xi-value").inner_text()) == pytest.approx(2, abs=8 / 128)
    assert np.log10(float(page.locator("#eta-value").inner_text())) == pytest.approx(0, abs=5 / 96)


def test_a_click_where_no_spectrum_is_moves_nothing(explorer):
    page = explorer("#d=1&T=12")  # a single eigenvalue has ξ = 1 or −1
    page.evaluate("explorer.planeSettled()")
    before = page.evaluate("explorer.state()")
    page.locator("#plane").scroll_into_view_if_needed()
    box = page.locator("#plane .nsewdrag").bounding_box()
    place = (box["x"] + 0.7 * box["width"], box["y"] + 0.4 * box["height"])
    click_plot(page, "document.getElementById('plane')", place)
    page.evaluate("explorer.settled()")
    assert page.evaluate("explorer.state()") == before
    assert "a single eigenvalue has ξ = ±1" in page.locator("#plane-caption").inner_text()


def test_the_bound_on_entropy_is_pythons_and_is_marked_at_the_spectrums_own_logits(explorer):
    page = explorer("#mean=0.001&std=0.002&d=64&T=30")
    lines = drawn(page, "entropy")
    for name, form in (("Eq. (9) printed", "printed"), ("Zhai et al.", "zhai")):
        np.testing.assert_allclose(lines[name]["y"], entropy_lower_bound(lines[name]["x"], 30, form), rtol=1e-12)
    law = moments(normal_spectrum(0.001, 0.002, 64), TokenProcess.random_walk(30), 8.0)
    nu = 30 * np.sqrt((law.variance + (law.mean - 1 / 30) ** 2).sum())
    assert page.evaluate("document.getElementById('entropy').layout.shapes.at(-1).x0") == pytest.approx(nu)
    assert f"entropy ≥ {entropy_lower_bound(nu, 30):.3f} nats" in page.locator("#entropy-caption").inner_text()


# ---------------------------------------------------------------------- how it feels and looks


# one slider moved to and fro as a hand does, and the seconds until each move was painted
MOVES = """async (name) => {
  const slider = document.getElementById(name), found = [];
  for (let k = 0; k < 10; k++) {
    slider.value = Number(slider.value) + (k % 2 ? 3 : -2);
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await explorer.settled();
    found.push(explorer.latency() / 1000);
    await new Promise((resolve) => setTimeout(resolve, 16));
  }
  return found;
}"""


# the plane waits for the sliders' rest; where cores are few, ten seconds of refining it would be in the moves' way
NO_NEW_PLANE = """() => {
  const post = Worker.prototype.postMessage;
  window.askForPlanes = () => { Worker.prototype.postMessage = post; };
  Worker.prototype.postMessage = function (message) { if (message.task !== "plane") post.call(this, message); };
}"""


@pytest.fixture
def explorer_at_rest(explorer):
    """The same with a plane that is done and stays as it is."""
    page = explorer("#d=8&T=8")
    page.evaluate("explorer.planeSettled()")
    page.evaluate(NO_NEW_PLANE)
    yield explorer
    page.evaluate("askForPlanes()")
    explorer("#d=8&T=8")


@pytest.mark.timed
@pytest.mark.parametrize("field", ["mean", "std", "d", "T", "temperature", "decay"])
def test_every_move_is_on_the_screen_within_150_ms_at_the_largest_size(explorer_at_rest, field):
    process = "ar" if field == "decay" else "walk"
    page = explorer_at_rest(f"#mean=0&std=0.5&d=256&T=128&process={process}")  # a mean of zero is the slowest to settle
    assert least(lambda: max(page.evaluate(MOVES, field)), 0.15) < 0.15


def luminance(colour):
    red, green, blue = (int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


def test_dark_mode_is_dark_at_once_and_when_it_is_switched_on(fresh_explorer):
    colours = """() => {
      const style = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
      const inks = [style("body", "color"), style("#rho .xtitle", "fill"), style("#forms td", "color")];
      return [style("body", "backgroundColor"), ...inks];
    }"""
    page = fresh_explorer("#d=8&T=8", dark=True)
    paper, *inks = map(luminance, page.evaluate(colours))
    assert paper < 0.1
    assert all(ink > 0.7 for ink in inks)
    in_the_picture = page.evaluate(colours)[2]
    page.emulate_media(color_scheme="light")
    assert eventually(page, f"({colours})()[2] !== '{in_the_picture}'")
    paper, *inks = map(luminance, page.evaluate(colours))
    assert paper > 0.95
    assert all(ink < 0.2 for ink in inks)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_all_of_it_and_keeps_the_curves_in_sight_of_the_sliders(fresh_explorer, dark):
    page = fresh_explorer("#d=8&T=8&process=ar&map=softmax", width=390, height=844, dark=dark)
    page.evaluate("explorer.planeSettled()")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    sides = page.evaluate(
        """() => Array.from(document.querySelectorAll(".plot, .field, .caption, #forms, #preset, .main-svg"))
          .map((element) => element.getBoundingClientRect()).filter(({ width }) => width > 0)
          .map(({ left, right }) => [left, right])"""
    )
    assert min(left for left, _ in sides) >= 0
    assert max(right for _, right in sides) <= 390
    page.locator("#T").scroll_into_view_if_needed()
    page.evaluate("document.getElementById('T').scrollIntoView({ block: 'center' })")
    plot, slider = page.locator("#rho").bounding_box(), page.locator("#T").bounding_box()
    assert plot["y"] >= 0
    assert plot["y"] + plot["height"] < slider["y"] < 844


def test_the_page_prints_light_and_as_wide_as_paper_and_comes_back(fresh_explorer):
    page = fresh_explorer("#d=8&T=8", dark=True)
    page.evaluate("explorer.planeSettled()")
    widths = "Array.from(document.querySelectorAll('.plot .main-svg'), (svg) => svg.getBoundingClientRect().width)"
    before = page.evaluate(widths)
    seen = f"window.atPrint = [getComputedStyle(document.body).backgroundColor, Math.max(...{widths})]"
    page.evaluate("() => addEventListener('beforeprint', () => { " + seen + " })")
    page.pdf()
    paper, widest = page.evaluate("atPrint")
    assert luminance(paper) > 0.95
    assert widest <= 43 * 16  # 18 cm
    page.evaluate("explorer.settled()")
    assert page.evaluate(widths) == before
