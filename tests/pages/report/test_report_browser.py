"""Reports in a browser: they load without a complaint, their controls do what they say, and nothing hostile runs."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from report_inputs import (
    rho_at,
    spectrum,
    write_diagnosis,
    write_log,
    write_measurement,
    write_predictions,
    write_scan,
    write_sweep,
)
from test_report import hostile_files

from clicking import click_plot
from locater.pages.report import report
from timing import least

pytest_plugins = ["browser"]

KAPPAS = (None, 0, 1e-3, 1e-2, 0.1, 1, 10, 100)
PHONE = {"width": 390, "height": 844, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}

# by the text of its caption
FIGURE = """(caption) => [...document.querySelectorAll("figure")]
  .find((figure) => figure.querySelector("figcaption").textContent.startsWith(caption)).querySelector(".plot")"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A page of each kind, of the sizes that must stay quick."""
    folder = tmp_path_factory.mktemp("report")
    made = {
        "sweep": write_sweep(folder / "sweep", kappas=KAPPAS, seeds=(0, 1, 2), records=200, tokens=64),
        "deep": write_sweep(folder / "deep", kappas=(None, 1.0), layers=3, heads=2, tokens=12),
        "scan": write_scan(folder / "scan.json", modules=32, heads=32, width=64),
        "measurement": write_measurement(
            folder / "measure.json",
            alarms=[
                {"step": None, "kind": "sharp", "module": "layers.1.attn", "head": 2, "reason": "its share is low"}
            ],
        ),
        "log": write_log(folder / "log.jsonl", modules=3),
        "prediction": write_predictions(folder / "predictions.json"),
        "diagnosis": write_diagnosis(folder / "doctor.json"),
    }
    pages = {name: report([path]).write(folder / f"{name}.html") for name, path in made.items()}
    pages["all"] = report([made["deep"], made["measurement"], made["log"]]).write(folder / "all.html")
    return pages


@pytest.fixture
def opened(browser_page, files):
    def open_(name, **options):
        page = browser_page(files[name], **options)
        page.wait_for_selector("html[data-plots=drawn]")
        return page

    return open_


def traces(page, caption, what):
    """A property of every trace of a figure."""
    return page.evaluate(f"([caption, what]) => ({FIGURE})(caption).data.map((trace) => trace[what])", [caption, what])


def choose(page, section, label, option):
    """In the part of the page under a heading, the select with that label."""
    box = page.locator("label.choice", has=page.locator(f"span:text-is('{label}')"))
    part = page.locator(f"h3:text-is('{section}') ~ .controls").first
    part.locator(box).locator("select").select_option(option)


def place_of(page, caption, module, head):
    """Where on the screen a cell of a map has its middle."""
    page.evaluate(f"(caption) => ({FIGURE})(caption).scrollIntoView({{block: 'center'}})", caption)
    return page.evaluate(
        f"""([caption, module, head]) => {{
          const plot = ({FIGURE})(caption);
          const box = plot.querySelector(".nsewdrag").getBoundingClientRect();
          const {{xaxis, yaxis}} = plot._fullLayout;
          return [box.left + xaxis.l2p(head), box.top + yaxis.l2p(module)];
        }}""",
        [caption, module, head],
    )


def click_cell(page, caption, *cell):
    click_plot(page, f"({FIGURE})({json.dumps(caption)})", place_of(page, caption, *cell))


# ---------------------------------------------------------------------- a sweep


def test_members_are_switched_on_and_off_in_all_four_plots(opened):
    page = opened("sweep")
    captions = ("validation perplexity", "scale", "attention entropy", "trace")
    assert all(sum(traces(page, caption, "visible")) == 24 for caption in captions)
    page.get_by_role("button", name="κ₂ = 1, seed 1", exact=True).click()
    for caption in captions:
        gone = [
            n for n, on in zip(traces(page, caption, "name"), traces(page, caption, "visible"), strict=True) if not on
        ]
        assert gone == ["κ₂ = 1, seed 1"]
    page.get_by_role("button", name="κ₂ = 1", exact=True).click()  # the rest of the strength joins it
    page.get_by_role("button", name="κ₂ = 1", exact=True).click()
    assert sum(traces(page, "scale", "visible")) == 21
    page.get_by_role("button", name="none", exact=True).click()
    assert sum(traces(page, "scale", "visible")) == 0
    page.get_by_role("button", name="no LocAteR", exact=True).click()
    assert [n for n, on in zip(traces(page, "trace", "name"), traces(page, "trace", "visible"), strict=True) if on] == [
        "no LocAteR, seed 0", "no LocAteR, seed 1", "no LocAteR, seed 2",
    ]  # fmt: skip


