"""What `make docs` adds to the pages in docs/: the README as the first page, results/, and the explorer.

Pages link to each other, and to files outside docs/, as they lie in the repository, so that the links also work there.
Here those that leave docs/ are led to what they show: pages made below, or copies of the files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {  # in the repository → on the site
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "results/README.md": "runs/all.md",
    "results": "runs/all.md",
}
SHOWN = (".png", ".svg", ".json", ".gz", ".csv", ".md")  # of a folder in results/
EXPLORER = "explorer.html"
WITHOUT_NAVIGATION = ("index.md", "idea.md", "tutorial.md")  # pages that are a section by themselves

LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", flags=re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is not in docs/."""
    for source, target in PAGES.items():
        if source.endswith(".md"):
            _put(files, config, target, (ROOT / source).read_text(encoding="utf-8"))
    for folder in _runs():
        _put(files, config, f"runs/{folder.name}.md", _run_page(folder))
    from locater.pages.explore import explorer_page

    _put(files, config, EXPLORER, explorer_page())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links that leave docs/ to pages or copies; the explorer's page shows the explorer."""
    here = _origin(page.file.src_uri)

    def led(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        return before + _led(target, here, page.file.src_uri, config, files) + after

    if page.file.src_uri in WITHOUT_NAVIGATION:
        page.meta["hide"] = ["navigation"]
    parts = CODE.split(markdown)
    markdown = "".join(part if i % 2 else LINK.sub(led, part) for i, part in enumerate(parts))
    if page.file.src_uri == PAGES["results"]:
        for run in _runs():
            markdown = markdown.replace(f"| `{run.name}` |", f"| [`{run.name}`]({run.name}.md) |")
    if page.file.src_uri == "explore.md":
        heading, _, rest = markdown.partition("\n")
        frame = f'<iframe class="explorer" src="{EXPLORER}" title="The theory with sliders" loading="lazy"></iframe>'
        markdown = f"{heading}\n\n[Open it in a window of its own]({EXPLORER})\n\n{frame}\n{rest}"
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Pictures wait until they are near the screen."""
    return html.replace("<img ", '<img loading="lazy" ')


# ---------------------------------------------------------------------- links


def _origin(src_uri: str) -> str:
    """Where in the repository the text of a page comes from."""
    for source, target in PAGES.items():
        if target == src_uri and source.endswith(".md"):
            return source
    run = re.fullmatch(r"runs/(.+)\.md", src_uri)
    return f"results/{run[1]}/index.md" if run else f"docs/{src_uri}"


def _led(target: str, here: str, page: str, config: MkDocsConfig, files: Files) -> str:
    if re.match(r"[a-z]+:|#|/", target):
        return target
    path, hash_, anchor = target.partition("#")
    source = os.path.normpath(os.path.join(os.path.dirname(here), unquote(path))).replace(os.sep, "/")
    if source.startswith(".."):
        raise PluginError(f"{here}: the link {target} leaves the repository")
    if not (ROOT / source).exists():
        return target  # mkdocs complains of it, or it is made here
    return os.path.relpath(_on_site(source, config, files), os.path.dirname(page) or ".") + hash_ + anchor


def _on_site(source: str, config: MkDocsConfig, files: Files) -> str:
    """The page or file of the site that shows a file or folder of the repository."""
    if source in PAGES:
        return PAGES[source]
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if any(source in (f"results/{run.name}", f"results/{run.name}/claims.md") for run in _runs()):
        return f"runs/{source.split('/')[1]}.md"
    if (ROOT / source).is_dir():
        raise PluginError(f"the site has no page for the folder {source}: link to a file in it")
    copy = f"repository/{source}" + ("" if Path(source).suffix in SHOWN else ".txt")  # for browsers to show
    if copy not in files.src_uris:
        _put(files, config, copy, (ROOT / source).read_bytes())
        files.src_uris[copy].copy_file(dirty=False)  # pages are being read: static files of before are listed already
    return copy


def _put(files: Files, config: MkDocsConfig, target: str, content: str | bytes) -> None:
    files.append(File.generated(config, target, content=content))


# ---------------------------------------------------------------------- results/


def _runs() -> list[Path]:
    return sorted(path for path in (ROOT / "results").iterdir() if path.is_dir())


def _run_page(folder: Path) -> str:
    """A sweep's folder: its verdicts, its pictures, its files."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in SHOWN)
    claims = folder / "claims.md"
    lines = [f"# {folder.name}", "", "[What was run](../README.md), and how.", ""]
    for path in found:
        if path.suffix == ".png":
            lines += [f"![{path.stem}]({path.relative_to(folder).as_posix()})", ""]
    if claims.exists():
        lines += [re.sub(r"^# .*\n", "", claims.read_text(encoding="utf-8")), ""]
    lines += ["## Files", "", "| file | kB |", "|---|---|"]
    for path in found:
        if path != claims:
            name = path.relative_to(folder).as_posix()
            lines.append(f"| [{name}]({name}) | {path.stat().st_size / 1000:.0f} |")
    return "\n".join(lines) + "\n"
