"""What the explorer says of softmax is Python's law and Python's rule, within the errors that both state."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from explorer_page import CORNERS, DEFAULT, process_of, python_attention, random_states, regimes_of

from clicking import eventually
from locater import TokenProcess
from locater.theory import ATTENTION_REGIMES, attention, attention_from_traces, attention_regime, softmax_regime
from locater.theory.regime import spectrum_at
from timing import least

pytest_plugins = ["browser"]

COMPUTE = """async (states) => {
  const results = [];
  for (const state of states) {
    const { softmax } = await explorer.compute(state);
    const { weights, weightsError, ...more } = softmax;
    results.push({ weights: Array.from(weights), weightsError: Array.from(weightsError), ...more });
  }
  return results;
}"""


def check(found, law, label):
    """Within 5 standard errors: those of the page come from 16 lattices, and a law has up to 128 weights."""
    tolerance = 5 * np.hypot(found["entropyError"], law.entropy_error) + 1e-6  # the page's exponentials: 1e-7
    assert abs(found["entropy"] - law.entropy) < tolerance, label
    # a weight of 1e-5 is seen in too few of 8,144 sequences for their spread to tell its error
    tolerance = 5 * np.hypot(found["weightsError"], law.weights_error) + 1e-5
    assert (np.abs(found["weights"] - law.weights) < tolerance).all(), label
    if clear_of_borders(law, 6 * max(found["entropyError"], max(found["weightsError"]) * len(found["weights"]) / 2)):
        regime = attention_regime(law)
        assert found["regime"] == f"{regime.name} {regime.side}".strip(), label


def clear_of_borders(law, room):
    """Whether every number that the rule compares is further than `room` from its threshold."""
    rule, near = softmax_regime, softmax_regime._near(law)
    distances = [law.entropy_share - each for each in (rule.UNIFORM_FROM, rule.COLLAPSED_TO)]
    distances += [near - each for each in (rule.NEAR_FROM, rule.FAR_TO)] + [law.weights[law.query] - 0.5]
    return np.abs(distances).min() > room


def spread_of(state):
    """√E b, the standard deviation of independent logits: Python's table of integrals grows with it without bounds."""
    lam = state["temperature"] or np.sqrt(state["d"])
    return np.sqrt(state["d"] * (state["mean"] ** 2 + state["std"] ** 2)) / lam


def test_weights_entropy_and_regime_of_softmax_are_pythons(explorer, full):
    spectra = ((1, 12, 0.4, 0), (2, 2, 0.3, 1), (8, 30, -0.2, 0.3), (64, 64, 0, 0.4), (256, 128, 0.02, 0.02))
    states = CORNERS + [
        DEFAULT | {"process": process, "d": d, "T": T, "mean": mean, "std": std}
        for process in ("walk", "ar", "independent")
        for d, T, mean, std in spectra
    ]
    states += list(random_states(400 if full else 30, seed=1))
    states = [state for state in states if state["process"] != "independent" or spread_of(state) < 6]
    page = explorer()
    for state, found in zip(states, page.evaluate(COMPUTE, states), strict=True):
        check(found, python_attention(state), state)
        assert found["entropyError"] < 0.01
        assert sum(found["weights"]) == pytest.approx(1, abs=1e-9)


def test_in_the_limit_softmax_is_that_of_three_numbers(explorer):
    states = [
        DEFAULT | {"mode": "limit", "xi": xi, "eta": eta, "T": T}
        for xi, eta, T in ((5, 0.05, 40), (-3, 0.2, 12), (0, 1, 64), (40, 0.001, 128), (1, 10, 2))
    ]
    page = explorer()
    for state, found in zip(states, page.evaluate(COMPUTE, states), strict=True):
        xi, eta = state["xi"], state["eta"]
        law = attention_from_traces(xi * eta, eta**2, eta**2, TokenProcess.random_walk(state["T"]), 1.0)
        check(found, law, state)


def test_the_pages_rule_has_pythons_numbers_and_words(explorer):
    rule = softmax_regime
    assert explorer().evaluate("SOFTMAX") == {
        "uniformFrom": rule.UNIFORM_FROM,
        "collapsedTo": rule.COLLAPSED_TO,
        "nearFrom": rule.NEAR_FROM,
        "farTo": rule.FAR_TO,
        "words": ATTENTION_REGIMES,
    }


