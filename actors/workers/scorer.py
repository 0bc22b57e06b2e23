"""A regenerator of ``solrl eval`` alone: it scores with several rewards at once."""

from __future__ import annotations

import dataclasses

from actors.workers.regenerator import Evaluated, Regenerator
from solrl_ray import rewards
from solrl_ray.records import Prompt, PromptEmbedding, WorkUnit
from solrl_ray.rewards.base import Reward
from solrl_ray.rewards.columns import Columns


class Scorer(Regenerator):
    def _load_reward(self) -> Reward:
        self._columns = Columns(rewards.load(self._config.rewards, self._device))
        return self._columns

    def evaluate(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding, pictures: bool) -> Evaluated:
        """As a regenerator's, with every reward's column. A unit is one micro-batch, so nothing is padded."""
        evaluated = super().evaluate(unit, prompt, embedding, pictures)
        return dataclasses.replace(evaluated, columns=self._columns.last)