def test_the_map_and_the_spectra_show_the_member_that_is_chosen(opened):
    page = opened("sweep")
    labels = page.evaluate("() => [...document.querySelectorAll('label.choice')].map((label) => label.textContent)")
    assert any(label.startswith("member") for label in labels)
    choose(page, "ρ over training", "member", "κ₂ = 10, seed 2")
    member = KAPPAS.index(10) * 3 + 2
    shown = np.array(traces(page, "ρ, κ₂ = 10, seed 2", "z")[0])  # positions × steps
    steps = traces(page, "ρ, κ₂ = 10, seed 2", "x")[0]
    assert steps == [10 * n for n in range(200)]
    np.testing.assert_allclose(shown[:, 17], rho_at(member, 170, 0, 0, 64), atol=1e-4)
    real = np.array(spectrum(1, 1, 8, member))[0, 0, :, 0]
    np.testing.assert_allclose(np.sort(traces(page, "κ₂ = 10, seed 2", "x")[0]), np.sort(real), atol=1e-3)


def test_layers_and_heads_of_a_deep_model_can_be_chosen(opened):
    page = opened("deep")
    choose(page, "ρ over training", "heads", "layer 2, head 1")
    shown = np.array(traces(page, "ρ, no LocAteR", "z")[0])
    np.testing.assert_allclose(shown[:, 3], rho_at(0, 30, 2, 1, 12), atol=1e-4)
    choose(page, "Over training", "heads", "mean of layer 1")
    scale = traces(page, "scale", "y")
    assert scale[0][-1] == pytest.approx(10 + 1 + 0.05 + 0.1 + 0.0005, abs=1e-5)  # drawn first: κ₂ = 1
    choose(page, "Over training", "show", "its second half")
    low, high = page.evaluate(f"({FIGURE})('scale')._fullLayout.xaxis.range")
    assert (low, high) == (25, 50)


def test_the_claims_of_a_sweep_stand_on_the_page(opened):
    page = opened("sweep")
    assert page.locator("table.claims tbody tr").count() == 14
    assert page.get_by_text("LocAteR holds tr WQK at its target, 1").count() == 1


# ---------------------------------------------------------------------- a scan


def test_what_the_doctor_says_comes_first_then_every_finding(opened):
    page = opened("diagnosis")
    assert page.locator("p.says").text_content() == "a logit of 300"
    rows = page.evaluate("() => [...document.querySelectorAll('.claims tbody tr')].map((row) => row.textContent)")
    assert len(rows) == 2
    assert "head 2, 3" in rows[0]
    assert [word in row for word, row in zip(("sure", "likely"), rows, strict=True)] == [True, True]


def test_a_click_on_a_map_shows_the_eigenvalues_of_that_head(opened):
    page = opened("scan")
    for module, head in ((5, 7), (31, 31)):
        click_cell(page, "effective rank", module, head)
        assert page.locator(".detail h4").text_content().startswith(f"layer {module}, head {head}")
        real, mean = traces(page, "eigenvalues", "x")
        assert len(real) == 64
        np.testing.assert_allclose(real, (100 * module + head) / 64, rtol=1e-3)
        np.testing.assert_allclose(mean, (100 * module + head) / 64, rtol=1e-3)
        assert page.locator("tr[aria-selected=true]").count() <= 1
        assert page.locator("select").nth(0).evaluate("(box) => box.selectedOptions[0].text") == str(module)