def test_the_rule_is_pythons_on_any_weights(explorer):
    rng = np.random.default_rng(0)
    cases = []
    for _ in range(300):
        tokens = int(rng.choice([2, 3, 9, 40]))
        weights = rng.dirichlet(np.full(tokens, 10 ** rng.uniform(-2, 1)))
        cases.append({"weights": np.sort(weights) if rng.random() < 0.5 else weights, "entropy": 0.0})
        # on either side of 0.1 and 0.9, not there: browsers and numpy may differ in the last bit of a logarithm
        cases[-1]["entropy"] = float(rng.choice([0.05, 0.0999, 0.1001, 0.5, 0.8999, 0.9001, 0.95]) * np.log(tokens))
    blank = python_attention(DEFAULT | {"d": 1, "T": 2})
    expected = []
    for case in cases:
        numbers = blank.__dict__ | {"weights": case["weights"], "entropy": np.asarray(case["entropy"])}
        numbers |= {"tokens": len(case["weights"]), "query": len(case["weights"]) - 1}
        regime = attention_regime(type(blank)(**numbers))
        expected.append(f"{regime.name} {regime.side}".strip())
    assert set(expected) == set(ATTENTION_REGIMES)
    lists = [case | {"weights": case["weights"].tolist()} for case in cases]
    assert explorer().evaluate("(cases) => cases.map(attention.regime)", lists) == expected


# ---------------------------------------------------------------------- on the page


@pytest.mark.parametrize(
    "hash_",
    ["", "#process=ar&mean=0.5&std=1&T=30", "#process=independent&d=1&T=5&mean=3", "#mode=limit&xi=2&eta=0.2"],
)
def test_the_page_shows_the_weights_the_entropy_and_pythons_phrase(explorer, hash_):
    page = explorer(hash_)
    state = page.evaluate("explorer.state()")
    if state["mode"] == "limit":
        r, square = state["xi"] * state["eta"], state["eta"] ** 2
        law = attention_from_traces(r, square, square, TokenProcess.random_walk(state["T"]), 1.0)
    else:
        law = python_attention(state)
    (found,) = page.evaluate(COMPUTE, [state])
    shown = page.evaluate("Array.from(document.getElementById('rho').data.at(-1).y)")
    assert shown == found["weights"]
    # the phrase but for its number, which is a sampled one
    phrase = page.locator("#softmax-chip").inner_text() + ": " + page.locator("#softmax-words").inner_text()
    pattern = r": [\d.]+ of "
    assert re.sub(pattern, ": … of ", phrase) == re.sub(pattern, ": … of ", str(attention_regime(law)))
    width = float(re.search(r": ([\d.]+) of ", phrase)[1])
    assert width == pytest.approx(np.exp(law.entropy), rel=0.02)
    entropy = page.locator("#entropy-value").inner_text()
    assert entropy == f"{found['entropy']:.3f} of {np.log(state['T']):.3f} nats"
    caption = page.locator("#law-caption").inner_text()
    assert ("three-number law" if state["mode"] == "limit" else "exact law") in caption
    assert f"{found['entropyError']:.4f} nats of entropy" in caption


def test_softmax_looks_at_the_last_tokens_where_rho_is_high_in_the_middle(explorer):
    page = explorer()
    assert page.locator("#regime-chip").inner_text() == "middle"
    assert page.locator("#softmax-chip").inner_text() == "collapsed on the query itself"
    weights = page.evaluate("Array.from(document.getElementById('rho').data.at(-1).y)")
    assert sum(weights[-3:]) == pytest.approx(0.997, abs=0.001)


