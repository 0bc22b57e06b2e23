"""Downloads colour emoji of seven sets, drawn by people, and renders them: the training images of the emoji example.

    python benchmarks/draw_emoji.py fetch drawings.xz [--packages FOLDER]
    python benchmarks/draw_emoji.py draw drawings.xz FOLDER [--size 96] [--processes 16]

`fetch` needs `npm` and network access. It downloads the pinned packages and writes one file of drawings (SVG) with
their names, about 10 MB, and ATTRIBUTION.md to the same folder. `draw` needs `pip install resvg-py==0.5.0`. It writes
to FOLDER

    pictures.npy   uint8 [N, size, size, 3], on white
    captions.json  one entry per image: name, category, tags, style, tone, colours, held_out, mirrors
    ATTRIBUTION.md

The package contains none of these files.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from emoji_assets.colours import dominant
from emoji_assets.drawings import NAMES, STYLES, Drawing, attribution, collect, read, save
from PIL import Image

MARGIN = 24
"""An image's white margin is size // MARGIN pixels wide; training shifts images within it."""


def unpacked(package: str, folder: Path) -> Path:
    """Download and unpack an npm package, unless `folder` has it; returns its folder ``package``."""
    place = folder / package.strip("@").replace("/", "_").replace("@", "_")
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            subprocess.run(["npm", "pack", "--silent", package], cwd=work, check=True, stdout=subprocess.DEVNULL)
            (archive,) = Path(work).glob("*.tgz")
            with tarfile.open(archive) as tar:
                tar.extractall(place, filter="data")
    return place / "package"


def fetch(file: Path, packages: Path) -> None:
    packages.mkdir(parents=True, exist_ok=True)
    folders = {style: unpacked(package, packages) for style, package in STYLES.items()}
    names = unpacked(NAMES, packages)
    drawings = collect(folders, names)
    file.parent.mkdir(parents=True, exist_ok=True)
    save(drawings, file)
    file.with_name("ATTRIBUTION.md").write_text(attribution(folders, names))
    held_out = len({each.name for each in drawings if each.held_out})
    print(f"{len(drawings)} drawings of {len({each.name for each in drawings})} concepts, {held_out} held out")


def draw_one(drawing: Drawing, size: int) -> tuple[np.ndarray, list[str]]:
    """The rendered image, uint8 [size, size, 3], and the names of its colours."""
    import resvg_py

    inner = size - 2 * (size // MARGIN)
    png = resvg_py.svg_to_bytes(svg_string=drawing.svg, width=inner, height=inner, skip_system_fonts=True)
    image = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
    canvas = Image.new("RGBA", (size, size), (255, 255, 255, 0))
    canvas.paste(image, ((size - image.width) // 2, (size - image.height) // 2))
    colours = dominant(np.asarray(canvas))
    paper = Image.new("RGBA", (size, size), "white")
    return np.asarray(Image.alpha_composite(paper, canvas).convert("RGB")), colours


def caption_parts(drawing: Drawing, colours: list[str]) -> dict[str, Any]:
    text = {key: getattr(drawing, key) for key in ("name", "category", "tags", "style", "tone", "held_out", "mirrors")}
    return {**text, "colours": colours}


def draw(file: Path, folder: Path, size: int, processes: int) -> None:
    drawings = read(file)
    with get_context("spawn").Pool(processes) as pool:
        drawn = pool.map(functools.partial(draw_one, size=size), drawings, chunksize=32)
    shown = [(drawing, *made) for drawing, made in zip(drawings, drawn, strict=True) if (made[0] < 255).any()]
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "pictures.npy", np.stack([picture for _, picture, _ in shown]))
    parts = [caption_parts(drawing, colours) for drawing, _, colours in shown]
    (folder / "captions.json").write_text(json.dumps(parts, ensure_ascii=False))
    if (page := file.with_name("ATTRIBUTION.md")).exists():
        shutil.copy(page, folder)
    print(f"{len(shown)} images of {size} × {size} pixels; {len(drawings) - len(shown)} drawings were empty")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch")
    fetching.add_argument("file", type=Path)
    fetching.add_argument("--packages", type=Path, default=Path("packages"), help="keeps the downloads")
    drawing = commands.add_parser("draw")
    drawing.add_argument("file", type=Path)
    drawing.add_argument("folder", type=Path)
    drawing.add_argument("--size", type=int, default=96)
    drawing.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.command == "fetch":
        fetch(arguments.file, arguments.packages)
    else:
        draw(arguments.file, arguments.folder, arguments.size, arguments.processes)


if __name__ == "__main__":
    main()
