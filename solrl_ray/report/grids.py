"""Pictures on the disk: image tensors to PNG files and back, contact sheets, and of videos a strip and a small clip."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from solrl_ray.common.files import replace_file
from solrl_ray.config.rewards import evenly_spaced
from solrl_ray.errors import UserError
from solrl_ray.prompts.references import pictures as seen_pictures
from solrl_ray.records import Prompt, SampleShape

if TYPE_CHECKING:  # takes seconds; finding pictures does not need it
    import torch

PictureKey = tuple[str, int]
"""(prompt id, sample number): the fixed address of a picture."""
REFERENCE = "reference"
"""Name of the row, and in an evaluation's folder of the folder, of prompts' reference pictures."""
LARGEST = 256
"""Longest side of a picture in a contact sheet, and of a clip, pixels; larger ones are reduced."""
ENLARGED = 96
"""Pictures are enlarged by a whole number to at least this width, pixels."""
VIDEO = 4
"""Dimensions of a video [3, T, H, W]."""
STRIP_FRAMES = 5
MOST_FRAMES = 33
"""Frames of a clip at most; of longer videos every second, third, … for as many times as long."""
CLIP_SUFFIX = ".webp"
GAP = 2
"""Space between the pictures of a contact sheet and around it, pixels."""


def eight_bits(image: torch.Tensor) -> torch.Tensor:
    """What files keep: uint8, on the CPU. Floats are clipped to [0, 1], uint8 stays as it is."""
    if not image.is_floating_point():
        return image.cpu()
    return (image.detach().float().cpu().clamp(0, 1) * 255).round().byte()


def strip(video: torch.Tensor) -> torch.Tensor:
    """Evenly spaced frames of a video [3, T, H, W] side by side: [3, H, n · W]."""
    return video[:, evenly_spaced(video.shape[1], STRIP_FRAMES)].permute(0, 2, 1, 3).flatten(2)


def encode_clip(video: torch.Tensor, fps: int) -> bytes:
    """A video [3, T, H, W], in [0, 1] or uint8, as animated WebP, which repeats for ever."""
    every = -(-video.shape[1] // MOST_FRAMES)
    levels = eight_bits(video[:, ::every])
    frames = [Image.fromarray(frame.contiguous().numpy()) for frame in levels.permute(1, 2, 3, 0)]
    for frame in frames:
        frame.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    duration = round(1000 * every / fps)
    frames[0].save(
        buffer, format="WEBP", save_all=True, append_images=frames[1:], duration=duration, loop=0, quality=70
    )
    return buffer.getvalue()


def to_picture(image: torch.Tensor) -> Image.Image:
    """float32 [3, H, W] in [0, 1] → eight bits a channel; values outside the range are clipped. Of a video [3, T, H, W]
    (or uint8) a strip of frames.
    """
    if image.ndim == VIDEO:
        image = strip(image)
    return Image.fromarray(eight_bits(image).permute(1, 2, 0).contiguous().numpy())


def encode_png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def save_pictures(folder: Path, pictures: Mapping[PictureKey, torch.Tensor], fps: int = 16) -> None:
    """Writes ``<prompt id>-<sample>.png`` for every picture, float32 [3, H, W] in [0, 1]; each atomically. Of a video
    [3, T, H, W] (or uint8) it is a strip of frames, and ``.webp`` is the clip.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for (prompt_id, sample), image in sorted(pictures.items()):
        file = folder / f"{prompt_id}-{sample}.png"
        if image.ndim == VIDEO:
            replace_file(file.with_suffix(CLIP_SUFFIX), encode_clip(image, fps))
        replace_file(file, encode_png(to_picture(image)))


def save_references(folder: Path, prompts: Sequence[Prompt], shape: SampleShape) -> None:
    """Writes the reference pictures of prompts as models see them, named as by `save_pictures`, once.

    Raises UserError for a picture that is gone or has changed.
    """
    for prompt in (prompt for prompt in prompts if prompt.references):
        places = [folder / f"{prompt.id}-{n}.png" for n in range(len(prompt.references))]
        if all(place.exists() for place in places):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for place, pixels in zip(places, seen_pictures(prompt, shape.height, shape.width), strict=True):
            replace_file(place, encode_png(Image.fromarray(pixels.transpose(1, 2, 0))))


def picture_paths(folder: Path) -> dict[PictureKey, Path]:
    """The pictures of `save_pictures` in `folder`, by key, in key order; none if there is no folder.

    Raises UserError for a PNG file whose name is not ``<prompt id>-<sample>.png``.
    """
    found: dict[PictureKey, Path] = {}
    for path in folder.glob("*.png"):
        prompt_id, dash, sample = path.stem.rpartition("-")
        if not dash or not prompt_id or not sample.isdecimal():
            raise UserError(f"{path} is not named <prompt id>-<sample>.png; it must be elsewhere.")
        found[prompt_id, int(sample)] = path
    return dict(sorted(found.items()))


def clip_of(picture: Path) -> Path | None:
    """The clip beside a strip's file; None beside a picture's."""
    clip = picture.with_suffix(CLIP_SUFFIX)
    return clip if clip.is_file() else None


def contact_sheet(rows: Sequence[Sequence[torch.Tensor]]) -> Image.Image:
    """Lays out pictures, float32 [3, h, w] in [0, 1], or strips of videos, in rows, which may differ in length.

    Large ones are reduced by area averaging, small ones enlarged by a whole number, without smoothing; all by the same
    factor, which the frames of a strip decide. Those of different shapes have white beside them.
    """
    pictures = [[to_picture(image) for image in row] for row in rows]
    images = [image for row in rows for image in row]
    sizes = [picture.size for row in pictures for picture in row]
    widest, longest = max(width for width, _ in sizes), max(max(image.shape[-2:]) for image in images)
    enlarged = max(1, ENLARGED // widest)

    def scaled(side: int) -> int:
        return max(1, side * LARGEST // longest) if longest > LARGEST else side * enlarged

    width, height = scaled(widest), scaled(max(height for _, height in sizes))
    columns = max(len(row) for row in pictures)
    sheet = Image.new("RGB", (GAP + columns * (width + GAP), GAP + len(pictures) * (height + GAP)), "white")
    for y, row in enumerate(pictures):
        for x, picture in enumerate(row):
            resized = picture.resize((scaled(picture.width), scaled(picture.height)), Image.Resampling.BOX)
            sheet.paste(resized, (GAP + x * (width + GAP), GAP + y * (height + GAP)))
    return sheet
