"""A reward without a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from solrl_ray.rewards.base import IMAGES, VIDEOS, Reward


class Brightness(Reward):
    """The mean of a picture's or video's pixels."""

    ndims = (IMAGES, VIDEOS)

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images.float().flatten(1).mean(dim=1)
