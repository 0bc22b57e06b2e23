"""Rewards that combine others: the weighted sum of a run, and a reward of images applied to frames of videos."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_ray.config.rewards import Frames, evenly_spaced
from solrl_ray.rewards.base import IMAGES, VIDEOS, Reward


class Weighted(NamedTuple):
    """A term of a mixture: weight · (reward - mean) / std."""

    reward: Reward
    weight: float
    mean: float = 0.0
    std: float = 1.0


class RewardMixture(Reward):
    """sum_i weight_i · (reward_i - mean_i) / std_i in float32, in the order of the configuration.

    Rewards differ in scale (ImageReward's standard deviation over a model's images is near 1, HPSv2's near 0.03), so
    one of them dominates a plain sum. A score must depend only on the image and its prompt. With running statistics it
    would depend on earlier scores, and so on the order of arrival, the worker and retries. So mean and std are measured
    once, on images of the base model, and configured.
    """

    ndims = (IMAGES, VIDEOS)

    def __init__(self, rewards: Sequence[Weighted]) -> None:
        super().__init__("mixture of " + ", ".join(term.reward.name for term in rewards))
        self._rewards = tuple(rewards)

    def components(self, images: Tensor, prompts: Sequence[str], references: Tensor | None = None) -> dict[str, Tensor]:
        """Checked values of each reward by name, in order: float32 [B], neither normalised nor weighted."""
        return {term.reward.name: term.reward.score(images, prompts, references) for term in self._rewards}

    def compute(self, images: Tensor, prompts: Sequence[str], references: Tensor | None = None) -> Tensor:
        return self._sum(list(self.components(images, prompts, references).values()))

    def score_each(self, images: Tensor, prompts: Sequence[str], references: Tensor | None = None) -> Tensor:
        columns = list(self.components(images, prompts, references).values())
        return torch.stack([self._sum(columns), *columns], dim=1)

    def _sum(self, columns: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(len(columns[0]), dtype=torch.float32)
        for values, (_, weight, mean, std) in zip(columns, self._rewards, strict=True):
            total = total + weight * ((values - mean) / std)
        return total

    def take_costs(self) -> dict[str, int]:
        """Costs of all rewards together."""
        total: Counter[str] = Counter()
        for term in self._rewards:
            total.update(term.reward.take_costs())
        return dict(total)


class Framewise(Reward):
    """Scores the chosen frames of each video with a reward of images. The score is their mean or minimum."""

    ndims = (VIDEOS,)

    def __init__(self, reward: Reward, frames: Frames) -> None:
        super().__init__(reward.name)
        self._reward, self._frames = reward, frames

    def compute(self, images: Tensor, prompts: Sequence[str], references: Tensor | None = None) -> Tensor:
        # One frame of all videos at a time, so that batches are as large as for images.
        chosen = evenly_spaced(images.shape[2], self._frames.count)
        scores = torch.stack([self._reward.score(images[:, :, at], prompts, references) for at in chosen])
        return scores.amin(0) if self._frames.combine == "worst" else scores.mean(0)

    def take_costs(self) -> dict[str, int]:
        return self._reward.take_costs()
