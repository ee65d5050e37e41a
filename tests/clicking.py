"""Hands for the tests of pages."""

from __future__ import annotations

from typing import Any


def eventually(page: Any, condition: str) -> bool:
    """Whether a condition comes to hold within five seconds; our pages' policy forbids Playwright's own way to wait."""
    for _ in range(100):
        if page.evaluate(condition):
            return True
        page.wait_for_timeout(50)
    return False


def click_plot(page: Any, plot: str, place: tuple[float, float]) -> None:
    """Clicks into the plot that an expression gives, as a hand does: plotly needs a moment to see what is under the
    mouse, 50 ms and more where the machine is busy, and a click before that is of what was there before."""
    page.evaluate(f"() => {{ ({plot})._hoverdata = undefined; }}")
    page.mouse.move(place[0] - 1, place[1] - 1)
    page.mouse.move(*place)
    assert eventually(page, f"() => Boolean(({plot})._hoverdata)")
    page.mouse.click(*place)
