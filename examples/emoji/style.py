"""Rewards for a style: how well an image shows its subject in the style of one emoji set, plus the margin over the
styles of the other sets.

The cosine with "red apple, blob style" alone mostly measures the apple. Its difference from "red apple, flat style" and
the others measures the style, which is the same for all prompts. `blobs` is the sum of both, for training. `judged` is
the same score by the CLIP trained on the other half of the images: a rise in only one of the two is not due to style.

Reads the networks from `emoji/world` in the current folder, or from the folder in the environment variable EMOJI_WORLD.
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
    """The prompt without the style, if it names one."""
    for style in STYLES:
        prompt = prompt.removesuffix(f", {style} style")
    return prompt


def look(scorer: CLIPScore, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Cosine with the subject in `STYLE`, plus its margin over the mean cosine with the other styles; float [B]."""
    texts = [f"{subject(prompt)}, {style} style" for style in STYLES for prompt in prompts]
    own, *others = scorer.cosine(images.repeat(len(STYLES), 1, 1, 1), texts).unflatten(0, (len(STYLES), -1))
    return own + (own - torch.stack(others).mean(dim=0))


def blobs(images: Tensor, prompts: list[str]) -> Tensor:
    """The reward, by the CLIP trained on one half: one number per image; images are float32 [B, 3, 96, 96] in 0 … 1."""
    return look(clip("reward", images.device), images, prompts)


def judged(images: Tensor, prompts: list[str]) -> Tensor:
    """The same score by the judge, the CLIP trained on the other half."""
    return look(clip("judge", images.device), images, prompts)
