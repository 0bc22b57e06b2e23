"""Image preprocessing of a transformers checkpoint, on tensors and on their device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

INTERPOLATION = {2: "bilinear", 3: "bicubic"}
"""`PIL.Image.Resampling` numbers."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
CLIP_SIZE = 224


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """Resize, centre crop, normalise, as a CLIP image processor does on 8-bit images.

    Here nothing is rounded to 8 bits, so an image of the right size differs by at most 1/510 in a channel
    from what the processor sees, and a resized one by at most 1.5/255 (Pillow rounds after each direction).
    """

    size: tuple[int, int] | int | None
    """(height, width), the shortest edge, or no resizing; pixels."""
    crop: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Preprocessing:
        """Read a ``preprocessor_config.json``; absent keys have the defaults of `CLIPImageProcessor`.

        Raises `ValueError` for settings that are not supported here.
        """
        resample = config.get("resample", 3)
        if resample not in INTERPOLATION:
            raise ValueError(f"resample {resample} is neither bilinear (2) nor bicubic (3)")
        if not config.get("do_rescale", True) or abs(config.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
            raise ValueError("images must be rescaled from 0…255 to 0…1")
        normalize = config.get("do_normalize", True)
        return cls(
            size=_size(config.get("size", CLIP_SIZE)) if config.get("do_resize", True) else None,
            crop=_crop(config.get("crop_size", CLIP_SIZE)) if config.get("do_center_crop", True) else None,
            mean=tuple(config.get("image_mean", CLIP_MEAN)) if normalize else (0.0, 0.0, 0.0),
            std=tuple(config.get("image_std", CLIP_STD)) if normalize else (1.0, 1.0, 1.0),
            interpolation=INTERPOLATION[resample],
        )

    def __call__(self, images: Tensor) -> Tensor:
        """float32 [B, 3, H, W] in [0, 1] to normalised pixel values [B, 3, *crop] on the same device."""
        target = self._resized(images.shape[2], images.shape[3])
        if target != tuple(images.shape[2:]):
            images = F.interpolate(images, target, mode=self.interpolation, antialias=True, align_corners=False)
            # Bicubic overshoots; 8-bit images cannot.
            images = images.clamp(0, 1)
        if self.crop is not None:
            images = _centre(images, *self.crop)
        mean = torch.tensor(self.mean, device=images.device).view(1, 3, 1, 1)
        std = torch.tensor(self.std, device=images.device).view(1, 3, 1, 1)
        return (images - mean) / std

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if self.size is None:
            return height, width
        if isinstance(self.size, tuple):
            return self.size
        if height <= width:
            return self.size, int(self.size * width / height)
        return int(self.size * height / width), self.size


def _size(value: int | dict[str, int]) -> tuple[int, int] | int:
    if isinstance(value, int):
        return value
    if value.keys() == {"shortest_edge"}:
        return value["shortest_edge"]
    if value.keys() == {"height", "width"}:
        return value["height"], value["width"]
    raise ValueError(f"size {value} has neither 'shortest_edge' nor 'height' and 'width'")


def _crop(value: int | dict[str, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value["height"], value["width"])


def _centre(images: Tensor, height: int, width: int) -> Tensor:
    top, left = (images.shape[2] - height) // 2, (images.shape[3] - width) // 2
    if top < 0 or left < 0:
        raise ValueError(f"images of {tuple(images.shape[2:])} pixels are smaller than the crop {(height, width)}")
    return images[:, :, top : top + height, left : left + width]
