"""The explorer's page, written once, and ways to open it."""

from __future__ import annotations

import pytest

from locater.pages.explore import write_explorer


@pytest.fixture(scope="session")
def page_file(tmp_path_factory):
    return write_explorer(tmp_path_factory.mktemp("explorer") / "explorer.html")


@pytest.fixture(scope="module")
def one_page(watched_page, page_file):
    with watched_page(page_file) as page:
        yield page


@pytest.fixture
def explorer(one_page):
    """A function that puts the page into the state an address asks for; most tests share one page."""

    def show(hash_=""):
        one_page.evaluate("(hash) => explorer.settled().then(() => explorer.change(settings.fromHash(hash)))", hash_)
        one_page.evaluate("explorer.settled()")
        return one_page

    return show


@pytest.fixture
def fresh_explorer(browser_page, page_file):
    """A function that opens the page anew."""

    def open_explorer(hash_="", **options):
        page = browser_page(page_file, hash_, **options)
        page.evaluate("explorer.settled()")
        return page

    return open_explorer
