"""A real browser for the tests of pages: Debian's chromium without a screen, driven by Playwright.

A test module asks for it with `pytest_plugins = ["browser"]`; where the browser or Playwright is missing, its tests are
skipped and say so.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser, one for the tests of a module: while it is open Playwright's event loop runs in this thread, and
    asyncio.run, which another test's library may need, is refused."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
    path = os.environ.get("LOCATER_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no chromium: apt-get install chromium, or LOCATER_CHROMIUM=path")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses the superuser
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def watched_page(chromium: Any) -> Callable[..., AbstractContextManager[Any]]:
    """Opens a file in a page, which must not complain on its console nor ask for anything outside itself."""

    @contextmanager
    def watched(
        file: Path, hash_: str = "", *, width: int = 1360, height: int = 1000, dark: bool = False, **more: Any
    ) -> Iterator[Any]:
        complaints: list[str] = []
        requests: list[str] = []
        viewport = {"width": width, "height": height}
        context = chromium.new_context(viewport=viewport, color_scheme="dark" if dark else "light", **more)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri() + hash_)
        try:
            yield page
        finally:
            context.close()
        assert complaints == []
        assert [url for url in requests if not url.startswith(("file:", "blob:", "data:"))] == []

    return watched


@pytest.fixture
def browser_page(watched_page: Callable[..., AbstractContextManager[Any]]) -> Iterator[Callable[..., Any]]:
    """The same for one test, which ends the pages it opens."""
    with ExitStack() as pages:
        yield lambda *arguments, **options: pages.enter_context(watched_page(*arguments, **options))
