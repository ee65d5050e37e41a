"""The site of `make docs`: it builds without a warning, is complete, and needs nothing from anywhere. 10 s a build."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from markdown_pages import ROOT

pytest.importorskip("mkdocs", reason="no mkdocs: pip install 'locater[docs]'")
pytest.importorskip("material", reason="no mkdocs-material: pip install 'locater[docs]'")
pytest.importorskip("mkdocstrings", reason="no mkdocstrings: pip install 'locater[docs]'")

pytest_plugins = ["browser"]

ROOMS = ("theory", "models", "measure", "control", "lab", "figures")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


def test_the_site_is_complete_and_asks_nobody(site):
    every_public_name_is_explained(site)
    every_link_leads_somewhere(site)
    nothing_is_fetched_from_outside(site)
    names_of_this_machine_are_nowhere(site)


def every_public_name_is_explained(site):
    for room in ROOMS:
        page = (site / "api" / f"{room}.html").read_text()
        for name in importlib.import_module(f"locater.{room}").__all__:
            path = f"locater.{room}.{name}"
            path = f"{path}.{name}" if path in sys.modules else path  # a function in a module of its name
            assert f'id="{path}"' in page, path
    index = (site / "api" / "index.html").read_text()
    for name in set(importlib.import_module("locater").__all__) - {"__version__", "theory"}:
        assert re.search(rf'(?:id|href)="[\w./#]*locater\.(?:\w+\.)*{name}"', index), name


def every_link_leads_somewhere(site):
    """Also those to copies of the repository's files, which mkdocs does not look at."""
    for page in set(site.rglob("*.html")) - {site / "404.html"}:  # a server shows that one anywhere
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text()):
            if not re.match(r"[a-z]+:", target):
                place = (page.parent / target).resolve()
                assert (place / "index.html" if place.is_dir() else place).exists(), f"{page.name}: {target}"


def nothing_is_fetched_from_outside(site):
    for page in site.rglob("*.html"):
        if page.name != "explorer.html":  # tested where it is made
            found = re.findall(r'<(?:script|img|iframe|source)[^>]*src="(https?:[^"]+)', page.read_text())
            found += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(https?:[^"]+)', page.read_text())
            assert found == [], page


def names_of_this_machine_are_nowhere(site):
    for page in site.rglob("*.html"):
        assert str(ROOT) not in page.read_text(), page


PAGES = ("index", "idea", "tutorial", "theory", "errata", "results", "howto/fsdp", "api/models", "runs/all")


@pytest.mark.parametrize(("width", "names"), [(390, PAGES), (1360, ("index", "api/theory"))])
def test_pages_open_from_disk_and_fit_the_screen(site, watched_page, width, names):
    """The browser's fixture refuses complaints on the console and requests beyond the files."""
    for name in names:
        with watched_page(site / f"{name}.html", width=width) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate("[...document.images].every(i => i.loading === 'lazy' || i.naturalWidth > 0)"), name


def test_the_site_can_be_searched_from_disk_and_shows_the_explorer(site, watched_page):
    with watched_page(site / "index.html") as page:
        page.keyboard.press("/")
        page.keyboard.type("DecoupledLocAteR")
        page.wait_for_selector(".md-search-result__item")
        assert page.locator(".md-search-result__item").count() >= 2
    with watched_page(site / "explore.html") as page:
        page.locator("iframe.explorer").scroll_into_view_if_needed()
        page.frame_locator("iframe.explorer").locator(".js-plotly-plot").first.wait_for()


def test_the_pictures_are_small():
    large = [path.name for path in Path(ROOT, "docs", "images").iterdir() if path.stat().st_size > 200_000]
    assert large == [], "python docs/_site/pictures.py FILE makes them smaller"
