"""Pictures on the disk: image tensors to PNG files and back, and contact sheets of them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from solrl_ray.common.files import replace_file
from solrl_ray.errors import UserError

if TYPE_CHECKING:  # takes seconds, and who looks for pictures alone does without
    import torch

PictureKey = tuple[str, int]
"""(prompt id, sample number): which fixed address a picture was drawn from."""


def to_bytes(image: torch.Tensor) -> torch.Tensor:
    """float32 [3, H, W] in [0, 1] → uint8 [H, W, 3]; values outside the range are clipped.

    Raises:
        ValueError: wrong shape, or a value that is not finite.
    """
    if image.ndim != 3 or image.shape[0] != 3:
        raise ValueError(f"A picture must have shape [3, H, W], got {list(image.shape)}.")
    if not bool(image.isfinite().all()):
        raise ValueError("A picture holds values that are not finite.")
    return (image.detach().float().cpu().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous()


def encode_png(image: torch.Tensor) -> bytes:
    """PNG file of one picture, float32 [3, H, W] in [0, 1], eight bits a channel."""
    buffer = io.BytesIO()
    Image.fromarray(to_bytes(image).numpy()).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def write_picture(path: Path, image: torch.Tensor) -> None:
    """Writes one picture, float32 [3, H, W] in [0, 1], as PNG; complete or not at all."""
    replace_file(path, encode_png(image))


def save_pictures(folder: Path, pictures: Mapping[PictureKey, torch.Tensor]) -> list[Path]:
    """Writes ``<prompt id>-<sample>.png`` for every picture; returns the paths in key order."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for prompt_id, sample in sorted(pictures):
        path = folder / f"{prompt_id}-{sample}.png"
        write_picture(path, pictures[prompt_id, sample])
        paths.append(path)
    return paths


def picture_paths(folder: Path) -> dict[PictureKey, Path]:
    """The pictures that `save_pictures` left in `folder`, by key, in key order; none if there is no folder.

    Raises:
        UserError: a PNG file whose name is not ``<prompt id>-<sample>.png``.
    """
    found: dict[PictureKey, Path] = {}
    for path in folder.glob("*.png"):
        prompt_id, dash, sample = path.stem.rpartition("-")
        if not dash or not prompt_id or not sample.isdigit():
            raise UserError(f"{path} is not named <prompt id>-<sample>.png; it must be elsewhere.")
        found[prompt_id, int(sample)] = path
    return dict(sorted(found.items()))


def shrink(image: torch.Tensor, side: int) -> torch.Tensor:
    """float32 [3, H, W], reduced by area averaging if a side is longer than `side`."""
    _, height, width = image.shape
    longest = max(height, width)
    if longest <= side:
        return image
    import torch

    size = (max(1, height * side // longest), max(1, width * side // longest))
    return torch.nn.functional.interpolate(image.float()[None], size=size, mode="area")[0]


def contact_sheet(
    rows: Sequence[Sequence[torch.Tensor]], *, scale: int = 1, gap: int = 2, background: float = 1.0
) -> torch.Tensor:
    """Lays pictures of one size out in rows.

    Args:
        rows: pictures float32 [3, h, w] in [0, 1]; rows may differ in length.
        scale: whole-number enlargement, each pixel a `scale` × `scale` square (no smoothing).
        gap: pixels between pictures and around the sheet, after enlargement.
        background: grey level of gaps and empty places.

    Returns:
        float32 [3, H, W].

    Raises:
        ValueError: no picture, or pictures of different sizes.
    """
    import torch

    shapes = {tuple(image.shape) for row in rows for image in row}
    if len(shapes) != 1:
        raise ValueError(f"A contact sheet needs pictures of one shape, got {sorted(shapes) or 'none'}.")
    _, height, width = (scale * side for side in shapes.pop())
    columns = max(len(row) for row in rows)
    sheet = torch.full(
        (3, gap + len(rows) * (height + gap), gap + columns * (width + gap)), background, dtype=torch.float32
    )
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            top, left = gap + y * (height + gap), gap + x * (width + gap)
            enlarged = image.float().cpu().repeat_interleave(scale, dim=1).repeat_interleave(scale, dim=2)
            sheet[:, top : top + height, left : left + width] = enlarged
    return sheet
