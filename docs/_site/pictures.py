"""The pictures of docs/images that the package draws: python docs/_site/pictures.py

spectra, regimes and figure-3 to -7 are those of `locater figure`, collapse.png is made by the code of docs/tutorial.md,
arena-pre and arena-laptop are drawn from results/ as `locater arena` draws them, cause as `locater claims --plot`.
All are brought down to 256 colours, which a plot does not exceed by much; with the names of PNG files, only that is
done to them.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from PIL import Image

from locater.figures import draw, draw_arena, draw_effects
from locater.lab.arena import ARENAS as KNOWN_ARENAS
from locater.lab.arena import read_arena
from locater.lab.claims import effects

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
RUNS = ROOT / "results" / "paper-d128-l1"
FIGURES: dict[int | str, Path | None] = {
    "spectra": None, "regimes": None, 3: None, 4: None, 5: None, 6: RUNS, 7: RUNS,
}  # fmt: skip
ARENAS = ("pre", "laptop")
CAUSE = [ROOT / "results" / f"cause-d128-l1-early{more}" for more in ("", "-seeds-3-4")]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        drawn = [draw(which, folder, runs=runs)[0] for which, runs in FIGURES.items()]
        tutorial(folder)
        for picture in (*drawn, *arenas(folder), cause(folder), folder / "collapse.png"):
            shrink(picture, IMAGES / picture.name)


def arenas(folder: Path) -> list[Path]:
    made = []
    for name in ARENAS:
        arena, models = KNOWN_ARENAS[name], read_arena(ROOT / "results" / f"arena-{name}")
        picture = draw_arena(models, arena.about, arena.config.unit, folder)[0]
        made.append(picture.rename(folder / f"arena-{name}.png"))
    return made


def cause(folder: Path) -> Path:
    return draw_effects(
        effects(CAUSE), "WikiText-2, d = 128, one layer, 20,000 updates, five seeds", folder / "cause.png"
    )


def tutorial(folder: Path) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    here = Path.cwd()
    os.chdir(folder)
    try:
        names: dict[str, object] = {}
        for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
            exec(compile(block, "tutorial.md", "exec"), names)
    finally:
        os.chdir(here)


def shrink(source: Path, target: Path) -> None:
    image, most = Image.open(source).convert("RGB"), Image.Quantize.MAXCOVERAGE
    image = image.quantize(256, method=most, kmeans=2, dither=Image.Dither.NONE)  # without means, blue becomes cyan
    image.save(target, optimize=True)
    print(f"{target.relative_to(ROOT)}  {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        shrink(Path(given), Path(given).resolve())
    if not sys.argv[1:]:
        main()
