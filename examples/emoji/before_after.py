"""Writes a sheet of a run's held-out images, before and after, as a PNG small enough for a document.

    python examples/emoji/before_after.py runs/blobs blobs.png [--prompts 10] [--samples 3] [--skip 0]

Under each prompt are the base model's images and, for the same seeds, those of the newest evaluation. The run needs
`evaluation.pictures` of at least --prompts plus --skip, and `evaluation.samples` of at least --samples. Colours are
reduced to 256.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from solrl_ray.errors import UserError
from solrl_ray.report.data import RunData, read_run

LINE = 14
"""Height of a prompt's text, in pixels."""


def rows(data: RunData, prompts: int, samples: int, skip: int = 0) -> list[tuple[str, list[Image.Image]]]:
    """Prompts and their 2 · `samples` images. Exits with an error message if the run kept fewer."""
    shown, pictures = data.shown, data.pictures
    before, after = (pictures.get(name, {}) for name in ("base", "final"))
    wanted = range(samples)
    known = [
        prompt
        for prompt in dict.fromkeys(prompt for prompt, _ in before)
        if all((prompt, n) in kept for kept in (before, after) for n in wanted)
    ]
    captions = shown["base"].captions if "base" in shown else {}
    ordered = [prompt for prompt in captions if prompt in known][skip : skip + prompts]
    if len(ordered) < prompts:
        needed = f"{skip + prompts} prompts are needed: evaluation.pictures of at least {skip + prompts}"
        sys.exit(
            f"{data.folder} kept {len(known)} prompts with {samples} images before and after, but {needed}, and "
            f"evaluation.samples of at least {samples}"
        )
    return [
        (captions[prompt], [Image.open(kept[prompt, n]).convert("RGB") for kept in (before, after) for n in wanted])
        for prompt in ordered
    ]


def page(shown: Sequence[tuple[str, Sequence[Image.Image]]]) -> Image.Image:
    """A sheet with a row of equally sized images under each prompt."""
    width, height = shown[0][1][0].size
    sheet = Image.new("RGB", (len(shown[0][1]) * width, len(shown) * (height + LINE)), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (text, pictures) in enumerate(shown):
        top = number * (height + LINE)
        pen.text((3, top + 1), text, fill="black")
        for column, picture in enumerate(pictures):
            sheet.paste(picture, (column * width, top + LINE))
    return sheet


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--skip", type=int, default=0, help="leave out this many of the first prompts")
    arguments = parser.parse_args(argv)
    for name, least in (("prompts", 1), ("samples", 1), ("skip", 0)):
        if (given := getattr(arguments, name)) < least:
            parser.error(f"--{name} is {given}; it must be at least {least}")
    try:
        shown = rows(read_run(arguments.run), arguments.prompts, arguments.samples, arguments.skip)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    page(shown).quantize(256, kmeans=2).save(arguments.file, optimize=True)
    print(f"{arguments.file}: {arguments.file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
