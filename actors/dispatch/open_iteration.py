"""An open iteration: its units go out, answers go to the selector, and the units that the selector then wants go out.

::

    explore units ─► explorers ─► selector ─► regenerate unit ─► a regenerator ─► selector ─► group
    sample units ──► explorers ─► selector ─► it puts the kept samples together ────────────► group
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from actors.dispatch.selector_client import SelectorClient
from actors.dispatch.unit_router import Answer, Owner, UnitRouter
from actors.workers.selector import Ack, Opened
from actors.world import Tasks, World
from solrl_ray.errors import InputGone
from solrl_ray.records import Prompt, UnitResult, WorkUnit
from solrl_ray.scheduling.iteration_state import IterationPlan

Regenerating = Callable[[], AbstractAsyncContextManager[None]]
"""Enters a block in which regenerators hold the newest revision."""
_PARTS = {"sample": 2, "regenerate": 2}
"""Stages whose answers have a large part, which stays on the worker's node."""
_EXPLORING = ("explore", "sample")
_PRIORITY = {"explore": 0, "sample": 0, "regenerate": 0, "audit": 1}
"""Within an iteration; audits go last."""
_PRIORITIES = 2


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
    """A finished rollout."""

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


class OpenIteration(Owner):
    """Requests an iteration's units, and passes answers to the selector."""

    def __init__(
        self,
        plan: IterationPlan,
        prompts: Sequence[Prompt],
        embeddings: Mapping[str, Any],
        opened: Opened | None,
        *,
        world: World,
        tasks: Tasks,
        router: UnitRouter,
        selector: SelectorClient,
        publication: Callable[[], dict[str, float]],
        tell: Callable[[str], None],
        changed: Callable[[], None],
        staged: bool = False,
    ) -> None:
        """
        Args:
            embeddings: prompt id → reference of its embedding.
            opened: what the selector knows already; None: nothing, so all pools of the plan are requested.
            publication: state of the explorers' revision: see `IterationMetrics.publication`.
            tell: is given a sentence for the user.
            changed: called when there is progress to show.
            staged: whether nothing is regenerated before all is explored.
        """
        self.plan = plan
        self.batch = f"iteration {plan.iteration}"
        self.prompts = {prompt.id: prompt for prompt in prompts}
        self.embeddings = {prompt.id: embeddings[prompt.id] for prompt in prompts}
        stages = ("explore",) if plan.one_stage else ("explore", "regenerate")
        self.clocks = {stage: StageClock() for stage in (*stages, *(["audit"] if plan.audit else []))}
        self.groups: dict[str, Any] = {}
        """Prompt id → reference of its group."""
        self.rewards: dict[str, tuple[float, ...]] = {}
        self.audits: set[str] = set()
        self.audited = len(plan.audited_prompts)
        self.explored = asyncio.Event()
        """Set when the rewards of all candidates are there."""
        self.completed = asyncio.Event()
        """Set when every prompt has its group, and every audited one its audit."""
        self.grown = asyncio.Event()
        """Set when a group arrives; the waiting task clears it."""
        self._world, self._tasks, self._router, self._selector = world, tasks, router, selector
        self._explored_with, self._tell, self._changed, self._staged = publication, tell, changed, staged
        self._waiting: list[WorkUnit] = []
        """Of a staged iteration: units that wait until all is explored."""
        self._publication: dict[str, float] = {}
        units = plan.pool_units() if opened is None else opened.units
        self._unexplored = {unit.id for unit in units if unit.stage in _EXPLORING}
        self._kept: dict[str, dict[WorkUnit, Any]] = {prompt.id: {} for prompt in prompts}
        """In one stage: prompt id → unit → reference of its samples."""
        self._learned = False
        self._reward_costs: Counter[str] = Counter()
        self._kinds = dict(zip(plan.prompt_ids, plan.kinds, strict=True)) if plan.kinds else {}
        if opened is None:
            self._want(units)
        else:
            self.add(opened)

    def opened(self, plan: IterationPlan, opened: Opened) -> None:
        """Take the selector's state of an iteration whose pools were requested before it was opened.

        Args:
            plan: the plan it was opened with; it has the same units.
        """
        self.plan = plan
        if not opened.as_planned:
            self._unexplored = {unit.id for unit in opened.units if unit.stage in _EXPLORING}
            self.reopened(opened)

    def add(self, opened: Opened) -> None:
        """Take over groups and audits that exist already, and request the wanted units."""
        for group in opened.groups:
            if group.prompt_id not in self.groups:
                self.groups[group.prompt_id] = self._world.put(group)
                self.rewards[group.prompt_id] = group.rewards
        self.audits |= set(opened.audits)
        self._want(opened.units)
        self._look()

    def reopened(self, opened: Opened) -> None:
        """As `add`, for a new selector; units that it no longer wants are forgotten."""
        self._router.keep_only(self, opened.units)
        self.add(opened)

    @property
    def candidates(self) -> int:
        """How many have rewards."""
        return self.pool_size - self.plan.unit * len(self._unexplored)

    @property
    def pool_size(self) -> int:
        return self.plan.pool * len(self.prompts)

    async def in_order(self) -> AsyncIterator[tuple[int, list[Any], list[Any]]]:
        """Groups as they arrive, in prompt order: index of the first, references of groups and of embeddings."""
        first, order = 0, self.plan.prompt_ids
        while first < len(order):
            self.grown.clear()
            there = first
            while there < len(order) and order[there] in self.groups:
                there += 1
            if there == first:
                await self.grown.wait()
                continue
            new = order[first:there]
            yield first, [self.groups[p] for p in new], [self.embeddings[p] for p in new]
            first = there

    def result(self) -> RolloutResult:
        """What the update learns from; only when complete."""
        order = self.plan.prompt_ids
        return RolloutResult(
            groups=[self.groups[p] for p in order],
            embeddings=[self.embeddings[p] for p in order],
            rewards=[self.rewards[p] for p in order],
            clocks=self.clocks,
            publication=self._publication,
            staleness=self.plan.staleness,
            requeued=self._router.requeued(self),
            reward_costs=dict(self._reward_costs),
        )

    async def stored(self, regenerating: Regenerating) -> list[Any]:
        """References of the groups in prompt order, from the run folder; groups that it no longer holds are made
        again.
        """
        stored: dict[str, Any] = {}
        missing: list[WorkUnit] = []
        for prompt_id in self.plan.prompt_ids:
            units, stored[prompt_id] = await self._selector.stored(self.plan.iteration, prompt_id)
            if units:
                self._tell(f"the stored group of prompt {prompt_id} is damaged: it is made again")
                missing += units
        await self.again(missing, regenerating)
        return [stored[prompt_id] or self.groups[prompt_id] for prompt_id in self.plan.prompt_ids]

    async def again(self, units: Sequence[WorkUnit], regenerating: Regenerating) -> None:
        """Make lost units again; return when they are there."""
        for unit in units:
            if unit.stage == "audit":
                self.audits.discard(unit.prompt_id)
            else:
                self.groups.pop(unit.prompt_id, None)
            self.completed.clear()
        self._want(units)
        if not self.completed.is_set():
            async with regenerating():
                await self.completed.wait()  # each unit has its deadline

    def learned(self) -> None:
        """Note that the update is done: nothing is made again."""
        self._learned = True
        self._router.drop(self)

    # Owner

    def call(self, unit: WorkUnit) -> tuple[str, tuple[Any, ...], int]:
        self.clocks["explore" if unit.stage in _EXPLORING else unit.stage].start(self._world.now())
        arguments = (unit, self.prompts[unit.prompt_id], self.embeddings[unit.prompt_id])
        return unit.stage, arguments, _PARTS.get(unit.stage, 1)

    def take(self, answer: Answer) -> None:
        if answer.unit.stage == "regenerate":
            self._selector.accept_group(
                self.plan.iteration,
                answer.large,
                lambda ack: self._group_taken(answer, ack),
                lambda reason: self._group_lost(answer, reason),
            )
        elif answer.value.unit != answer.unit:
            self._router.refuse_another(answer, answer.value.unit)
        else:
            self._selector.accept(answer.value, lambda ack: self._result_taken(answer, ack))

    # What the selector acknowledges

    def _result_taken(self, answer: Answer, ack: Ack) -> None:
        if ack.refused:
            self._router.refuse(answer, ack.refused)
            return
        result: UnitResult = answer.value
        self._router.done(answer.unit)
        self._reward_costs.update(result.reward_costs or {})
        if answer.unit.stage == "audit":
            self.clocks["audit"].stop(self._world.now(), result.seconds)
            self.audits.add(answer.unit.prompt_id)
        else:
            self.clocks["explore"].stop(self._world.now(), result.seconds)
            self._unexplored.discard(answer.unit.id)
            if answer.large is not None:  # the first result of a unit counts
                self._kept[answer.unit.prompt_id].setdefault(answer.unit, answer.large)
        self._want(ack.units)
        if ack.assemble is not None:
            self._tasks.start(self._assemble(ack.assemble), f"putting the group of {ack.assemble.prompt_id} together")
        self._look()

    def _group_taken(self, answer: Answer, ack: Ack) -> None:
        if ack.refused:
            self._router.refuse(answer, ack.refused)
            return
        self._router.done(answer.unit)
        self._reward_costs.update(answer.value.reward_costs or {})
        self.clocks["regenerate"].stop(self._world.now(), answer.value.seconds)
        self._keep(answer.unit.prompt_id, answer.value.rewards, answer.large)

    def _group_lost(self, answer: Answer, reason: str) -> None:
        self._tell(f"{answer.unit.in_words} is done again ({reason})")
        self._router.requeue(answer)

    async def _assemble(self, unit: WorkUnit) -> None:
        """Have the selector make a group of the kept samples, by reference; the prompt's other samples are freed."""
        kept, self._kept[unit.prompt_id] = self._kept[unit.prompt_id], {}
        parts = [samples for source, samples in kept.items() if set(source.indices) & set(unit.indices)]
        try:
            rewards, group = await self._selector.assemble(unit, *parts)
        except InputGone as error:  # some were lost with their node
            self._tell(f"chosen samples of prompt {unit.prompt_id} are made again ({error.reason})")
            self._want(await self._selector.lose(unit))
        else:
            self._keep(unit.prompt_id, rewards, group)

    def _keep(self, prompt_id: str, rewards: tuple[float, ...], group: Any) -> None:
        if prompt_id not in self.groups:  # the first one counts
            self.groups[prompt_id], self.rewards[prompt_id] = group, rewards
            self.grown.set()
        self._look()

    def _want(self, units: Sequence[WorkUnit]) -> None:
        alike: defaultdict[tuple[str, int], list[WorkUnit]] = defaultdict(list)
        """By pool and priority: opening an iteration brings tens of thousands at once."""
        for unit in () if self._learned else units:
            if self._staged and self._unexplored and unit.stage not in _EXPLORING:
                self._waiting.append(unit)
                continue
            kind = self._kinds.get(unit.prompt_id, "")
            explorers = f"explorers_{kind}" if kind else "explorers"
            pool = explorers if unit.stage in _EXPLORING else "regenerators"
            alike[pool, self.plan.iteration * _PRIORITIES + _PRIORITY[unit.stage]].append(unit)
        for (pool, priority), same in alike.items():
            self._router.add(self, same, pool, priority=priority)

    def _look(self) -> None:
        """Update the events."""
        if not self._unexplored and not self.explored.is_set():
            self._publication = self._explored_with()  # the next revision may be sent from now on
            self.explored.set()
            waiting, self._waiting = self._waiting, []
            self._want(waiting)
        if len(self.groups) == len(self.prompts) and len(self.audits) == self.audited:
            self.completed.set()
        self._changed()
