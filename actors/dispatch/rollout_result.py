"""A finished rollout, and the times of its stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class StageClock:
    """Wall time from a stage's first unit handed out to its last result, and the sum of its workers' seconds."""

    first: float | None = None
    last: float = 0.0
    busy: float = 0.0

    def start(self, now: float) -> None:
        self.first = now if self.first is None else self.first

    def stop(self, now: float, seconds: float) -> None:
        self.last = now
        self.busy += seconds

    @property
    def wall(self) -> float:
        return 0.0 if self.first is None else max(0.0, self.last - self.first)


@dataclass(slots=True)
class RolloutResult:
    groups: list[Any]
    """References of the sample groups, in prompt order."""
    embeddings: list[Any]
    """References of their prompts' embeddings."""
    rewards: list[tuple[float, ...]]
    """Rewards of each group's samples, in prompt order and selection order."""
    clocks: dict[str, StageClock] = field(default_factory=dict)
    publication: dict[str, float] = field(default_factory=dict)
    """Of the revision that explored: see `IterationMetrics.publication`."""
    staleness: int = 0
    """Revisions that the explorers were behind."""
    requeued: int = 0
    """Units that went to another worker because an answer was lost or refused."""
    reward_costs: dict[str, int] = field(default_factory=dict)
    """Use of reward servers and judges: see `IterationMetrics.reward_costs`."""

    @property
    def walls(self) -> dict[str, float]:
        """Wall seconds by stage. ``ahead`` is the exploring before regenerators had the iteration's revision."""
        walls = {name: clock.wall for name, clock in self.clocks.items()}
        explore = self.clocks["explore"]
        if self.staleness and explore.first is not None:
            begun = self.clocks["regenerate"].first
            walls["ahead"] = max(0.0, min(begun or explore.last, explore.last) - explore.first)
            walls["explore"] -= walls["ahead"]
        return walls
