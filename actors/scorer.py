"""A regenerator that scores with several rewards at once: each image is sampled once, whatever it is scored by."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from actors.regenerator import Evaluated, Regenerator
from solrl_ray import rewards
from solrl_ray.records import Prompt, PromptEmbedding, WorkUnit
from solrl_ray.rewards.base import Reward


class Columns(Reward):
    """Keeps what each reward of a mixture said of the last images; the first one's values are the reward."""

    def __init__(self, mixture: rewards.RewardMixture) -> None:
        super().__init__(mixture.name)
        self._mixture = mixture
        self.last: tuple[torch.Tensor, ...] = ()
        """float32 [B] a reward, in the order of the configuration."""

    def compute(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        self.last = tuple(self._mixture.components(images, prompts).values())
        return self.last[0]


class Scorer(Regenerator):
    def _load_reward(self) -> Reward:
        self._columns = Columns(rewards.load(self._config.rewards, self._device))
        return self._columns

    def evaluate(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding, pictures: bool) -> Evaluated:
        """As a regenerator's, with every reward's column. A unit is one micro-batch, so nothing is padded."""
        evaluated = super().evaluate(unit, prompt, embedding, pictures)
        columns = tuple(tuple(column.tolist()) for column in self._columns.last)
        return dataclasses.replace(evaluated, columns=columns)
