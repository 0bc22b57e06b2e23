"""The reward of a run: a weighted sum of rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solrl_ray.rewards.base import Reward


class RewardMixture(Reward):
    """sum_i weight_i · reward_i in float32, in the order of the configuration."""

    def __init__(self, rewards: Sequence[tuple[Reward, float]]) -> None:
        super().__init__("mixture of " + ", ".join(reward.name for reward, _ in rewards))
        if not rewards:
            raise ValueError("a mixture needs at least one reward")
        self._rewards = tuple(rewards)

    def components(self, images: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Each reward's own checked values, unweighted, float32 [B] by name, in order."""
        return {reward.name: reward.score(images, prompts) for reward, _ in self._rewards}

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        total = torch.zeros(len(images), dtype=torch.float32)
        for reward, weight in self._rewards:
            total = total + weight * reward.score(images, prompts)
        return total
