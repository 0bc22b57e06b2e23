"""Pixels on tensors against Pillow, transformers' Pillow processors and torchvision."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import PIL
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor
from torchvision.transforms import functional as tv
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from solrl_ray.rewards import pillow
from solrl_ray.rewards.preprocessing import CLIP_MEAN, CLIP_STD, Preprocessing, eight_bits, longest_side

SIZES = [(512, 512), (300, 412), (37, 53), (224, 224), (224, 300)]


def noise(height: int, width: int, count: int = 1) -> Tensor:
    """Pictures of pure noise: the worst case for resizing."""
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(0))


def smooth(height: int, width: int) -> Tensor:
    return torch.nn.functional.interpolate(noise(5, 4), (height, width), mode="bicubic").clamp(0, 1)


def to_pillow(image: Tensor) -> Image.Image:
    """As the published pipelines do: scale, round, 8 bits."""
    return Image.fromarray((image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("height", "width", "scale"), [(512, 512, 224 / 512), (150, 206, 0.4), (97, 61, 0.77), (37, 53, 1.6), (64, 64, 3.5)]
)
def test_resizing_gives_pillows_bytes(height: int, width: int, scale: float, interpolation: str) -> None:
    resample = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}[interpolation]
    for picture in (noise(height, width), smooth(height, width), (noise(height, width) > 0.5).float()):
        target = round(height * scale), round(width * scale)
        expected = np.asarray(to_pillow(picture[0]).resize(target[::-1], resample))
        ours = pillow.resize(eight_bits(picture), target, interpolation)[0].permute(1, 2, 0)
        assert np.array_equal(ours.numpy().astype(np.uint8), expected)


@pytest.mark.parametrize(
    ("before", "after", "columns_first"),
    [
        ((512, 256), (448, 224), False),
        ((513, 256), (448, 224), True),
        ((1536, 512), (672, 224), True),
        ((256, 64), (32, 32), True),
    ],
)
def test_pillow_13_filters_the_columns_first_if_a_picture_is_more_than_twice_as_tall_as_wide(
    before: tuple[int, int], after: tuple[int, int], columns_first: bool
) -> None:
    picture, (height, width) = noise(*before), after
    expected = np.asarray(to_pillow(picture[0]).resize((width, height), Image.Resampling.BICUBIC))
    pixels = eight_bits(picture)
    if columns_first and int(PIL.__version__.partition(".")[0]) >= 13:
        pixels = pillow.resize(pixels, (height, before[1]), "bicubic")
    ours = pillow.resize(pixels, (height, width), "bicubic")[0].permute(1, 2, 0)
    assert np.array_equal(ours.numpy().astype(np.uint8), expected)


@pytest.mark.parametrize(("height", "width"), [*SIZES, (225, 228)])
def test_eight_bit_preprocessing_is_the_pillow_processors(tiny_clip: Path, height: int, width: int) -> None:
    settings = json.loads((tiny_clip / "preprocessor_config.json").read_text())
    processor = CLIPImageProcessorPil.from_pretrained(tiny_clip)
    picture = noise(height, width)
    expected = processor(to_pillow(picture[0]), return_tensors="pt").pixel_values
    ours = Preprocessing.from_config(settings, eight_bit=True)(picture)
    assert (ours - expected).abs().max() < 1e-6


@pytest.mark.parametrize(("height", "width"), [*SIZES, (225, 228), (229, 226)])
def test_imagerewards_pixels_are_torchvisions_of_a_pillow_image(height: int, width: int) -> None:
    published = Compose(
        [Resize(224, InterpolationMode.BICUBIC), CenterCrop(224), ToTensor(), Normalize(CLIP_MEAN, CLIP_STD)]
    )
    ours = Preprocessing.torchvision(224, interpolation="bicubic", eight_bit=True)
    picture = noise(height, width)
    assert (ours(picture)[0] - published(to_pillow(picture[0]))).abs().max() < 1e-6


@pytest.mark.parametrize(("height", "width"), [*SIZES, (225, 228), (229, 226)])
def test_clipscores_published_pixels_are_torchvisions_of_a_float_tensor(height: int, width: int) -> None:
    published = Compose([Resize(224), CenterCrop(224), Normalize(CLIP_MEAN, CLIP_STD)])
    ours = Preprocessing.torchvision(224, interpolation="bilinear", eight_bit=False)
    picture = noise(height, width, count=2)
    assert (ours(picture) - published(picture)).abs().max() < 1e-6


@pytest.mark.parametrize(("height", "width"), [(512, 512), (300, 412), (412, 300), (224, 224), (100, 37), (224, 100)])
def test_hpsv2_resizes_the_longest_side_of_a_tensor_and_pads_with_black(height: int, width: int) -> None:
    picture = noise(height, width)
    tensor = ToTensor()(to_pillow(picture[0]))
    scale = 224 / max(height, width)
    size = [round(height * scale), round(width * scale)]
    resized = tv.resize(tensor, size, InterpolationMode.BICUBIC)
    top, left = (224 - size[0]) // 2, (224 - size[1]) // 2
    expected = torch.zeros(3, 224, 224)
    expected[:, top : top + size[0], left : left + size[1]] = resized
    assert (longest_side(picture, 224)[0] - tv.normalize(expected, CLIP_MEAN, CLIP_STD)).abs().max() < 1e-5


@pytest.mark.parametrize(("kind", "largest", "mean"), [("smooth", 1.5, 0.33), ("noise", 4.5, 0.34)])
def test_without_rounding_the_pixels_are_nearly_pillows(kind: str, largest: float, mean: float) -> None:
    picture = {"smooth": smooth, "noise": noise}[kind](512, 512)
    float_path = Preprocessing(size=224, crop=(224, 224), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    difference = (float_path(picture) - dataclasses.replace(float_path, eight_bit=True)(picture)).abs() * 255
    assert 0.5 < difference.max() <= largest
    assert difference.mean() <= mean


def test_a_batch_is_preprocessed_as_its_images_alone() -> None:
    preprocessing = Preprocessing.torchvision(224, interpolation="bicubic", eight_bit=True)
    pictures = noise(300, 260, count=3)
    together = preprocessing(pictures)
    assert all(torch.equal(together[i], preprocessing(pictures[i : i + 1])[0]) for i in range(3))
