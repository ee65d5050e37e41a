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


# a plot under the mouse, and where the mouse was when plotly last said what is under it
_WATCH = """() => {
  const plot = %s;
  plot._hoverdata = undefined;
  plot.hovered = [NaN, NaN];
  plot.watched ??= plot.on("plotly_hover", ({ event }) => { plot.hovered = [event.clientX, event.clientY]; });
}"""
_HOVERED = "() => (([x, y]) => Math.hypot(x - (%r), y - (%r)) < 3)((%s).hovered)"


def click_plot(page: Any, plot: str, place: tuple[float, float]) -> None:
    """Clicks into the plot that an expression gives, as a hand does: plotly needs a moment to see what is under the
    mouse, 50 ms and more where the machine is busy, and says until then what was under it before; a click is of what
    it said last."""
    page.evaluate(_WATCH % plot)
    page.mouse.move(place[0] - 1, place[1] - 1)
    page.mouse.move(*place)
    assert eventually(page, _HOVERED % (*place, plot))
    page.mouse.click(*place)
