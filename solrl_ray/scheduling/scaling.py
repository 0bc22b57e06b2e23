"""Resizes pools of a live run: checks a request and describes its effect in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from solrl_ray.config.pools import EXPLORERS, REGENERATORS, pools, resized
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.errors import UserError


class Targets:
    """The wanted size of each pool."""

    def __init__(self, config: Config, *, explores: bool = True) -> None:
        """`explores`: False for a separate evaluation, which has no explorers."""
        fleet, rollout = config.fleet, config.rollout
        self._wanted = {pool: its.count for pool, its in pools(fleet).items()}
        if not explores:
            self._wanted[EXPLORERS] = 0
        groups = max(rollout.prompts, config.evaluation.prompts)
        units = rollout.prompts * pool_sampling(config).units
        self._most = {
            EXPLORERS: (units, f"the {units} units of an iteration"),
            REGENERATORS: (groups, f"the {groups} groups of an iteration or prompts of an evaluation"),
        }

    def wanted(self, pool: str) -> int:
        return self._wanted[pool]

    def applied(self, config: Config) -> Config:
        """The configuration with these sizes."""
        return config.changed({"fleet": resized(config.fleet, self._wanted)})

    def ask(self, sizes: Mapping[str, int]) -> str:
        """Resize these pools; returns one sentence per pool on the effect.

        Raises UserError for a size that is out of bounds; then nothing changes.
        """
        if not sizes:
            raise UserError("No size was given; give the number of --explorers or --regenerators.")
        for pool, size in sizes.items():
            most, why = self._most[pool]
            if not 1 <= size <= most:
                raise UserError(f"--{pool} {size}: it must be between 1 and {most}, {why}.")
        sentences = [self._sentence(pool, size) for pool, size in sizes.items()]
        self._wanted.update(sizes)
        return "\n".join(sentences)

    def give_up(self, pool: str) -> int:
        """Reduce the wanted size of a pool by one worker, until more are requested; returns the new size."""
        self._wanted[pool] -= 1
        return self._wanted[pool]

    def _sentence(self, pool: str, size: int) -> str:
        now = self._wanted[pool]
        if size > now:
            return f"{pool} go from {now} to {size}: new ones work once they have started and proved their weights"
        if size < now:
            return f"{pool} go from {now} to {size}: the newest finish their units and leave"
        return f"{pool} are already {now}"
