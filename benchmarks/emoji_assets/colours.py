"""Names of an image's dominant colours."""

from __future__ import annotations

from collections import Counter

import numpy as np

PALETTE = (
    ("red", (221, 46, 68)),
    ("orange", (244, 144, 12)),
    ("yellow", (255, 204, 77)),
    ("green", (80, 160, 60)),
    ("green", (165, 210, 70)),
    ("teal", (40, 170, 160)),
    ("light blue", (120, 200, 245)),
    ("blue", (40, 100, 200)),
    ("purple", (140, 80, 190)),
    ("purple", (185, 140, 245)),
    ("pink", (245, 150, 190)),
    ("brown", (140, 85, 45)),
    ("beige", (245, 215, 175)),
    ("black", (30, 30, 35)),
    ("grey", (75, 78, 84)),
    ("grey", (135, 145, 155)),
    ("white", (245, 245, 245)),
)
LEAST = 0.2
"""Minimum share of the opaque pixels for a colour to be named."""
MOST = 2


def dominant(picture: np.ndarray) -> list[str]:
    """Names of an image's most frequent colours, largest share first: one to `MOST`; none if it is transparent.

    Args:
        picture: uint8 [H, W, 4]; transparent pixels do not count.
    """
    seen = picture[..., 3] > 127
    if not seen.any():
        return []
    colours = _oklab(np.array([value for _, value in PALETTE]))
    away = np.linalg.norm(_oklab(picture[seen][:, None, :3]) - colours, axis=2)
    counts: Counter[str] = Counter()
    for index, count in zip(*np.unique(away.argmin(axis=1), return_counts=True), strict=True):
        counts[PALETTE[index][0]] += int(count)
    ranked = counts.most_common(MOST)
    return [name for place, (name, count) in enumerate(ranked) if place == 0 or count >= LEAST * seen.sum()]


def _oklab(rgb: np.ndarray) -> np.ndarray:
    """Oklab values of sRGB values in 0…255, [..., 3] (Ottosson 2020). Distances in Oklab are roughly perceptual."""
    value = rgb / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    to_cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    to_lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return np.cbrt(linear @ to_cones.T) @ to_lab.T
