"""One iteration's rollout, prompt groups moving on one by one, in two stages and in one::

preview units to explorers ──► selection ──► full unit to a regenerator ──► group
sample units to explorers ──► selection ──► the selector puts the kept samples together ──► group
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from actors import waiting
from actors.fleet import Fleet, Work
from actors.pool import Done, Lost, Nonsense, Pool
from actors.selector import Closed
from actors.selector_client import SelectorClient
from actors.telemetry import Telemetry
from solrl_ray.config.schema import Config
from solrl_ray.errors import NonsenseError
from solrl_ray.records import Prompt, UnitResult, WorkUnit
from solrl_ray.scheduling.book import IterationPlan

CALLS = {"preview": ("explore", 1), "sample": ("sample", 2), "full": ("regenerate", 2), "audit": ("audit", 1)}
"""A unit's stage → the worker's method and the number of parts of its answer."""


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
class RolledOut:
    """A finished rollout."""

    closed: Closed
    groups: list[Any]
    """References of the sample groups, in prompt order."""
    rewards: list[tuple[float, ...]]
    """Rewards of each group's samples, in prompt order and selection order."""
    clocks: dict[str, StageClock] = field(default_factory=dict)


class Rollout:
    def __init__(self, config: Config, fleet: Fleet, selector: SelectorClient, telemetry: Telemetry) -> None:
        self._config = config
        self._fleet = fleet
        self._selector = selector
        self._telemetry = telemetry
        self._restarts = 0

    def run(self, plan: IterationPlan, prompts: Sequence[Prompt], embeddings: Mapping[str, Any]) -> RolledOut:
        """Bring every prompt of the plan to its group.

        Args:
            embeddings: prompt id → reference of its embedding.
        """
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._embeddings = embeddings
        self._stages = ("explore",) if plan.one_stage else ("explore", "regenerate")
        self._clocks = {stage: StageClock() for stage in self._stages}
        if plan.audit:
            self._clocks["audit"] = StageClock()
        self._waiting = dict.fromkeys(self._stages, True)
        self._kept: dict[str, dict[WorkUnit, Any]] = {prompt.id: {} for prompt in prompts}
        self._plan = plan
        opened = self._selector.open(plan)
        if opened.message:
            self._telemetry.message(opened.message)
        self._groups = {group.prompt_id: ray.put(group) for group in opened.groups}
        self._rewards = {group.prompt_id: group.rewards for group in opened.groups}
        self._audits, self._audited = set(opened.audits), len(plan.audited_prompts)
        self._candidates, self._pool_size = opened.candidates, plan.pool * len(prompts)
        self._show()
        while len(self._groups) < len(prompts) or len(self._audits) < self._audited:
            self._hand_out()
            for event in self._fleet.events(seconds=1.0):
                self._take(event)
            self._show()
        order = plan.prompt_ids
        closed = self._ask("close")
        for sentence in closed.violations:
            self._telemetry.message(f"{sentence}; the first result counts")
        return RolledOut(
            closed=closed,
            groups=[self._groups[p] for p in order],
            rewards=[self._rewards[p] for p in order],
            clocks=self._clocks,
        )

    def supply(self) -> list[Any]:
        """The groups of the last rollout once more, from the run folder; references in prompt order."""
        return [self._selector.stored(prompt_id) for prompt_id in self._plan.prompt_ids]

    def _hand_out(self) -> None:
        """Fill every free slot. The flags spare the selector questions whose answer is known to be nothing."""
        if self._restarts != self._selector.restarts:  # what was known of the old selector's queues is void
            self._restarts = self._selector.restarts
            self._waiting = dict.fromkeys(self._stages, True)
        for stage in self._stages:
            pool = self._fleet.explorers if stage == "explore" else self._fleet.regenerators
            slots = pool.slots() if self._waiting[stage] else []
            if slots:
                leases = self._ask("lease", stage, slots)
                self._waiting[stage] = len(leases) == len(slots)
                self._give(stage, pool, leases)
            if not self._waiting[stage] and (late := self._fleet.hedges(pool)):
                hedges = self._ask("hedge", late)
                self._give(stage, pool, hedges)
                for worker, unit in hedges:
                    self._telemetry.message(f"{unit.id} takes long; {worker} does it as well")

    def _give(self, stage: str, pool: Pool, leases: Sequence[tuple[str, WorkUnit]]) -> None:
        for worker, unit in leases:
            self._clocks["audit" if unit.stage == "audit" else stage].start()
            method, parts = CALLS[unit.stage]
            inputs = (unit, self._prompts[unit.prompt_id], self._embeddings[unit.prompt_id])
            pool.give(worker, unit, method, *inputs, parts=parts)

    def _take(self, event: Work) -> None:
        if isinstance(event, Lost):
            requeued = self._ask("release", event.worker)
            self._waiting = dict.fromkeys(self._stages, True)
            if requeued:
                self._telemetry.message(f"{len(requeued)} units of {event.worker} go to others")
        elif event.unit.iteration != self._plan.iteration:
            return  # a unit that was done twice, and came too late
        elif isinstance(event, Nonsense):
            self._refuse(event.worker, event.unit, event.reason)
        else:
            try:
                self._accept(event)
            except NonsenseError as error:
                self._refuse(event.worker, event.unit, str(error))

    def _refuse(self, worker: str, unit: WorkUnit, reason: str) -> None:
        """Have a unit done again whose answer cannot be right."""
        self._ask("requeue", unit, worker)
        self._waiting = dict.fromkeys(self._stages, True)
        lost = self._fleet.refuse(worker, unit, reason)
        if lost is not None:
            self._take(lost)

    def _accept(self, event: Done) -> None:
        """Raises NonsenseError for an answer that is none."""
        if event.unit.stage == "full":
            self._store(event)
            return
        if event.value.unit != event.unit:
            raise NonsenseError(f"{event.worker} was given {event.unit.id} and answered {event.value.unit}")
        if event.unit.stage == "audit":
            self._clocks["audit"].stop(event.value.seconds)
            self._ask("fold_audit", event.value)
            self._audits.add(event.unit.prompt_id)
        else:
            self._fold(event.value, event.large)

    def _fold(self, result: UnitResult, samples: Any) -> None:
        """Have the selector take a result; `samples` is the reference of those that its worker keeps, if it does."""
        unit = self._ask("fold", result)
        self._clocks["explore"].stop(result.seconds)
        self._candidates = min(self._candidates + len(result.rewards), self._pool_size)
        if samples is None:
            self._waiting["regenerate"] |= unit is not None
            return
        self._kept[result.unit.prompt_id].setdefault(result.unit, samples)  # the first result of a unit counts
        self._waiting["explore"] = True  # chosen samples that are lost are asked for again
        if unit is not None:
            self._assemble(unit)

    def _assemble(self, unit: WorkUnit) -> None:
        """Have the selector make a group out of kept samples, by reference; all others of its prompt are let go."""
        kept = self._kept[unit.prompt_id]
        self._kept[unit.prompt_id] = {}
        parts = [samples for source, samples in kept.items() if set(source.indices) & set(unit.indices)]
        try:
            self._rewards[unit.prompt_id], self._groups[unit.prompt_id] = self._selector.assemble(unit, *parts)
        except waiting.InputGone as error:  # some went down with their node
            self._ask("lose", unit.prompt_id)
            self._telemetry.message(f"chosen samples of prompt {unit.prompt_id} are made again ({error.reason})")

    def _store(self, event: Done) -> None:
        """Have the selector take a group, by reference: the samples go from the regenerator to the selector."""
        unit, report, group = event.unit, event.value, event.large
        try:
            self._ask("store", group)
        except waiting.InputGone as error:  # it went down with its node between the report and this
            self._ask("requeue", unit, event.worker)
            self._waiting["regenerate"] = True
            self._telemetry.message(f"{unit.id} is done again ({error.reason})")
            return
        self._clocks["regenerate"].stop(report.seconds)
        if report.prompt_id not in self._groups:  # the first one counts
            self._groups[report.prompt_id] = group
            self._rewards[report.prompt_id] = report.rewards

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._selector.ask(method, *arguments)

    def _show(self) -> None:
        self._telemetry.stage("explore", self._candidates, self._pool_size)
        self._telemetry.stage(
            "regenerate" if "regenerate" in self._stages else "select", len(self._groups), len(self._prompts)
        )
        if self._audited:
            self._telemetry.stage("audit", len(self._audits), self._audited)