def test_a_map_over_many_powers_of_ten_is_drawn(watched_page, tmp_path):
    """As of a head whose weights are nearly zero."""
    scan = json.loads(write_scan(tmp_path / "scan.json").read_text())
    for row, eta in zip(scan["heads"], (0.0, 1e-9, 1e9), strict=False):
        row["eta"] = eta
    (tmp_path / "scan.json").write_text(json.dumps(scan))
    with watched_page(report([tmp_path / "scan.json"]).write(tmp_path / "scan.html")) as page:
        page.wait_for_function("() => document.querySelectorAll('.main-svg').length > 6")
        assert page.get_by_text("cannot be drawn").count() == 0
        ticks = page.evaluate(f"() => ({FIGURE})('η').data[0].colorbar.ticktext")
        assert ticks == [f"10<sup>{power}</sup>".replace("-", "−") for power in (-9, -6, -3, 0, 3, 6, 9)]


def test_sections_of_a_model_with_a_long_name_are_told_apart_above(watched_page, tmp_path):
    name = "organisation/a-model-whose-name-is-longer-than-there-is-room-for"
    made = [write_scan(tmp_path / "scan.json", model=name), write_measurement(tmp_path / "measure.json", model=name)]
    with watched_page(report(made).write(tmp_path / "page.html")) as page:
        for link, kind in zip(page.locator("nav a").all(), ("scan", "measurement"), strict=True):
            whole, last = link.bounding_box(), link.locator("small").bounding_box()
            assert link.locator("small").text_content() == kind
            assert last["x"] + last["width"] <= whole["x"] + whole["width"]
            assert link.locator("span").evaluate("(one) => one.scrollWidth > one.clientWidth")  # the name is shortened


def test_no_button_of_a_plot_sends_it_anywhere(opened):
    """plotly's own would upload the data to its cloud."""
    titles = opened("scan").eval_on_selector_all(".modebar [data-title]", "all => all.map((one) => one.dataset.title)")
    assert {"Download plot", "Zoom", "Pan", "Autoscale", "Reset axes"} == set(titles)


def test_a_finger_chooses_a_head_too(opened):
    page = opened("scan", **PHONE)
    page.touchscreen.tap(*place_of(page, "r = tr", 17, 3))
    page.wait_for_function("() => document.querySelector('.detail h4').textContent.startsWith('layer 17, head 3')")


def test_heads_are_chosen_from_selects_and_from_the_table_which_sorts(opened):
    page = opened("scan")
    page.locator("label.choice select").nth(0).select_option("3")
    page.locator("label.choice select").nth(1).select_option("30")
    assert page.locator(".detail h4").text_content().startswith("layer 3, head 30")
    header = page.get_by_role("button", name="tr WQK")
    header.click()
    cells = page.locator("tbody tr td:nth-child(3)").all_text_contents()
    assert cells[:3] == ["3,131", "3,130", "3,129"]  # the largest first
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    header.click()
    assert page.locator("tbody tr td:nth-child(3)").first.text_content() == "0"
    assert len(cells) == 50
    page.get_by_role("button", name="show all 1,024").click()
    assert page.locator("tbody tr").count() == 1024
    page.locator("tbody tr").nth(8).click()
    assert page.locator(".detail h4").text_content().startswith("layer 0, head 8")
    assert page.locator("tr[aria-selected=true] td").nth(1).text_content() == "8"


# ---------------------------------------------------------------------- predictions


def test_predicted_weights_of_softmax_are_a_line_through_simulated_points_beside_rho(opened):
    page = opened("prediction")
    np.testing.assert_allclose(traces(page, "softmax: local, near the query", "y"), [[0.1, 0.9], [0.2, 0.8]], rtol=1e-6)
    assert traces(page, "softmax", "mode") == ["lines", "markers"]
    np.testing.assert_allclose(traces(page, "shape of ρ: late", "y"), [[0.3, 0.7], [0.4, 0.6]], rtol=1e-4)
    assert page.get_by_text("entropy 0.3000 nats predicted, 0.3100 simulated").count() == 1


# ---------------------------------------------------------------------- a measurement, a log


