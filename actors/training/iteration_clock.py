"""Times the stages of an iteration and makes its metrics record.

The times of a record begin where the previous record ended, with the publication of the iteration's revision.
"""

from __future__ import annotations

from actors.dispatch.open_iteration import RolloutResult
from actors.fleet.fleet import Fleet
from actors.world import World
from solrl_ray.config.schema import Config
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.metrics.records import IterationMetrics
from solrl_ray.report.iteration_metrics import iteration_metrics
from solrl_ray.scheduling.iteration_state import IterationSummary


class IterationClock:
    def __init__(self, config: Config, world: World, fleet: Fleet) -> None:
        self._config, self._world, self._fleet = config, world, fleet
        self._started = self._began = self._published = self._learning = self._learned = world.now()
        self.checkpoint = 0.0
        """Seconds of the last checkpoint."""
        self.last = 0.0
        """Seconds of the last iteration."""

    @property
    def elapsed(self) -> float:
        """Seconds since the run was opened."""
        return self._world.now() - self._started

    def restart(self) -> None:
        """Start timing an iteration now; the time before belongs to another record."""
        self._began = self._world.now()

    def learn(self) -> None:
        self._learning = self._world.now()

    def learned(self) -> None:
        self._learned = self._world.now()

    def publish(self) -> None:
        """The publication of a revision begins now."""
        self._published = self._world.now()

    def record(
        self, iteration: int, rollout: RolloutResult, summary: IterationSummary, update: UpdateMetrics
    ) -> IterationMetrics:
        """Ends the iteration now and begins the next one; returns the metrics record of the ended one."""
        seconds = {"learn": self._learned - self._learning, "checkpoint": self.checkpoint}
        first = rollout.clocks["regenerate" if rollout.staleness else "explore"].first
        if first is not None:  # None if a resumed run already had all results
            seconds["publish"] = first - max(self._published, self._began)
        seconds["total"] = self.last = self._world.now() - self._began
        metrics = iteration_metrics(
            self._config,
            iteration=iteration,
            summary=summary,
            rewards=rollout.rewards,
            update=update,
            seconds=seconds | rollout.walls,
            busy_seconds={name: clock.busy for name, clock in rollout.clocks.items()} | {"learn": update.seconds},
            publication=rollout.publication,
            requeued=rollout.requeued,
            reward_costs=rollout.reward_costs,
            weights_wait=self._fleet.waited_for_weights(self._began),
        )
        self._began = self._world.now()
        return metrics
