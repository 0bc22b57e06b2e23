"""The pictures of the documents: each is shown, small and fetches nothing; pages are taken by a real browser."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import screenshots
from PIL import Image

from solrl_ray.metrics.records import Progress

ROOT = Path(__file__).parents[3]
SHOWN = re.compile(r"!\[[^\]]+\]\([^)]*images/([\w.]+)\)")
BYTES = 300_000


def test_every_picture_is_shown_with_words_and_is_small() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {name for page in pages for name in SHOWN.findall(page.read_text(encoding="utf-8"))}
    files = list(screenshots.FOLDER.iterdir())
    assert {file.name for file in files} == shown
    assert [file.name for file in files if file.stat().st_size > BYTES] == []


def test_the_live_view_is_drawn_without_fonts_of_the_web() -> None:
    progress = Progress(run="demo", state="exploring", iteration=6, iterations=12, stages={"explore": (48, 288)})
    drawn = screenshots.terminal(progress)
    assert "48/288" in drawn
    for text in (drawn, (screenshots.FOLDER / "live.svg").read_text(encoding="utf-8")):
        assert text.startswith("<svg")
        assert "url(http" not in text
        assert "font-face" not in text


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, screenshots.BROWSERS)), reason="needs a browser: apt-get install chromium"
)
def test_a_page_is_photographed_down_to_its_last_thing(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text("<!DOCTYPE html><body style='margin:0'><div style='background:#f00; height:300px'></div>")
    screenshots.photograph(page.as_uri(), picture, width=700, height=900)
    with Image.open(picture) as image:
        assert image.size == (700, 300 + screenshots.MARGIN)
        assert image.convert("RGB").getpixel((350, 299)) == (255, 0, 0)
    screenshots.photograph(page.as_uri(), picture, width=700, height=200)
    with Image.open(picture) as image:
        assert image.size == (700, 200)