def test_a_head_of_a_measurement_is_followed_in_every_plot(opened):
    page = opened("measurement")
    click_cell(page, "largest logit", 1, 0)
    assert "layer 1, head 0" in page.locator("h4").text_content()
    measured, general, separable = traces(page, "ρ by key, for", "y")
    expected = [0.1 + 0.02 * t for t in range(12)]
    np.testing.assert_allclose(measured, expected, atol=1e-4)
    np.testing.assert_allclose(general, expected, atol=1e-4)
    np.testing.assert_allclose(separable, 0.5, atol=1e-4)
    assert traces(page, "entropy by query", "name")[-1] == "layer 1, head 0"
    np.testing.assert_allclose(traces(page, "all heads and keys", "x")[1], expected, atol=1e-4)
    choose(page, "ρ measured against ρ predicted", "law", "K ⊗ Σ")
    np.testing.assert_allclose(traces(page, "all heads and keys", "x")[1], 0.5, atol=1e-4)
    assert page.get_by_text("its share is low").count() == 1


def test_modules_of_a_log_are_switched_and_the_heads_of_one_are_shown(opened):
    page = opened("log")
    page.locator(".switches button", has_text="1").first.click()
    assert traces(page, "largest logit", "visible") == [True, False, True]
    choose(page, "The heads of one module", "show", "largest logit")
    heads = traces(page, "h.0.attn", "z")[0]
    np.testing.assert_allclose(heads, [[1 + n + h for n in range(20)] for h in range(2)])


# ---------------------------------------------------------------------- looks


def luminance(colour):
    channels = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_in_light_and_dark_and_the_button_changes_them(opened, dark):
    page = opened("all", dark=dark)
    style = (
        "(query) => { const s = getComputedStyle(document.querySelector(query)); return [s.color, s.backgroundColor]; }"
    )
    surface = page.evaluate(style, "section")[1]
    assert (luminance(surface) < 0.1) == dark
    # 4.5 is what the accessibility guidelines ask of small text
    for query in ("h2", ".note", ".source", "th", "dt"):
        assert contrast(page.evaluate(style, query)[0], surface) >= 4.5, query
    for query in (".verdict span", ".switches button[aria-pressed=true]"):
        assert contrast(*page.evaluate(style, query)) >= 4.5, query
    ink = "() => getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    assert contrast(page.evaluate(ink), surface) >= 4.5
    before = page.evaluate(ink)
    page.get_by_role("button", name="light / dark").click()
    assert page.evaluate("document.documentElement.dataset.theme") == ("light" if dark else "dark")
    assert page.evaluate(ink) != before


@pytest.mark.parametrize("name", ["sweep", "scan", "all"])
def test_on_a_phone_nothing_is_wider_than_the_screen(opened, name):
    page = opened(name, **PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    wide = page.evaluate("""() => [...document.querySelectorAll("main *")]
      .filter((each) => !each.closest(".scroll, .plot, select") && each.getBoundingClientRect().right > 390.5)
      .map((each) => each.className)""")
    assert wide == []
    plots = page.evaluate("""() => [...document.querySelectorAll(".plot")].map((plot) =>
      [plot.clientWidth, plot.querySelector(".main-svg").clientWidth, plot.getBoundingClientRect().left])""")
    assert all(drawn == width and 300 <= width <= 390 for width, drawn, _ in plots)
    assert len({left for *_, left in plots}) == 1  # one column


def test_a_page_that_is_turned_or_resized_is_drawn_anew(opened):
    page = opened("scan", width=390, height=844)
    page.set_viewport_size({"width": 1100, "height": 700})
    page.wait_for_function("""() => [...document.querySelectorAll(".plot")].every((plot) =>
      Math.abs(plot.clientWidth - plot.querySelector(".main-svg").clientWidth) <= 1)""")
    assert page.evaluate("document.documentElement.scrollWidth") == 1100


def test_on_paper_it_is_light_without_controls_and_every_plot_is_there(opened):
    page = opened("all", dark=True)
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_selector("html.printing")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.evaluate("[...document.querySelectorAll('.controls, .top')].every((each) => each.offsetHeight === 0)")
    widths = page.evaluate("""() => [...document.querySelectorAll(".plot")].map((plot) =>
      [plot.clientWidth, plot.querySelector(".main-svg").clientWidth])""")
    assert all(abs(box - drawn) <= 1 and box <= 700 for box, drawn in widths)
    paper = page.pdf(format="A4", print_background=True)
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", paper)) <= 15
    page.emulate_media(media="screen", color_scheme="dark")
    page.wait_for_selector("html:not(.printing)")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_without_decompression_the_tables_are_there_and_the_page_says_why(chromium, files):
    context = chromium.new_context()
    page = context.new_page()
    page.add_init_script("delete window.DecompressionStream")
    page.goto(files["scan"].as_uri())
    page.wait_for_selector("html[data-plots=none]")
    assert "cannot unpack the plotting library" in page.locator(".plot").first.text_content()
    assert page.locator("tbody tr").count() == 50
    context.close()


# ---------------------------------------------------------------------- hostile files


def test_nothing_hostile_runs_and_it_is_all_there_to_read(browser_page, tmp_path):
    file = report([hostile_files(tmp_path / "in")]).write(tmp_path / "report.html")
    page = browser_page(file)
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.wait_for_selector("html[data-plots=drawn]")
    for figure in page.locator(".plot").all():  # labels are written when the mouse comes
        figure.scroll_into_view_if_needed()
        box = figure.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + box["height"] * 0.5)
    for select in page.locator("select").all():
        last = select.evaluate("(box) => box.options.length - 1")
        select.select_option(index=last)
    page.evaluate("() => document.querySelectorAll('.switches button, th button').forEach((each) => each.click())")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("({}).polluted") is None
    assert dialogs == []
    assert page.locator("img, iframe, object, embed, svg a, main a").count() == 0
    assert page.locator("script").count() == 4  # the page's three, and plotly unpacked
    text = page.evaluate("document.body.textContent")
    for name in ("</script><script>window.hacked=1</script>", '<img src=x onerror="window.hacked=2">'):
        assert name in text
    drawn = page.evaluate("[...document.querySelectorAll('.plot text')].map((each) => each.textContent).join(' ')")
    assert "<!--<script>" in drawn  # a layer's name on an axis, as it stands


