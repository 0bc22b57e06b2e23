"""An open iteration: the way of each prompt from its pool to the group that is learned from.

::

    explore units ─► explorers ─► the selector chooses ─► regenerate unit ─► a regenerator ─► group
    sample units ──► explorers ─► the selector chooses, and puts the kept samples together ─► group

Each step of a prompt awaits its units' futures (`unit_router`). If a worker is lost or wrong, the unit goes to another
one; if the selector is restarted, the answer goes to the new one. Both only take longer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from actors.dispatch.selector_client import SelectorClient
from actors.dispatch.unit_router import Answer, Owner, UnitRouter
from actors.workers.selector import Ack, Opened
from actors.world import Tasks, World
from solrl_ray.errors import InputGone, NonsenseError, RunError
from solrl_ray.records import Prompt, WorkUnit
from solrl_ray.scheduling.iteration_state import IterationPlan

Regenerating = Callable[[], AbstractAsyncContextManager[None]]
"""Enters a block in which regenerators hold the newest revision."""
_PARTS = {"sample": 2, "regenerate": 2}
"""Stages whose answers have a large part, which stays on the worker's node."""
_EXPLORING = ("explore", "sample")


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


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A unit's first answer that the selector accepts."""

    answer: Answer
    ack: Ack


class OpenIteration(Owner):
    """Makes an iteration's groups: one coroutine a prompt, `_make_group`."""

    def __init__(
        self,
        plan: IterationPlan,
        prompts: Sequence[Prompt],
        embeddings: Mapping[str, Any],
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
        self.clocks = {stage: StageClock() for stage in stages}
        self.groups: dict[str, Any] = {}
        """Prompt id → reference of its group."""
        self.rewards: dict[str, tuple[float, ...]] = {}
        self.explored = asyncio.Event()
        """Set when the rewards of all candidates are there."""
        self._grown = asyncio.Event()
        """Set when a group arrives; the waiting task clears it."""
        self._revised = asyncio.Event()
        """Set when the policy that regenerates is known."""
        self._world, self._tasks, self._router, self._selector = world, tasks, router, selector
        self._explored_with, self._tell, self._changed, self._staged = publication, tell, changed, staged
        self._publication: dict[str, float] = {}
        self._unexplored: set[str] = set()
        """Ids of units of pools without an accepted result."""
        self._reward_costs: Counter[str] = Counter()
        self._kinds = dict(zip(plan.prompt_ids, plan.kinds, strict=True)) if plan.kinds else {}
        self._prompts_at_work: dict[str, asyncio.Task[None]] = {}
        """Prompt id → its `_make_group`, which may have ended."""

    # The way of a prompt

    async def _make_group(self, prompt_id: str, wanted: Sequence[WorkUnit]) -> None:
        """Explore a prompt's pool, have the selector choose, sample the chosen seeds again, and give the group to the
        learner.

        `wanted`: the units of the prompt that the selector wants: a resumed run begins on the way.
        """
        samples: dict[WorkUnit, Any] = {}
        """In one stage: references of the pool's samples."""
        if pool := [unit for unit in wanted if unit.stage in _EXPLORING]:
            explored = [await result for result in self._request(pool)]
            samples |= {each.answer.unit: each.answer.large for each in explored if each.answer.large is not None}
            wanted = list(dict.fromkeys(unit for each in explored for unit in each.ack.units))
        if self._staged and not self.plan.one_stage:
            await self.explored.wait()
        if self.plan.staleness:
            await self._revised.wait()
            wanted = [unit for unit in wanted if unit.prompt_id not in self.groups]
        if self.plan.one_stage:
            for unit in wanted:
                await self._assemble(unit, samples)
            return
        for result in self._request(wanted):
            made = await result
            self._give_to_learner(prompt_id, made.answer.value.rewards, made.answer.large)

    async def _assemble(self, unit: WorkUnit, samples: dict[WorkUnit, Any]) -> None:
        """Have the selector put a prompt's group together from samples of its pool; lost ones are made again."""
        pool = [each for each in self.plan.pool_units_of(unit.prompt_id) if set(each.indices) & set(unit.indices)]
        while True:
            for result in self._request([each for each in pool if each not in samples]):
                made = await result
                if made.ack.differs:
                    raise RunError(f"{made.ack.differs}, whose samples are lost")
                samples[made.answer.unit] = made.answer.large
            try:
                rewards, group = await self._selector.assemble(unit, *[samples[each] for each in pool])
            except InputGone as error:  # some were lost with their node
                self._tell(f"chosen samples of prompt {unit.prompt_id} are made again ({error.reason})")
                samples.clear()
            else:
                self._give_to_learner(unit.prompt_id, rewards, group)
                return

    def _request(self, units: Sequence[WorkUnit]) -> list[asyncio.Future[_Accepted]]:
        """Have units of one prompt done."""
        results = []
        for stage, alike in groupby(units, key=lambda unit: unit.stage):
            same = list(alike)
            kind = self._kinds.get(same[0].prompt_id, "")
            explorers = f"explorers_{kind}" if kind else "explorers"
            pool = explorers if stage in _EXPLORING else "regenerators"
            results += self._router.request(self, same, pool, priority=self.plan.iteration)
        return results

    def _give_to_learner(self, prompt_id: str, rewards: tuple[float, ...], group: Any) -> None:
        self.groups[prompt_id], self.rewards[prompt_id] = group, rewards
        self._grown.set()
        self._changed()

    # Units, as the router sees them

    def call(self, unit: WorkUnit) -> tuple[str, tuple[Any, ...], int]:
        self.clocks["explore" if unit.stage in _EXPLORING else unit.stage].start(self._world.now())
        arguments = (unit, self.prompts[unit.prompt_id], self.embeddings[unit.prompt_id])
        return unit.stage, arguments, _PARTS.get(unit.stage, 1)

    async def judge(self, answer: Answer) -> _Accepted:
        """Have the selector accept an answer."""
        unit, value = answer.unit, answer.value
        if unit.stage == "regenerate":
            ack = await self._selector.accept_group(self.plan.iteration, answer.large)
        else:
            ack = await self._selector.accept(value)
        if ack.refused:
            raise NonsenseError(ack.refused)
        self._reward_costs.update(value.reward_costs or {})
        self.clocks["explore" if unit.stage in _EXPLORING else unit.stage].stop(self._world.now(), value.seconds)
        if unit.stage in _EXPLORING:
            self._explore_less(unit.id)
        return _Accepted(answer, ack)

    def _explore_less(self, *unit_ids: str) -> None:
        """Note that units of pools have results."""
        self._unexplored.difference_update(unit_ids)
        if not self._unexplored and not self.explored.is_set():
            self._publication = self._explored_with()  # the next revision may be sent from now on
            self.explored.set()
        self._changed()

    # For `Rollouts`

    def begin(self, opened: Opened) -> None:
        """Begin with what the selector wants; a resumed run has some of it."""
        self._add(opened)
        self._unexplored = {unit.id for unit in opened.units if unit.stage in _EXPLORING}
        self._explore_less()
        self._start(opened.units)

    def revised(self, opened: Opened) -> None:
        """The policy that regenerates is known, and so is what was regenerated with it before."""
        self._add(opened)
        self._revised.set()
        self._start(opened.units)

    def _add(self, opened: Opened) -> None:
        """Take over groups that exist already."""
        for group in opened.groups:
            if group.prompt_id not in self.groups:
                self._give_to_learner(group.prompt_id, group.rewards, self._world.put(group))

    def _start(self, units: Sequence[WorkUnit]) -> None:
        """Begin the ways of the prompts of these units, except those that are on it."""
        wanted: defaultdict[str, list[WorkUnit]] = defaultdict(list)
        for unit in units:
            wanted[unit.prompt_id].append(unit)
        for prompt_id, its in wanted.items():
            task = self._prompts_at_work.get(prompt_id)
            if task is None or task.done():
                name = f"the group of prompt {prompt_id}, iteration {self.plan.iteration}"
                self._prompts_at_work[prompt_id] = self._tasks.start(self._make_group(prompt_id, its), name)

    async def finish(self) -> RolloutResult:
        """What the update learns from, once every prompt has its group."""
        for task in list(self._prompts_at_work.values()):
            await task  # each unit has its deadline
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

    async def make_again(self, regenerating: Regenerating) -> None:
        """Make groups that the selector has lost; return when all of them are there."""
        async with regenerating():
            units = await self._selector.wanted(self.plan.iteration)
            for unit in units:
                self.groups.pop(unit.prompt_id, None)
            self._start(units)
            await self.finish()

    async def stored(self, regenerating: Regenerating) -> list[Any]:
        """References of the groups in prompt order, from the run folder; groups that it lacks by now are made again."""
        stored: dict[str, Any] = {}
        for prompt_id in self.plan.prompt_ids:
            units, stored[prompt_id] = await self._selector.stored(self.plan.iteration, prompt_id)
            if units:
                self._tell(f"the stored group of prompt {prompt_id} is damaged: it is made again")
        if None in stored.values():
            await self.make_again(regenerating)
        return [stored[prompt_id] or self.groups[prompt_id] for prompt_id in self.plan.prompt_ids]

    def learned(self) -> None:
        """Note that the update is done: nothing is made again."""
        self._router.drop(self)

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
            self._grown.clear()
            there = first
            while there < len(order) and order[there] in self.groups:
                there += 1
            if there == first:
                await self._grown.wait()
                continue
            new = order[first:there]
            yield first, [self.groups[p] for p in new], [self.embeddings[p] for p in new]
            first = there
