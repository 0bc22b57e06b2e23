"""The moving world's reward and a second one to check it, as custom functions.

Imports only the installed package, because a run copies this file into its folder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from solrl_ray.models.paths import resolve
from solrl_ray.testbed.rules import words_that_hold
from solrl_ray.testbed.world import RELATIONS

REWARD = "builtin:testbed/reward"
_CAPTION = re.compile(rf"(.+) ({'|'.join(RELATIONS)}) (.+) then ({'|'.join(RELATIONS)}) on (\w+)")


def ends(text: str) -> tuple[str, str]:
    """The testbed's captions of the first and of the last frame. Raises ValueError for any other text."""
    found = _CAPTION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no caption of the moving world")
    one, first, other, last, background = found.groups()
    return f"{one} {first} {other} on {background}", f"{one} {last} {other} on {background}"


def as_told(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """CLIPScore by the testbed's small CLIP: mean of (first frame, first scene) and (last frame, last scene).

    Args:
        videos: float [B, 3, T, 32, 32] in [0, 1].
        prompts: B captions of the moving world.

    Returns:
        float32 [B] in [-1, 1].
    """
    model, processor = _clip(str(videos.device))
    texts = [scene for text in prompts for scene in ends(text)]
    ids = processor.tokenizer(texts, padding="max_length", return_tensors="pt").input_ids.to(videos.device)
    frames = videos[:, :, [0, -1]].transpose(1, 2).flatten(0, 1).float()
    with torch.no_grad():
        seen = functional.normalize(model.get_image_features(pixel_values=frames * 2 - 1).pooler_output, dim=-1)
        described = functional.normalize(model.get_text_features(input_ids=ids).pooler_output, dim=-1)
    return (seen * described).sum(dim=1).view(-1, 2).mean(dim=1)


def words_of_both(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """Share of words that hold in first and last frame, by the testbed's rules; float32 [B] in [0, 1]."""
    first, last = zip(*map(ends, prompts), strict=True)
    return (words_that_hold(videos[:, :, 0], first) + words_that_hold(videos[:, :, -1], last)) / 2


@cache
def _clip(device: str) -> tuple[Any, Any]:
    from transformers import CLIPModel, CLIPProcessor

    folder = resolve(REWARD)
    return CLIPModel.from_pretrained(folder).float().eval().to(device), CLIPProcessor.from_pretrained(folder)
