"""Pillow's 8-bit resampling as matrix products: the same bytes as `Image.resize`, on any device, for a whole batch.

The published rewards were trained and evaluated on images resized by Pillow. Pillow (`src/libImaging/Resample.c`)
filters the rows, rounds to 8 bits, filters the columns, and rounds again. Its filter weights are fixed-point numbers.
Weights, pixels and their sums are integers below 2^53, so float64 products are exact on every device, in every order
of summation.

Rows are filtered first here, as in all versions of Pillow for squares and most other shapes. For some images Pillow 13
filters columns first, which gives other bytes. These are images that shrink with their aspect ratio and are more than
twice as tall as wide, and some whose height shrinks more than their width. Pillow 12.3 does not do so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

PRECISION_BITS = 22
"""Fractional bits of a filter weight: 32, minus 8 for the pixel and 2 for overshoot."""
BICUBIC_A = -0.5


def _bilinear(x: float) -> float:
    return max(1.0 - abs(x), 0.0)


def _bicubic(x: float) -> float:
    x = abs(x)
    if x < 1.0:
        return ((BICUBIC_A + 2.0) * x - (BICUBIC_A + 3.0)) * x * x + 1
    if x < 2.0:
        return (((x - 5) * x + 8) * x - 4) * BICUBIC_A
    return 0.0


FILTERS: dict[str, tuple[Callable[[float], float], float]] = {"bilinear": (_bilinear, 1.0), "bicubic": (_bicubic, 2.0)}
"""Filter function and its support in output pixels."""


def resize(images: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """Resize as `PIL.Image.resize` does for 8-bit images.

    Args:
        images: [..., H, W], integers from 0 to 255, any dtype.
        size: height and width of the result, pixels.
        interpolation: ``bilinear`` or ``bicubic``.

    Returns:
        float64 [..., *size], integers from 0 to 255.
    """
    height, width = images.shape[-2:]
    images = images.to(torch.float64)
    if width != size[1]:
        images = _rounded(images @ _weights(width, size[1], interpolation).to(images.device).T)
    if height != size[0]:
        images = _rounded(_weights(height, size[0], interpolation).to(images.device) @ images)
    return images


def _rounded(sums: Tensor) -> Tensor:
    return torch.floor((sums + 2 ** (PRECISION_BITS - 1)) / 2**PRECISION_BITS).clamp(0, 255)


@lru_cache(maxsize=16)
def _weights(before: int, after: int, interpolation: str) -> Tensor:
    """Fixed-point filter weights: integers as float64 [after, before]."""
    function, support = FILTERS[interpolation]
    scale = before / after
    stretch = max(scale, 1.0)
    matrix = torch.zeros(after, before, dtype=torch.float64)
    for row in range(after):
        centre = (row + 0.5) * scale
        first = max(int(centre - support * stretch + 0.5), 0)
        last = min(int(centre + support * stretch + 0.5), before)
        taps = [function((column - centre + 0.5) * (1.0 / stretch)) for column in range(first, last)]
        # A loop, for Pillow's order of summation.
        total = 0.0
        for tap in taps:
            total += tap
        for column, tap in zip(range(first, last), taps, strict=True):
            matrix[row, column] = math.trunc(tap / total * 2**PRECISION_BITS + math.copysign(0.5, tap))
    return matrix
