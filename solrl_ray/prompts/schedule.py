"""Which prompts each iteration trains on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from solrl_ray.config.pools import encoded_ahead
from solrl_ray.config.schema import Config
from solrl_ray.prompts.prompt_set import choose
from solrl_ray.records import Prompt


class PromptSchedule:
    def __init__(self, config: Config, train: Sequence[Prompt]) -> None:
        """`train`: the whole set."""
        self._config, self._train = config, train
        self._ahead = encoded_ahead(config.fleet)
        self.of = lru_cache(maxsize=2 + self._ahead)(self._choose)
        """The prompts of an iteration. Cached: choosing among thousands takes a while."""

    def encoded_with(self, iteration: int) -> list[Prompt]:
        """The prompts of the iterations that are encoded together with this one."""
        last = min(iteration + self._ahead, self._config.run.iterations)
        return [prompt for each in range(iteration, last) for prompt in self.of(each)]

    def _choose(self, iteration: int) -> Sequence[Prompt]:
        return choose(self._train, self._config.run.seed, iteration, count=self._config.rollout.prompts)
