"""Rewards for a look: how well a picture shows its prompt as the drawers of one set would have drawn it.

A prompt that does not say a style leaves it to the seed; these read it with the style added. `blobs` is to be trained
on. `judged` asks the CLIP that was trained on the other half of the pictures: what rises in the one and not in the
other is not the look.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.rewards.clip import CLIPScore

WORLD = "emoji/world"
STYLE = "blob style"


@functools.cache
def clip(folder: str, device: torch.device) -> CLIPScore:
    path = f"{WORLD}/{folder}"
    return CLIPScore.load(RewardConfig(kind="clipscore", path=path), device, keys=lambda _: path, name=path)


def styled(prompts: Sequence[str]) -> list[str]:
    return [f"{prompt.removesuffix(f', {STYLE}')}, {STYLE}" for prompt in prompts]


def blobs(images: Tensor, prompts: list[str]) -> Tensor:
    """The cosine with the styled prompt, one number an image; images are float32 [B, 3, 96, 96] in 0 … 1."""
    return clip("reward", images.device).compute(images, styled(prompts))


def judged(images: Tensor, prompts: list[str]) -> Tensor:
    """The same by the judge."""
    return clip("judge", images.device).compute(images, styled(prompts))
