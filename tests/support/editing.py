"""Prompts with reference pictures, made by a test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from solrl_ray.config.schema import Config, Prompts


def picture(seed: int, height: int, width: int | None = None) -> Image.Image:
    """Noise; a square without `width`."""
    shape = height, width or height, 3
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def write_prompts(file: Path, texts: Sequence[str], *size: int, count: int = 1) -> Path:
    """A JSONL file of prompts with each `count` pictures of its own beside it."""
    lines = []
    for number, text in enumerate(texts):
        names = [f"{file.stem}-{number}-{n}.png" for n in range(count)]
        for n, name in enumerate(names):
            picture(1000 * number + n + len(file.stem), *size).save(file.with_name(name))
        lines.append(json.dumps({"text": text, "reference": names if count > 1 else names[0]}))
    file.write_text("\n".join(lines))
    return file


def with_prompts(config: Config, folder: Path) -> Config:
    """`config` with prompts that have as many references as its model takes; unchanged if it takes none."""
    model = config.model
    if not model.references:
        return config
    texts = {"train": ["make it red", "make it blue", "add a ring"], "heldout": ["make it green", "remove the ring"]}
    files = {
        part: str(write_prompts(folder / f"{part}.jsonl", texts[part], model.shapes[0].width, count=model.references))
        for part in texts
    }
    evaluation = config.evaluation.model_copy(update={"reference": ""})
    return config.model_copy(update={"prompts": Prompts(**files), "evaluation": evaluation})
