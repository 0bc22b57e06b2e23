"""Schedule of training prompts: the prompts of each iteration. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from solrl_ray.config.pools import encoded_ahead
from solrl_ray.config.schema import Config
from solrl_ray.prompts.prompt_set import choose
from solrl_ray.records import Prompt


class PromptSchedule:
    """Chooses the training prompts of each iteration, as a function of the run seed."""

    def __init__(self, config: Config, train: Sequence[Prompt]) -> None:
        """`train`: all training prompts."""
        self._config, self._train = config, train
        self._ahead = encoded_ahead(config.fleet)
        self.of = lru_cache(maxsize=2 + self._ahead)(self._choose)
        """Prompts of an iteration. Cached, because choosing from thousands of prompts is slow."""

    def encoded_with(self, iteration: int) -> list[Prompt]:
        """All prompts that are encoded together: those of this iteration and of the next ones."""
        last = min(iteration + self._ahead, self._config.run.iterations)
        return [prompt for number in range(iteration, last) for prompt in self.of(number)]

    def _choose(self, iteration: int) -> Sequence[Prompt]:
        return choose(self._train, self._config.run.seed, iteration, count=self._config.rollout.prompts)
