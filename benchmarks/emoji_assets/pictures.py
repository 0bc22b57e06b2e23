"""Images and captions as tensors on a device, for random batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emoji_assets import captions
from emoji_assets.captions import Caption, Parts
from torch import Tensor
from torch.nn import functional

VARIANTS = 8
"""Captions per image."""


@dataclass(frozen=True, slots=True)
class Texts:
    """`VARIANTS` captions of each of N images."""

    clip: Tensor
    """Token ids: int64 [N, VARIANTS, length]."""
    t5: Tensor
    says_style: Tensor
    """bool [N, VARIANTS]."""


@dataclass(frozen=True, slots=True)
class World:
    """Training images with their captions and properties."""

    parts: list[Parts]
    pixels: Tensor
    """uint8 [N, 3, size, size]."""
    texts: Texts
    names: Tensor
    """A number for each concept: int64 [N]; `styles` and `tones` likewise."""
    styles: Tensor
    tones: Tensor
    mirrors: Tensor
    """bool [N]: True if the image may be mirrored."""

    def __len__(self) -> int:
        return len(self.parts)


def load_pixels(folder: Path, parts: Sequence[Parts], size: int) -> np.ndarray:
    """All images, uint8 [N, size, size, 3]. Raises ValueError if their number or size is wrong."""
    pixels = np.load(folder / "pictures.npy")
    if pixels.shape != (len(parts), size, size, 3):
        raise ValueError(f"{folder}/pictures.npy has shape {pixels.shape}; it must be {(len(parts), size, size, 3)}")
    return pixels


def world(parts: list[Parts], pixels: np.ndarray, tokenizers: tuple[Any, Any], device: torch.device) -> World:
    """Build the training data. `tokenizers`: CLIP's and T5's. Captions are drawn with a fixed seed."""
    generator = np.random.default_rng(7)
    drawn = [[captions.draw(each, generator) for _ in range(VARIANTS)] for each in parts]

    def numbers(values: Sequence[str]) -> Tensor:
        of = {value: number for number, value in enumerate(sorted(set(values)))}
        return torch.tensor([of[value] for value in values], device=device)

    return World(
        parts=parts,
        pixels=torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().to(device),
        texts=_texts(drawn, tokenizers, device),
        names=numbers([each.name for each in parts]),
        styles=numbers([each.style for each in parts]),
        tones=numbers([each.tone for each in parts]),
        mirrors=torch.tensor([each.mirrors for each in parts], device=device),
    )


def token_ids(tokenizer: Any, texts: Sequence[str], device: torch.device) -> Tensor:
    """Token ids: int64 [B, length], padded."""
    ids: Tensor = tokenizer(list(texts), padding="max_length", truncation=True, return_tensors="pt").input_ids
    return ids.to(device)


def as_floats(pixels: Tensor) -> Tensor:
    """Convert uint8 to float32 in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def moved(pictures: Tensor, mirrors: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image [B, 3, H, W] by random whole pixels within its margin (white is 1), and mirror half of those for
    which `mirrors` (bool [B]) is True.
    """
    count, _, height, width = pictures.shape
    device, reach = pictures.device, height // 24
    flip = mirrors & (torch.rand(count, device=device, generator=generator) < 0.5)
    pictures = torch.where(flip[:, None, None, None], pictures.flip(3), pictures)
    padded = functional.pad(pictures, (reach,) * 4, value=1.0)
    shift = torch.randint(2 * reach + 1, (count, 2), device=device, generator=generator)
    rows = shift[:, :1] + torch.arange(height, device=device)
    columns = shift[:, 1:] + torch.arange(width, device=device)
    which = torch.arange(count, device=device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def half(parts: Sequence[Parts], second: bool) -> list[int]:
    """Rows of the images that train the reward, or with `second` the judge. The halves share no image, but most
    concepts."""
    generator = np.random.default_rng(8)
    order = sorted({(each.name, each.style, each.tone) for each in parts})
    side = dict(zip(order, generator.random(len(order)) < 0.5, strict=True))
    return [row for row, each in enumerate(parts) if side[each.name, each.style, each.tone] == second]


def _texts(drawn: Sequence[Sequence[Caption]], tokenizers: tuple[Any, Any], device: torch.device) -> Texts:
    flat = [caption.text for row in drawn for caption in row]
    clip, t5 = (token_ids(each, flat, device).unflatten(0, (len(drawn), -1)) for each in tokenizers)
    says = torch.tensor([[caption.says_style for caption in row] for row in drawn], device=device)
    return Texts(clip, t5, says)
