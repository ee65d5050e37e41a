"""The explorer as a file: whole, self-contained, the same every time; and the command that writes it."""

from __future__ import annotations

import base64
import gzip
import html.parser
import json

import pytest

from locater import LocaterError
from locater.cli import main
from locater.pages import _page as _pages
from locater.pages.explore import explorer_page, write_explorer


def test_the_page_is_one_file_below_1_mb_and_the_same_every_time(tmp_path):
    path = write_explorer(tmp_path / "explorer.html")
    assert path.read_text(encoding="utf-8") == explorer_page()
    assert path.stat().st_size < 1e6


class Tags(html.parser.HTMLParser):
    """The elements of a page in their order, and what its scripts hold, by id; the one without is the app."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.text = {}
        self.script = None

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.script = dict(attrs).get("id", "app") if tag == "script" else None

    def handle_data(self, data):
        if self.script is not None:
            self.text[self.script] = self.text.get(self.script, "") + data

    def handle_endtag(self, _tag):
        self.script = None


@pytest.fixture(scope="module")
def tags():
    parser = Tags()
    parser.feed(explorer_page())
    return parser


def test_nothing_is_fetched_and_only_the_pages_own_scripts_may_run(tags):
    for tag, attributes in tags.found:
        assert "src" not in attributes
        assert tag in ("a", "link") or "href" not in attributes
        assert not any(name.startswith("on") for name in attributes)  # which the policy would refuse
    (policy,) = (attributes["content"] for _, attributes in tags.found if "http-equiv" in attributes)
    assert "default-src 'none'" in policy
    library = gzip.decompress(base64.b64decode(tags.text["plotly"])).decode()
    assert library.startswith("/*! plotly.js ")  # its licence
    for script in (tags.text["theory"], tags.text["app"], library):
        assert f"'{_pages.script_hash(script)}'" in policy


def test_every_control_has_a_name_for_those_who_do_not_see_it(tags):
    assert {"lang": "en"} in [attributes for tag, attributes in tags.found if tag == "html"]
    labelled = {attributes.get("for") for tag, attributes in tags.found if tag == "label"}
    for tag, attributes in tags.found:
        if tag == "select":
            assert attributes["id"] in labelled
        if attributes.get("role") == "img":
            assert attributes["aria-label"]


def test_json_in_a_page_cannot_end_its_element():
    value = {"name": "</script><script>alert(1)</script>", "more": "<!-- & \u2028"}
    text = _pages.inert(value)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == value


def test_a_page_whose_slots_and_parts_differ_is_not_made():
    assert _pages.put("a {{ONE}} b {{TWO}}", {"ONE": "{{TWO}}", "TWO": "2"}) == "a {{TWO}} b 2"
    with pytest.raises(LocaterError, match=r"slots for ONE, TWO and is given ONE$"):
        _pages.put("{{ONE}} {{TWO}}", {"ONE": ""})
    with pytest.raises(LocaterError, match=r"slots for ONE and is given ONE, TWO$"):
        _pages.put("{{ONE}}", {"ONE": "", "TWO": ""})


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["explore", *arguments])
    return stopped.value.code, *capsys.readouterr()


def test_the_command_writes_the_page_and_says_where(tmp_path, capsys):
    target = tmp_path / "page.html"
    assert run(capsys, "--out", str(target)) == (0, f"{target}\n", "")
    status, out, _ = run(capsys, "--out", str(target), "--json", "-")
    assert status == 0
    assert json.loads(out) == {"file": str(target), "bytes": target.stat().st_size}


@pytest.mark.parametrize(("where", "reason"), [("missing/page.html", "there is no folder"), (".", "it is a folder")])
def test_a_path_that_cannot_be_written_is_one_sentence_and_status_2(tmp_path, capsys, where, reason):
    status, out, err = run(capsys, "--out", str(tmp_path / where))
    assert (status, out) == (2, "")
    assert err.startswith("locater: cannot write ")
    assert reason in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
