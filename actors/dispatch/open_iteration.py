"""What the controller knows of an iteration that is open."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.workers.selector import Opened
from solrl_ray.records import Prompt, WorkUnit
from solrl_ray.scheduling.iteration_state import IterationPlan


@dataclass(slots=True)
class StageClock:
    """Wall time from the first hand-out of a stage to its last result, and the sum of its workers' seconds."""

    first: float | None = None
    last: float = 0.0
    busy: float = 0.0

    def start(self) -> None:
        self.first = time.monotonic() if self.first is None else self.first

    def stop(self, seconds: float) -> None:
        self.last = time.monotonic()
        self.busy += seconds

    @property
    def wall(self) -> float:
        return 0.0 if self.first is None else max(0.0, self.last - self.first)


@dataclass(slots=True)
class RolloutResult:
    """A finished rollout."""

    groups: list[Any]
    """References of the sample groups, in prompt order."""
    embeddings: list[Any]
    """References of their prompts' embeddings."""
    rewards: list[tuple[float, ...]]
    """Rewards of each group's samples, in prompt order and selection order."""
    clocks: dict[str, StageClock] = field(default_factory=dict)
    publication: dict[str, float] = field(default_factory=dict)
    """Of the revision that was explored with: see `IterationMetrics.publication`."""
    staleness: int = 0
    """How many revisions behind its own it was explored."""

    @property
    def walls(self) -> dict[str, float]:
        """Wall seconds by stage. What was explored ahead, before regenerators had its revision, is ``ahead``."""
        walls = {name: clock.wall for name, clock in self.clocks.items()}
        explore = self.clocks["explore"]
        if self.staleness and explore.first is not None:
            begun = self.clocks["regenerate"].first
            walls["ahead"] = max(0.0, min(begun or explore.last, explore.last) - explore.first)
            walls["explore"] -= walls["ahead"]
        return walls


class OpenIteration:
    def __init__(
        self, plan: IterationPlan, prompts: Sequence[Prompt], embeddings: Mapping[str, Any], opened: Opened
    ) -> None:
        """
        Args:
            embeddings: prompt id → reference of its embedding.
            opened: what the selector knows already.
        """
        self.plan = plan
        self.prompts = {prompt.id: prompt for prompt in prompts}
        self.embeddings = {prompt.id: embeddings[prompt.id] for prompt in prompts}
        self.stages = ("explore",) if plan.one_stage else ("explore", "regenerate")
        self.regenerates = False
        """Whether regenerators were sent its revision."""
        self.drained: set[str] = set()
        """Pools for which the selector has no unit that waits; spares questions whose answer is known."""
        self.clocks = {stage: StageClock() for stage in (*self.stages, *(["audit"] if plan.audit else []))}
        self.kept: dict[str, dict[WorkUnit, Any]] = {prompt.id: {} for prompt in prompts}
        self.groups: dict[str, Any] = {}
        self.rewards: dict[str, tuple[float, ...]] = {}
        self.audits: set[str] = set()
        self.audited = len(plan.audited_prompts)
        self.publication: dict[str, float] | None = None
        self._candidates = opened.candidates
        self.learned = False
        """Whether its update is done, after which nothing of it is made again."""
        self._recorded: set[WorkUnit] = set()
        self._offered = 0
        self.add(opened)

    def add(self, opened: Opened) -> None:
        """Take over groups and audits that need not be made again."""
        for group in opened.groups:
            self.groups[group.prompt_id] = ray.put(group)
            self.rewards[group.prompt_id] = group.rewards
        self.audits |= set(opened.audits)

    def may(self, stage: str) -> bool:
        """Whether its units of a stage may be handed out."""
        return stage in self.stages and not self.learned and (stage == "explore" or self.regenerates)

    def recorded(self, unit: WorkUnit, seconds: float) -> None:
        """Note that the selector has taken a result of a pool's unit."""
        self.clocks["explore"].stop(seconds)
        if unit not in self._recorded:  # a unit that was done twice counts once
            self._recorded.add(unit)
            self._candidates += len(unit.indices)

    def offer(self) -> tuple[int, list[Any], list[Any]]:
        """Groups, in prompt order, that nobody before them is missing of, each once: the position of the first,
        their references, and those of their embeddings."""
        first, order = self._offered, self.plan.prompt_ids
        while self._offered < len(order) and order[self._offered] in self.groups:
            self._offered += 1
        offered = order[first : self._offered]
        return first, [self.groups[p] for p in offered], [self.embeddings[p] for p in offered]

    @property
    def candidates(self) -> int:
        """Whose rewards are in."""
        return min(self._candidates, self.pool_size)

    @property
    def pool_size(self) -> int:
        return self.plan.pool * len(self.prompts)

    @property
    def explored(self) -> bool:
        """Whether the rewards of all candidates are in."""
        return self.candidates == self.pool_size

    @property
    def complete(self) -> bool:
        return len(self.groups) == len(self.prompts) and len(self.audits) == self.audited
