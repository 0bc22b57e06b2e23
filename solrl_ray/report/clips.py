"""Videos on the disk and in a page: a strip of frames as a picture, and a small clip that browsers play."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from solrl_ray.config.rewards import evenly_spaced

if TYPE_CHECKING:  # takes seconds; finding clips does not need it
    import torch

STRIP_FRAMES = 5
LONGEST = 256
"""Longest side of a clip, pixels; larger videos are reduced."""
MOST_FRAMES = 33
"""Frames of a clip at most; of longer videos every second, third, … for as many times as long."""
SUFFIX = ".webp"


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
        frame.thumbnail((LONGEST, LONGEST), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    duration = round(1000 * every / fps)
    frames[0].save(
        buffer, format="WEBP", save_all=True, append_images=frames[1:], duration=duration, loop=0, quality=70
    )
    return buffer.getvalue()


def clip_of(picture: Path) -> Path | None:
    """The clip beside a strip's file; None beside a picture's."""
    clip = picture.with_suffix(SUFFIX)
    return clip if clip.is_file() else None
