"""A reward for motion in videos, so that still videos do not win when other rewards score single frames."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.rewards.base import VIDEOS, CheckpointReward, Keys

SIDE = 32
"""Longest side to which frames are averaged before the comparison, pixels: the grain of single pixels is no motion."""


class Motion(CheckpointReward):
    """min(1, d / enough), independent of the prompt. d = D(2) - D(1).

    D(n) is the mean absolute difference between frames that are n apart. Each frame is first averaged to 32 pixels, and
    its mean colour is subtracted.

    Steady motion changes twice as much over two frames as over one, so d is its change from frame to frame. Flicker and
    shaking return after two frames, and noise changes as much over one frame as over two: for them d is not positive.
    For a fade, D is 0. An object that moves by more than its size from frame to frame also has d = 0.
    """

    ndims = (VIDEOS,)

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        assert config.enough is not None
        self._enough = config.enough

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        height, width = images.shape[3:]
        scale = min(1.0, SIDE / max(height, width))
        size = max(1, round(height * scale)), max(1, round(width * scale))
        frames = images.float().transpose(1, 2).flatten(0, 1)
        coarse = functional.interpolate(frames, size, mode="area").unflatten(0, (len(images), -1))
        coarse = coarse - coarse.mean(dim=(3, 4), keepdim=True)
        if images.shape[2] < 3:
            return coarse.new_zeros(len(images))
        one, two = ((coarse[:, n:] - coarse[:, :-n]).abs().mean(dim=(1, 2, 3, 4)) for n in (1, 2))
        return ((two - one) / self._enough).clamp(0, 1)
