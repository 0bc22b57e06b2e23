"""Runs the demo and takes docs/images/{demo,report,dashboard}.png and live.svg: `make screenshots`, about six minutes.

``demo`` shows the top of the run's report, ``report`` its curves, ``live`` the live view and ``dashboard`` Ray's page
of actors, the latter two after half of the iterations. Needs Chromium. With the same CPU type and library lock the
run's figures equal those of `make demo`, except for times and process ids.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image, ImageChops
from rich.console import Console

from solrl_ray.metrics.records import Progress
from solrl_ray.report.live import render

FOLDER = Path(__file__).parent / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
UNDRAWN = 200
"""Pixel rows at the bottom of a window that Chromium may leave blank."""
MARGIN = 20
"""Pixels kept below a page's content."""
COLUMNS = 88
"""Width of the terminal, in characters."""
DONE = re.compile(r"iteration (\d+)/(\d+): ")
"""Progress in a line of the run's log."""


def photograph(page: str, picture: Path, *, width: int, height: int) -> None:
    """Write the upper `width` × `height` pixels of a page as PNG, without blank rows at the bottom."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"error: a browser is missing: none of {', '.join(BROWSERS)} was found; install one.")
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "taken.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000"]
        options += [f"--user-data-dir={folder}", f"--window-size={width},{height + UNDRAWN}", f"--screenshot={taken}"]
        subprocess.run([browser, *options, page], check=True, capture_output=True, timeout=180)
        with Image.open(taken) as image:
            shown = image.convert("RGB").crop((0, 0, width, height))
    empty = Image.new("RGB", shown.size, shown.getpixel((0, height - 1)))
    _, _, _, end = ImageChops.difference(shown, empty).getbbox() or (0, 0, 0, height)
    shown = shown.crop((0, 0, width, min(height, end + MARGIN)))
    shown.quantize(256, kmeans=2).save(picture, optimize=True)


def terminal(progress: Progress) -> str:
    """The live view as SVG, without web fonts, so that a page showing it fetches nothing."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(render(progress))
    text = console.export_svg(title="solrl train demo", unique_id="live")
    return re.sub(r"@font-face \{.*?\n    \}\s*", "", text, flags=re.DOTALL)


def snapshot(run: Path) -> Progress:
    """Progress of the live run, while a stage is partly done."""
    from actors.client.live_run import live_progress
    from solrl_ray.common.ray_auth import clusters_here

    for _ in range(60):
        progress = live_progress(run, clusters=clusters_here())
        if progress is None:
            break
        if any(0 < done < total for done, total in progress.stages.values()):
            return progress
        time.sleep(1.0)
    raise SystemExit(f"error: the run in {run} never reported a partly finished stage.")


def photograph_live(run: Path, dashboard: str) -> None:
    (FOLDER / "live.svg").write_text(terminal(snapshot(run)), encoding="utf-8")
    photograph(f"{dashboard}/#/actors", FOLDER / "dashboard.png", width=1280, height=1200)


def photograph_report(report: Path) -> None:
    """Take both images of the report, without its lines on time, machine and command of the start."""
    text = re.sub(r"<p>(begun|resumed) .*?</p>\n", "", report.read_text(encoding="utf-8"))
    head, _, body = text.partition("<header>")
    _, title, curves = body.partition("<h2>Held-out reward</h2>")
    curves, _, _ = curves.partition("<h2>Rank fidelity</h2>")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(text, encoding="utf-8")
        photograph(page.as_uri(), FOLDER / "demo.png", width=1090, height=1380)
        page.write_text(head + title + curves, encoding="utf-8")
        photograph(page.as_uri(), FOLDER / "report.png", width=1090, height=2000)


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("--run", type=Path, help="take only the images of the report, of this finished run")
    given.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the run, for a faster trial")
    asked = given.parse_args()
    if asked.run:
        photograph_report(asked.run.absolute() / "report.html")
        return
    settings = [f"--set={each}" for each in asked.set]
    # The browser has no token. Ray listens on this machine only, and only while the run lasts.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with tempfile.TemporaryDirectory() as root:
        run, dashboard = Path(root) / "demo", ""
        command = [sys.executable, "-m", "solrl_ray", "train", "demo", f"--set=run.root={root}", *settings, "--no-live"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as training:
            assert training.stdout is not None
            taken = False
            for line in training.stdout:
                print(line, end="", flush=True)
                if line.startswith("dashboard"):
                    dashboard = line.split()[1]
                done = DONE.search(line)
                if done and not taken and 2 * int(done[1]) > int(done[2]):
                    photograph_live(run, dashboard)
                    taken = True
        if training.returncode:
            raise SystemExit(training.returncode)
        photograph_report(run / "report.html")


if __name__ == "__main__":
    main()
