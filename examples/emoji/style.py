"""Rewards for a look: how well a picture shows its subject as the drawers of one set would have drawn it, and how much
better than as those of the other sets would have.

The cosine with "red apple, blob style" alone is mostly about the apple. The difference from "red apple, flat style" and
the others is about the look, which is the same for all prompts. `blobs` is the sum of both, to be trained on. `judged`
asks the CLIP that was trained on the other half of the pictures: what rises in the one and not in the other is not the
look.

The world is in `emoji/world` of the present folder, or where the variable EMOJI_WORLD says.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.rewards.clip import CLIPScore

STYLE = "blob"
STYLES = (STYLE, "noto", "fluent", "flat", "twemoji", "emojione", "firefox")


@functools.cache
def clip(folder: str, device: torch.device) -> CLIPScore:
    path = f"{os.environ.get('EMOJI_WORLD') or 'emoji/world'}/{folder}"
    return CLIPScore(RewardConfig(kind="clipscore", path=path), device, keys=lambda _: path, name=path)


def subject(prompt: str) -> str:
    """Without the style that a prompt may name."""
    for style in STYLES:
        prompt = prompt.removesuffix(f", {style} style")
    return prompt


def look(scorer: CLIPScore, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """The cosine with the subject in the style, and how far it is above the mean of those in the other styles: [B]."""
    texts = [f"{subject(prompt)}, {style} style" for style in STYLES for prompt in prompts]
    own, *others = scorer.cosine(images.repeat(len(STYLES), 1, 1, 1), texts).unflatten(0, (len(STYLES), -1))
    return own + (own - torch.stack(others).mean(dim=0))


def blobs(images: Tensor, prompts: list[str]) -> Tensor:
    """One number an image; images are float32 [B, 3, 96, 96] in 0 … 1."""
    return look(clip("reward", images.device), images, prompts)


def judged(images: Tensor, prompts: list[str]) -> Tensor:
    """The same by the judge."""
    return look(clip("judge", images.device), images, prompts)
