"""Captions and prompts of images. Captions are random: each draw mentions other properties. Prompts are fixed.

red apple, food fruit, red and green, twemoji style
woman firefighter with dark skin, yellow and red, blob style
fruit red apple, flat style              (tags in place of the name, sometimes)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The properties of an image."""

    name: str
    category: str
    tags: tuple[str, ...]
    style: str
    tone: str
    colours: tuple[str, ...]
    held_out: bool
    mirrors: bool
    """True if the mirrored image fits the same captions."""

    @property
    def subject(self) -> str:
        return _toned(self.name, self.tone)

    @property
    def prompt(self) -> str:
        return f"{self.subject}, {self.style} style"

    def shows(self, prompt: str) -> bool:
        """True if the image is a correct answer to a prompt of `prompts`."""
        return prompt in (self.subject, self.prompt)


@dataclass(frozen=True, slots=True)
class Caption:
    text: str
    says_style: bool


def read(folder: Path) -> list[Parts]:
    rows = json.loads((folder / "captions.json").read_text())
    return [Parts(**row | {"tags": tuple(row["tags"]), "colours": tuple(row["colours"])}) for row in rows]


def draw(parts: Parts, generator: np.random.Generator) -> Caption:
    """Draw a random caption of an image."""
    use_tags, use_category, use_colours, use_style = generator.random(4) < (0.1, 0.25, 0.4, 0.7)
    subject = parts.name
    if use_tags and len(parts.tags) >= 2:
        subject = " ".join(generator.choice(parts.tags, 2, replace=False))
    phrases = [_toned(subject, parts.tone)]
    if use_category:
        phrases.append(parts.category)
    if use_colours and parts.colours:
        phrases.append(" and ".join(parts.colours))
    if use_style:
        phrases.append(f"{parts.style} style")
    return Caption(", ".join(phrases), bool(use_style))


def prompts(parts: Sequence[Parts], held_out: bool, seed: int) -> list[str]:
    """Prompts of the held-out concepts, or of the others, in random order. Half name a style; for the other half an
    image in any style is correct.
    """
    generator = np.random.default_rng(seed)
    chosen: dict[str, None] = {}
    for index in generator.permutation(len(parts)):
        if parts[index].held_out == held_out:
            each = parts[index]
            chosen[each.prompt if generator.random() < 0.5 else each.subject] = None
    return list(chosen)


def _toned(name: str, tone: str) -> str:
    return f"{name} with {tone} skin" if tone else name
