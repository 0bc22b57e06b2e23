"""Pages in a real browser, 390 pixels wide: nothing is cut off, and nothing has to be scrolled sideways."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from solrl_ray.report import compare_runs
from solrl_ray.report.page import build
from solrl_ray.storage.run_folder import RunFolder
from tests.support.made_runs import write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="needs a browser: apt-get install chromium"),
]
WIDTH = 390
# Of every element outside of plots: whether it ends beyond the page's edge, or holds more than it shows.
LOOK = """<script>addEventListener("load", () => {
  const width = document.documentElement.clientWidth, wide = [];
  for (const each of document.querySelectorAll("body *:not(svg *)")) {
    const beyond = each.getBoundingClientRect().right > width + 1;
    const hidden = each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).overflowX !== "visible";
    if (beyond || hidden) wide.push(each.tagName + " " + each.className + " " + each.textContent.trim().slice(0, 29));
  }
  parent.postMessage([width, ...wide].join("\\n"), "*");
})</script>"""


def wide_elements(page: Path) -> list[str]:
    """What does not fit. In a frame: a browser's window has a least width."""
    shown, frame = page.with_name("shown.html"), page.with_name("frame.html")
    shown.write_text(page.read_text().replace("</body>", f"{LOOK}</body>"))
    frame.write_text(
        f"<iframe src='{shown.name}' style='border:0; width:{WIDTH}px; height:20000px'></iframe><pre></pre>"
        "<script>addEventListener('message', e => document.querySelector('pre').textContent = e.data)</script>"
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([BROWSER, *options, frame.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r"<pre>(.+?)</pre>", done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    width, *wide = html.unescape(found[1]).splitlines()
    assert width == str(WIDTH)
    return wide


def test_a_report_fits_a_phone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    RunFolder(run).note_start(["solrl", "train", "flux1_dev", "--set", f"prompts.train=/data/{'long/' * 12}train.txt"])
    (run / "lora").mkdir()
    assert wide_elements(build(run)) == []


def test_runs_side_by_side_fit_a_phone(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("first", "second")]
    assert wide_elements(compare_runs.write(tmp_path / "runs.html", compare_runs.compare(folders))) == []


def test_what_does_not_fit_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f"<!DOCTYPE html><body style='margin:0'><b style='white-space:nowrap'>{'wide ' * 99}</b></body>")
    assert wide_elements(page) == ["B  " + ("wide " * 99)[:29]]
