"""The testbed's world: captions from a grammar, and code that draws the images they describe.

A scene is one object, or two in a spatial relation, on a plain background::

    a large red circle on black
    a small blue ring left of a large green cross on white

Images are 32 × 32 RGB, anti-aliased with signed distances. Exact positions and sizes, which the caption leaves open,
come from eight numbers in (0, 1). So an image is a pure function of the scene and these numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from solrl_ray.records import Address

RESOLUTION = 32
"""Height and width of an image, in pixels."""

JITTERS = 8
"""Number of uniform random numbers per image: dx, dy and size of each object at 0–2 and 4–6. The fourth moves both
objects perpendicular to the axis of the relation; the eighth is not used.
"""

SIZES: dict[str, float] = {"small": 0.22, "large": 0.40}
"""Half the extent of an object; the image spans -1 to 1."""

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.65, 0.15),
    "blue": (0.15, 0.25, 0.95),
    "yellow": (0.98, 0.90, 0.10),
    "purple": (0.50, 0.10, 0.65),
    "orange": (1.00, 0.55, 0.05),
    "cyan": (0.10, 0.85, 0.90),
    "pink": (1.00, 0.55, 0.75),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
RELATIONS: dict[str, tuple[int, int]] = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
"""Direction (x, y) from the second object to the first; y points down."""

BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "black": (0.03, 0.03, 0.03),
    "white": (0.97, 0.97, 0.97),
    "grey": (0.50, 0.50, 0.50),
}

FIELD_VALUES: tuple[tuple[str, ...], ...] = (
    tuple(SIZES),
    tuple(COLOURS),
    SHAPES,
    tuple(RELATIONS),
    tuple(SIZES),
    tuple(COLOURS),
    SHAPES,
    tuple(BACKGROUNDS),
)
"""Words of a scene. `Scene.fields` has the number of objects, then an index into each of these tuples."""

_OBJECT = rf"a ({'|'.join(SIZES)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
_CAPTION = re.compile(rf"{_OBJECT}(?: ({'|'.join(RELATIONS)}) {_OBJECT})? on ({'|'.join(BACKGROUNDS)})", flags=re.ASCII)


@dataclass(frozen=True, slots=True)
class Scene:
    """The meaning of a caption. `fields`: number of objects, then one index per entry of `FIELD_VALUES`.

    With one object, the fields of relation and second object are 0 and unused.
    """

    fields: tuple[int, ...]

    @property
    def caption(self) -> str:
        """The caption that `parse` reads as this scene."""
        count, *indices = self.fields
        size, colour, shape, relation, size2, colour2, shape2, background = (
            words[i] for words, i in zip(FIELD_VALUES, indices, strict=True)
        )
        second = f" {relation} a {size2} {colour2} {shape2}" if count == 2 else ""
        return f"a {size} {colour} {shape}{second} on {background}"


def parse(caption: str) -> Scene:
    """The scene that `caption` describes. Raises ValueError for a text outside the grammar."""
    match = _CAPTION.fullmatch(caption.strip())
    if match is None:
        raise ValueError(
            f"{caption!r} is not a caption of the testbed's world; "
            "a valid one is 'a small red ring left of a large blue cross on white'"
        )
    words = match.groups()
    indices = [values.index(word) if word is not None else 0 for values, word in zip(FIELD_VALUES, words, strict=True)]
    return Scene((1 if words[3] is None else 2, *indices))


def render(
    fields: torch.Tensor, jitter: torch.Tensor, resolution: int = RESOLUTION, centres: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw a batch of scenes.

    Args:
        fields: int64 [B, 9], each row as `Scene.fields`.
        jitter: float32 [B, 8] in (0, 1).
        resolution: height and width of the images, in pixels.
        centres: centres of the objects, float32 [B, 2 objects, (x, y)]; None: computed from the relation and `jitter`.

    Returns:
        float32 [B, 3, resolution, resolution] in [0, 1], on the device of `fields`.
    """
    device = fields.device
    grid = (torch.arange(resolution, device=device, dtype=torch.float32) + 0.5) * (2.0 / resolution) - 1.0
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    image = _palette(BACKGROUNDS, fields[:, 8])[:, :, None, None].expand(-1, -1, resolution, resolution)
    centres = _centres(fields, jitter) if centres is None else centres
    for number, first_field in ((0, 1), (1, 5)):
        size, colour, shape = fields[:, first_field], fields[:, first_field + 1], fields[:, first_field + 2]
        extent = torch.tensor(list(SIZES.values()), device=device)[size]
        extent = extent * (1.0 + 0.12 * (jitter[:, 4 * number + 2] - 0.5))
        distance = _signed_distance(
            shape, x - centres[:, number, 0, None, None], y - centres[:, number, 1, None, None], extent[:, None, None]
        )
        cover = (0.5 - distance * (resolution / 2)).clamp(0.0, 1.0)
        cover = cover * (fields[:, 0] > number)[:, None, None]
        image = torch.lerp(image, _palette(COLOURS, colour)[:, :, None, None], cover[:, None])
    return image


def picture(text: str, address: Address) -> torch.Tensor:
    """The real image of the caption `text`; its free numbers are drawn at `address`.

    Returns float32 [3, 32, 32] in [0, 1]. Raises ValueError if `text` is not a caption of the testbed.
    """
    from solrl_ray.sampling.noise import uniform

    fields = torch.tensor([parse(text).fields])
    jitter = torch.from_numpy(uniform(address, (1, JITTERS))).float()
    return render(fields, jitter)[0]


def _palette(colours: dict[str, tuple[float, float, float]], index: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(colours.values()), device=index.device)[index]


def _centres(fields: torch.Tensor, jitter: torch.Tensor) -> torch.Tensor:
    """Centres of the objects, [B, 2 objects, (x, y)]: a single object is near the middle, two are on opposite sides."""
    directions = torch.tensor(list(RELATIONS.values()), device=fields.device, dtype=torch.float32)
    direction = directions[fields[:, 4]]
    across = direction.abs().flip(1) * 0.4 * (jitter[:, 3, None] - 0.5)
    near = 0.12 * (torch.stack([jitter[:, 0:2], jitter[:, 4:6]], dim=1) - 0.5)
    pair = torch.stack([0.48 * direction, -0.48 * direction], dim=1) + across[:, None] + near
    alone = 0.7 * (torch.stack([jitter[:, 0:2], jitter[:, 4:6]], dim=1) - 0.5)
    return torch.where((fields[:, 0] == 2)[:, None, None], pair, alone)


def _signed_distance(shape: torch.Tensor, x: torch.Tensor, y: torch.Tensor, extent: torch.Tensor) -> torch.Tensor:
    """Distance to the outline of each row's shape, negative inside. All tensors are [B, H, W], except `shape` [B]."""
    radius = torch.sqrt(x * x + y * y)
    circle = radius - extent
    square = torch.maximum(x.abs(), y.abs()) - 0.86 * extent
    slope = 0.4472135955  # sides of an isosceles triangle twice as steep as wide: normal (2, -1) / sqrt(5)
    triangle = torch.maximum(2 * slope * x.abs() - slope * (y + extent), y - 0.85 * extent)
    long, short = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    cross = torch.maximum(long - extent, short - 0.32 * extent)
    ring = (radius - 0.78 * extent).abs() - 0.24 * extent
    distances = torch.stack([circle, square, triangle, cross, ring], dim=1)
    return distances.gather(1, shape[:, None, None, None].expand(-1, 1, *x.shape[1:]))[:, 0]
