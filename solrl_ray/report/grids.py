"""Image files: PNG files of samples, contact sheets, and for videos a strip of frames and a small clip."""

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

if TYPE_CHECKING:  # importing torch takes seconds; listing files does not need it
    import torch

PictureKey = tuple[str, int]
"""(prompt id, sample number): fixed address of an image."""
REFERENCE = "reference"
"""Name of the row with the reference images of prompts, and of their folder in an evaluation."""
LARGEST = 256
"""Longest side of an image in a contact sheet, and of a clip, in pixels; larger ones are scaled down."""
ENLARGED = 96
"""Images narrower than this many pixels are enlarged by the largest whole factor that keeps them within it."""
VIDEO = 4
"""Number of dimensions of a video tensor [3, T, H, W]."""
STRIP_FRAMES = 5
"""Frames in the strip of a video."""
MOST_FRAMES = 33
"""Maximum number of frames in a clip. Longer videos keep every n-th frame, each shown n times as long."""
CLIP_SUFFIX = ".webp"
GAP = 2
"""Space between and around the images of a contact sheet, in pixels."""


def eight_bits(image: torch.Tensor) -> torch.Tensor:
    """Convert to uint8 on the CPU, as stored in files. Floats are clipped to [0, 1]; uint8 is unchanged."""
    if not image.is_floating_point():
        return image.cpu()
    return (image.detach().float().cpu().clamp(0, 1) * 255).round().byte()


def strip(video: torch.Tensor) -> torch.Tensor:
    """Evenly spaced frames of a video [3, T, H, W], side by side: [3, H, n · W]."""
    return video[:, evenly_spaced(video.shape[1], STRIP_FRAMES)].permute(0, 2, 1, 3).flatten(2)


def encode_clip(video: torch.Tensor, fps: int) -> bytes:
    """Encode a video [3, T, H, W], float in [0, 1] or uint8, as an animated WebP that loops forever."""
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
    """Convert a tensor to an image with eight bits per channel.

    `image`: float32 [3, H, W] in [0, 1] (values outside are clipped), or a video [3, T, H, W], float32 or uint8, which
    becomes a strip of frames.
    """
    if image.ndim == VIDEO:
        image = strip(image)
    return Image.fromarray(eight_bits(image).permute(1, 2, 0).contiguous().numpy())


def encode_png(picture: Image.Image) -> bytes:
    """Encode an image as PNG."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def save_pictures(folder: Path, pictures: Mapping[PictureKey, torch.Tensor], fps: int = 16) -> None:
    """Write each image, float32 [3, H, W] in [0, 1], to ``<prompt id>-<sample>.png``, each file atomically.

    For a video [3, T, H, W], float32 or uint8, the PNG file is a strip of frames, and ``.webp`` is a clip at `fps`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for (prompt_id, sample), image in sorted(pictures.items()):
        file = folder / f"{prompt_id}-{sample}.png"
        if image.ndim == VIDEO:
            replace_file(file.with_suffix(CLIP_SUFFIX), encode_clip(image, fps))
        replace_file(file, encode_png(to_picture(image)))


def save_references(folder: Path, prompts: Sequence[Prompt], shape: SampleShape) -> None:
    """Write the reference images of prompts as the model sees them, with the names of `save_pictures`.

    Prompts whose files exist are skipped. Raises UserError if a reference image is missing or has changed.
    """
    for prompt in (prompt for prompt in prompts if prompt.references):
        files = [folder / f"{prompt.id}-{n}.png" for n in range(len(prompt.references))]
        if all(file.exists() for file in files):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for file, pixels in zip(files, seen_pictures(prompt, shape.height, shape.width), strict=True):
            replace_file(file, encode_png(Image.fromarray(pixels.transpose(1, 2, 0))))


def picture_paths(folder: Path) -> dict[PictureKey, Path]:
    """Address → file of the images that `save_pictures` wrote to `folder`, in order; empty if the folder is missing.

    Raises UserError for a PNG file whose name is not ``<prompt id>-<sample>.png``.
    """
    files: dict[PictureKey, Path] = {}
    for path in folder.glob("*.png"):
        prompt_id, dash, sample = path.stem.rpartition("-")
        if not dash or not prompt_id or not sample.isdecimal():
            raise UserError(f"{path} is not named <prompt id>-<sample>.png; move it to another folder.")
        files[prompt_id, int(sample)] = path
    return dict(sorted(files.items()))


def clip_of(picture: Path) -> Path | None:
    """The clip that belongs to the strip of a video; None for an image."""
    clip = picture.with_suffix(CLIP_SUFFIX)
    return clip if clip.is_file() else None


def contact_sheet(rows: Sequence[Sequence[torch.Tensor]]) -> Image.Image:
    """Lay out images, float32 [3, h, w] in [0, 1], or strips of videos, in rows, which may differ in length.

    All images are scaled by the same factor: large ones down by area averaging, small ones up by a whole number without
    smoothing. For videos, the size of a frame decides the factor. Images of different sizes are padded with white.
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