def test_a_script_that_got_into_the_page_all_the_same_would_not_run(chromium, files, tmp_path):
    html = files["scan"].read_text()
    inside = "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'>"
    inside += "<a id=bad href='javascript:window.hacked=3'>.</a>"
    (tmp_path / "bad.html").write_text(html.replace('<div id="app">', inside + '<div id="app">', 1))
    context = chromium.new_context()
    page = context.new_page()
    refused = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto((tmp_path / "bad.html").as_uri())
    page.wait_for_selector("html[data-plots=drawn]")  # our own still do
    page.evaluate("document.getElementById('bad').click()")
    assert page.evaluate("window.hacked") is None
    assert sum("Content Security Policy" in each for each in refused) >= 2
    context.close()


# ---------------------------------------------------------------------- quick

# when all that is on the screen has been drawn, in seconds since the page was asked for
NOTE = """addEventListener("DOMContentLoaded", () => {
  const note = () => { window.ready ??= performance.now() / 1000; };
  new MutationObserver(note).observe(document.documentElement, { attributes: true, attributeFilter: ["data-plots"] });
})"""

# a click, and the seconds until what it changed has been painted
CLICK = """(query) => new Promise((done) => {
  const began = performance.now();
  document.querySelector(query).click();
  requestAnimationFrame(() => setTimeout(() => done((performance.now() - began) / 1000)));
})"""


@pytest.mark.timed
@pytest.mark.parametrize(
    ("name", "clicks"), [("sweep", ("button.seed", "button.strength")), ("scan", ("tbody tr + tr",))]
)
def test_a_large_report_opens_and_answers_a_click_within_a_second(chromium, files, name, clicks):
    def opened():
        context = chromium.new_context(viewport={"width": 1360, "height": 1000})
        page = context.new_page()
        page.add_init_script(NOTE)
        page.goto(files[name].as_uri())
        page.wait_for_function("() => window.ready")
        return context, page

    def opening():
        context, page = opened()
        seconds = page.evaluate("window.ready")
        context.close()
        return seconds

    assert least(opening, 1) < 1
    context, page = opened()
    page.wait_for_selector("html[data-plots=drawn]")
    for query in clicks:
        assert least(lambda query=query: page.evaluate(CLICK, query), 1) < 1
    context.close()


def test_the_numbers_of_a_page_are_there_for_scripts_too(files):
    text = files["scan"].read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert data["sections"][0]["columns"]["trace"][:3] == [0, 1, 2]
