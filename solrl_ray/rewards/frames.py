"""A reward of pictures as a reward of videos: some frames are scored, and their scores become one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solrl_ray.config.rewards import Frames, evenly_spaced
from solrl_ray.rewards.base import VIDEOS, Reward


class Framewise(Reward):
    """Scores the chosen frames of each video with a reward of pictures; the score is their mean or the lowest one."""

    ndims = (VIDEOS,)

    def __init__(self, reward: Reward, frames: Frames) -> None:
        super().__init__(reward.name)
        self._reward, self._frames = reward, frames

    def compute(self, images: Tensor, prompts: Sequence[str], references: Tensor | None = None) -> Tensor:
        # One frame of all videos at a time, so that a batch is as large as of pictures.
        chosen = evenly_spaced(images.shape[2], self._frames.count)
        scores = torch.stack([self._reward.score(images[:, :, at], prompts, references) for at in chosen])
        return scores.amin(0) if self._frames.combine == "worst" else scores.mean(0)

    def take_costs(self) -> dict[str, int]:
        return self._reward.take_costs()
