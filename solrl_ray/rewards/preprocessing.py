"""Image preprocessing of the published rewards (CLIP, HPSv2), for tensors on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_ray.rewards import pillow

INTERPOLATION = {2: "bilinear", 3: "bicubic"}
"""`PIL.Image.Resampling` numbers."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
CLIP_SIZE = 224


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """Resizing, centre crop and normalisation, as in an image processor of transformers or torchvision.

    With `eight_bit`, pixels equal those of the published pipelines, which use Pillow: they are rounded to 8 bits, then
    resized as in Pillow (`rewards.pillow`). Without it nothing is rounded, as in torchvision for float tensors.

    From 512 to 224 pixels the two differ by 0.3/255 per channel on average. The largest difference is 1.4/255 on smooth
    images, and 4.1/255 on noise, where Pillow also clips the overshoot of its first pass. Bounds:
    `tests/unit/rewards/test_preprocessing.py`.
    """

    size: tuple[int, int] | int | None
    """(height, width), or the shortest edge, pixels; None: no resizing."""
    crop: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    eight_bit: bool = False
    """Round to 8 bits and resize as in Pillow."""
    torchvision_crop: bool = False
    """Rounding of half an odd margin: True: to even, as in torchvision; False: down, as in transformers."""

    @classmethod
    def torchvision(cls, size: int, *, interpolation: str, eight_bit: bool) -> Preprocessing:
        """torchvision's ``Resize(size)``, ``CenterCrop(size)``, ``Normalize`` with CLIP's mean and standard deviation.

        `eight_bit`: as torchvision treats Pillow images; otherwise as float tensors (antialiased, its default since
        0.17).
        """
        return cls(
            size=size,
            crop=(size, size),
            mean=CLIP_MEAN,
            std=CLIP_STD,
            interpolation=interpolation,
            eight_bit=eight_bit,
            torchvision_crop=True,
        )

    @classmethod
    def from_config(cls, config: dict[str, Any], *, eight_bit: bool = False) -> Preprocessing:
        """Convert a ``preprocessor_config.json``; missing keys have the defaults of `CLIPImageProcessor`.

        Raises ValueError for settings that are not supported.
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
            eight_bit=eight_bit,
        )

    def __call__(self, images: Tensor) -> Tensor:
        """Convert float32 [B, 3, H, W] in [0, 1] to normalised pixel values [B, 3, *crop] on the same device."""
        target = self._resized(images.shape[2], images.shape[3])
        if self.eight_bit:
            images = pillow.resize(eight_bits(images), target, self.interpolation).float() / 255
        elif target != tuple(images.shape[2:]):
            images = F.interpolate(images, target, mode=self.interpolation, antialias=True, align_corners=False)
            # Bicubic interpolation overshoots; 8-bit images cannot.
            images = images.clamp(0, 1)
        if self.crop is not None:
            images = _centre(images, *self.crop, rounded=self.torchvision_crop)
        return _normalized(images, self.mean, self.std)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if self.size is None:
            return height, width
        if isinstance(self.size, tuple):
            return self.size
        if height <= width:
            return self.size, int(self.size * width / height)
        return int(self.size * height / width), self.size


def longest_side(images: Tensor, size: int) -> Tensor:
    """HPSv2's preprocessing: scale the longest side to `size`, pad to a square, normalise with CLIP's constants.

    It converts float32 [B, 3, H, W] in [0, 1] to [B, 3, size, size] on the same device.

    As in `hpsv2.src.open_clip.transform`, 8-bit pixels are converted to float before resizing, so overshoot is kept.
    The padding is black before normalisation. Resizing is bicubic and antialiased, the default of torchvision since
    0.17. Earlier versions did not antialias tensors, one reason why older reports have other scores.
    """
    images = eight_bits(images) / 255
    scale = size / max(images.shape[2:])
    if scale != 1:
        height, width = (round(side * scale) for side in images.shape[2:])
        images = F.interpolate(images, (height, width), mode="bicubic", antialias=True, align_corners=False)
    height, width = images.shape[2:]
    top, left = (size - height) // 2, (size - width) // 2
    images = F.pad(images, (left, size - width - left, top, size - height - top))
    return _normalized(images, CLIP_MEAN, CLIP_STD)


def eight_bits(images: Tensor) -> Tensor:
    """Images in [0, 1] as integers from 0 to 255, float32; rounded half to even, as in NumPy."""
    return (images.float() * 255).round()


def _normalized(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    centre = torch.tensor(mean, device=images.device).view(1, 3, 1, 1)
    deviation = torch.tensor(std, device=images.device).view(1, 3, 1, 1)
    return (images - centre) / deviation


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


def _centre(images: Tensor, height: int, width: int, *, rounded: bool) -> Tensor:
    margins = images.shape[2] - height, images.shape[3] - width
    if min(margins) < 0:
        raise ValueError(f"images of {tuple(images.shape[2:])} pixels are smaller than the crop {(height, width)}")
    top, left = (round(margin / 2) if rounded else margin // 2 for margin in margins)
    return images[:, :, top : top + height, left : left + width]