@pytest.mark.parametrize(
    "state",
    [
        DEFAULT | {"d": 16, "T": 12},
        DEFAULT | {"d": 9, "T": 14, "process": "ar", "decay": -0.7},
        DEFAULT | {"d": 64, "T": 10, "process": "independent"},
        DEFAULT | {"d": 1, "T": 4},
        DEFAULT | {"mode": "limit", "xi": 3.0, "eta": 0.1, "T": 12},
    ],
)
def test_the_plane_shows_the_regimes_of_softmax(explorer, state):
    page = explorer()
    page.evaluate("(state) => explorer.change(state)", state | {"map": "softmax"})
    page.evaluate("explorer.settled()")
    plane = regimes_of(page)
    clear = 0
    for r in range(0, 97 if state["process"] != "independent" else 73, 12):  # see `spread_of`
        for c in range(0, 129, 16):
            xi, eta, name = plane["xi"][c], plane["eta"][r], plane["regimes"][r, c]
            if state["mode"] == "limit":
                law = attention_from_traces(xi * eta, eta**2, eta**2, process_of(state), 1.0, samples=2048)
            elif state["d"] == 1 and abs(xi) < 1:
                assert name == ""  # a single eigenvalue has ξ = ±1
                continue
            else:
                law = attention(spectrum_at(xi, eta, state["d"]), process_of(state), 1.0, samples=2048)
            if not clear_of_borders(law, 0.03):  # the plane has a quarter of the curves' points
                continue
            regime = attention_regime(law)
            assert name == f"{regime.name} {regime.side}".strip(), (xi, eta)
            clear += 1
    assert clear >= (10 if state["d"] == 1 else 45)


def test_the_plane_is_switched_between_rho_and_softmax_by_the_keyboard(fresh_explorer, full):
    if not full:
        pytest.skip("six seconds: LOCATER_FULL=1, or make test-full")
    page = fresh_explorer("#d=6&T=5")
    rho = regimes_of(page)["regimes"]
    assert "late" in page.locator("#regimes").inner_text()
    assert page.locator("#regimes li").first.inner_text() == "ρ is"
    page.get_by_role("group", name="Regimes of").get_by_label("ρ (the paper's)").focus()
    page.keyboard.press("ArrowRight")
    page.evaluate("explorer.settled()")
    softmax = regimes_of(page)["regimes"]
    assert set(softmax.flat) <= set(ATTENTION_REGIMES)
    assert page.locator("#regimes li").all_inner_texts() == ["Softmax is", *ATTENTION_REGIMES.values()]
    assert "Softmax by the exact law: random walk tokens, d = 6, T = 5" in page.locator("#plane-caption").inner_text()
    assert page.locator("#plane").get_attribute("aria-label").startswith("Regimes of softmax ")
    assert eventually(page, "location.hash.includes('map=softmax')")
    page.reload()
    page.evaluate("explorer.settled()")
    assert page.get_by_label("softmax", exact=True).is_checked()
    assert (regimes_of(page)["regimes"] == softmax).all()
    page.get_by_label("ρ (the paper's)").check()
    page.evaluate("explorer.settled()")
    assert (regimes_of(page)["regimes"] == rho).all()
    assert eventually(page, "!location.hash.includes('map')")


def test_a_plane_that_was_seen_before_is_there_at_once(explorer):
    page = explorer("#d=5&T=6")
    first = regimes_of(page)["regimes"]
    page.get_by_label("softmax", exact=True).check()
    page.evaluate("explorer.settled()")
    regimes_of(page)
    page.get_by_label("ρ (the paper's)").check()
    page.evaluate("explorer.settled()")
    assert page.evaluate("!document.querySelector('.stale')")
    assert (regimes_of(page)["regimes"] == first).all()


def test_no_words_of_the_page_say_that_rho_is_where_attention_looks(explorer):
    page = explorer("#map=softmax")
    text = page.locator("body").inner_text() + json.dumps(
        page.evaluate("Array.from(document.querySelectorAll('[aria-label], [title]'), (e) => [e.ariaLabel, e.title])")
    )
    assert "softmax itself, drawn below it, can look elsewhere" in " ".join(text.split())
    assert not re.search(r"attention (looks|attends)|where (the )?attention", text)


@pytest.mark.timed
@pytest.mark.parametrize("process", ["walk", "ar", "independent"])
def test_rho_and_softmax_of_64_tokens_take_less_than_30_ms(explorer, process):
    page = explorer()
    move = f"""async () => {{
      const state = {{ ...explorer.state(), process: "{process}", T: 64, std: 0.2 }}, found = [];
      for (let k = 0; k < 10; k++) found.push((await explorer.compute({{ ...state, mean: 0.01 * k }})).elapsed / 1000);
      return found;
    }}"""
    assert least(lambda: max(page.evaluate(move)[2:]), 0.03) < 0.03  # the first two draw points and compile
