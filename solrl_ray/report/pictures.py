"""Image comparison on fixed prompts and seeds: one box per prompt, one row per policy, one column per seed."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from solrl_ray.common.files import read_regular
from solrl_ray.errors import UserError
from solrl_ray.report.data import RunData
from solrl_ray.report.grids import CLIP_SUFFIX, PictureKey, clip_of
from solrl_ray.report.rendering import digits

LARGEST = 320
"""Longest side of an embedded image, in pixels; larger images are scaled down."""
LOSSLESS = 128
"""Images with sides up to this many pixels are embedded as PNG, larger ones as JPEG."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image or video in the gallery."""

    uri: str
    """Address of the image, or of the clip of a video."""
    alt: str
    """Alternative text."""
    score: str
    """Reward, formatted; – if unknown."""
    strip: str = ""
    """Address of the strip with frames of a video; empty for an image."""


@dataclass(frozen=True, slots=True)
class PromptPictures:
    """Images of all policies for one prompt."""

    caption: str
    """Text of the prompt."""
    means: list[str]
    """Mean score of each policy, formatted with its name."""
    rows: dict[str, list[Picture | None]]
    """Policy → its images, one per seed; None where there is none."""


@dataclass(frozen=True, slots=True)
class Gallery:
    """Images of several policies for several prompts."""

    cards: list[PromptPictures]
    """One per prompt that has images."""

    @classmethod
    def of(
        cls,
        captions: Mapping[str, str],
        pictures: Mapping[str, Mapping[PictureKey, Path]],
        scores: Mapping[str, Mapping[str, Sequence[float]]],
        score: str = "reward",
        embed: Callable[[Path], str] | None = None,
    ) -> Gallery:
        """Arrange images with one row per policy.

        Args:
            captions: prompt id → text, in the order to show; prompts without images are left out.
            pictures: policy → address (prompt id, sample) → file of the image.
            scores: policy → prompt id → one score per address.
            score: name of the score, for the alternative text.
            embed: function from the file of an image to its URI; None: `data_uri`.
        """
        cards = []
        for prompt, caption in captions.items():
            known = {policy: rewards[prompt] for policy, rewards in scores.items() if rewards.get(prompt)}
            samples = sorted({n for files in pictures.values() for owner, n in files if owner == prompt})
            rows: dict[str, list[Picture | None]] = {}
            for policy, files in pictures.items():
                row: list[Picture | None] = []
                for n in samples:
                    value = digits(known[policy][n]) if n < len(known.get(policy, ())) else "–"
                    alt = f"{policy}, sample {n}, {score} {value}"
                    path = files.get((prompt, n))
                    row.append(None if path is None else _picture(path, alt, value, embed or data_uri))
                if any(row):
                    rows[policy] = row
            if rows:
                means = [f"{policy} {digits(math.fsum(values) / len(values))}" for policy, values in known.items()]
                cards.append(PromptPictures(caption, means, rows))
        return cls(cards)

    @classmethod
    def of_run(cls, data: RunData) -> Gallery:
        """Images before and after training; no boxes if the run kept no images."""
        evaluated = {prompt: prompt for record in data.evaluations for prompt in record.rewards}
        pictures = data.pictures
        kept = {prompt: prompt for files in pictures.values() for prompt, _ in files}
        texts = {prompt: text for record in data.evaluations for prompt, text in record.captions.items()}
        captions = {prompt: texts.get(prompt, prompt) for prompt in evaluated | kept}
        return cls.of(captions, pictures, {name: record.rewards for name, record in data.shown.items()})

    @property
    def columns(self) -> int:
        """Number of columns: the largest number of seeds of a row, at least 1."""
        return max((len(row) for card in self.cards for row in card.rows.values()), default=1)

    @property
    def small(self) -> bool:
        """True if all images are so small that they should be enlarged without smoothing."""
        shown = [picture for card in self.cards for row in card.rows.values() for picture in row if picture]
        return all(picture.uri.startswith("data:image/png") for picture in shown)


def _picture(path: Path, alt: str, score: str, embed: Callable[[Path], str]) -> Picture:
    clip = clip_of(path)
    return Picture(embed(clip), alt, score, embed(path)) if clip else Picture(embed(path), alt, score)


def data_uri(path: Path) -> str:
    """An image as ``data:`` URI, scaled down by `reduced`."""
    content, kind = reduced(path)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def reduced(path: Path, longest: int = LARGEST) -> tuple[bytes, str]:
    """Content and format (``png``, ``jpeg`` or ``webp``) of an image for embedding.

    Clips and small PNG files are unchanged; larger images become JPEG with sides of at most `longest` pixels.

    Raises UserError if the file cannot be read.
    """
    try:
        content = read_regular(path)
        if path.suffix == CLIP_SUFFIX:
            return content, "webp"
        with Image.open(io.BytesIO(content)) as file:
            if max(file.size) <= LOSSLESS and file.format == "PNG":
                return content, "png"
            picture = file.convert("RGB")
    except Exception as error:  # Pillow's decoders raise many kinds
        raise UserError(f"The image {path} cannot be read: {error}.") from error
    picture.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=88)
    return buffer.getvalue(), "jpeg"
