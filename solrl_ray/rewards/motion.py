"""How much a video moves, so that still pictures do not win where other rewards score single frames."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.rewards.base import VIDEOS, CheckpointReward, Keys

SIDE = 32
"""Frames are averaged to this longest side before they are compared, pixels: grain of single pixels is no motion."""


class Motion(CheckpointReward):
    """min(1, d / enough), whatever the prompt: d is how much more frames differ that are two apart than those that
    follow one another, in mean absolute differences, each frame averaged to 32 pixels and less its mean colour.

    What moves on differs twice as much after two frames, so d is its change from frame to frame. Flicker and shaking
    return, and noise differs as much after one frame as after two: they have none. A fade has no difference. Nor has a
    thing that moves by more than its own size from frame to frame.
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
