"""Pictures on fixed prompts and seeds, for comparison: one card per prompt, one row per policy, one column per seed."""

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
"""Longest side of an embedded picture, pixels; larger ones are reduced."""
LOSSLESS = 128
"""Pictures up to this side are embedded as PNG, larger ones as JPEG."""


@dataclass(frozen=True, slots=True)
class Picture:
    uri: str
    """Where it is."""
    alt: str
    score: str
    strip: str = ""
    """Where frames of a video are; `uri` is its clip then."""


@dataclass(frozen=True, slots=True)
class PromptPictures:
    caption: str
    means: list[str]
    """Mean score of each policy."""
    rows: dict[str, list[Picture | None]]
    """Policy → its pictures by seed; None where it has none."""


@dataclass(frozen=True, slots=True)
class Gallery:
    cards: list[PromptPictures]

    @classmethod
    def of(
        cls,
        captions: Mapping[str, str],
        pictures: Mapping[str, Mapping[PictureKey, Path]],
        scores: Mapping[str, Mapping[str, Sequence[float]]],
        score: str = "reward",
        embed: Callable[[Path], str] | None = None,
    ) -> Gallery:
        """Arrange pictures in one row per policy.

        Args:
            captions: prompt id → text, in order; prompts without pictures are left out.
            pictures: policy → picture of an address.
            scores: policy → prompt id → one score an address.
            score: what the scores are.
            embed: address of a picture; None: `data_uri`.
        """
        cards = []
        for prompt, caption in captions.items():
            known = {policy: found[prompt] for policy, found in scores.items() if found.get(prompt)}
            samples = sorted({n for found in pictures.values() for owner, n in found if owner == prompt})
            rows: dict[str, list[Picture | None]] = {}
            for policy, found in pictures.items():
                row: list[Picture | None] = []
                for n in samples:
                    value = digits(known[policy][n]) if n < len(known.get(policy, ())) else "–"
                    alt = f"{policy}, sample {n}, {score} {value}"
                    path = found.get((prompt, n))
                    row.append(None if path is None else _picture(path, alt, value, embed or data_uri))
                if any(row):
                    rows[policy] = row
            if rows:
                means = [f"{policy} {digits(math.fsum(each) / len(each))}" for policy, each in known.items()]
                cards.append(PromptPictures(caption, means, rows))
        return cls(cards)

    @classmethod
    def of_run(cls, data: RunData) -> Gallery:
        """Before and after training; no cards if the run kept no pictures."""
        evaluated = {prompt: prompt for record in data.evaluations for prompt in record.rewards}
        pictures = data.pictures
        kept = {prompt: prompt for found in pictures.values() for prompt, _ in found}
        texts = {prompt: text for record in data.evaluations for prompt, text in record.captions.items()}
        captions = {prompt: texts.get(prompt, prompt) for prompt in evaluated | kept}
        return cls.of(captions, pictures, {name: record.rewards for name, record in data.shown.items()})

    @property
    def columns(self) -> int:
        return max((len(row) for card in self.cards for row in card.rows.values()), default=1)

    @property
    def small(self) -> bool:
        """Whether pictures are so small that pixels should show."""
        shown = [picture for card in self.cards for row in card.rows.values() for picture in row if picture]
        return all(picture.uri.startswith("data:image/png") for picture in shown)


def _picture(path: Path, alt: str, score: str, embed: Callable[[Path], str]) -> Picture:
    clip = clip_of(path)
    return Picture(embed(clip), alt, score, embed(path)) if clip else Picture(embed(path), alt, score)


def data_uri(path: Path) -> str:
    """A picture as ``data:`` URI, see `reduced`."""
    content, kind = reduced(path)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def reduced(path: Path, longest: int = LARGEST) -> tuple[bytes, str]:
    """A picture's file and its kind: clips and small PNG files unchanged, larger pictures as JPEG of at most `longest`
    pixels.

    Raises UserError if it cannot be read.
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
        raise UserError(f"The picture {path} cannot be read: {error}.") from error
    picture.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=88)
    return buffer.getvalue(), "jpeg"
