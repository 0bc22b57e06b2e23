"""An open iteration: the path of each prompt from its pool to the group that is learned from.

::

    explore units ─► explorers ─► the selector chooses ─► regenerate unit ─► a regenerator ─► group
    sample units ──► explorers ─► the selector chooses, and puts the kept samples together ─► group

`_make_group` is that path. Each of its steps requests units (`unit_router`) and hands their answers to the selector. If
a worker is lost or wrong, the unit goes to another one; if the selector is restarted, the answer goes to the new one.
Both only take longer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from actors.dispatch.selector_client import SelectorClient
from actors.dispatch.unit_router import Call, Reply, UnitRouter
from actors.workers.selector import Ack, Opened
from actors.world import Tasks, World
from solrl_ray.config.pools import EXPLORERS, REGENERATORS
from solrl_ray.errors import InputGone, RunError
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

    def add(self, began: float, ended: float, seconds: float) -> None:
        """Note a unit, handed out and accepted at these times, that took its worker `seconds`."""
        self.first = began if self.first is None else min(self.first, began)
        self.last = max(self.last, ended)
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


class OpenIteration:
    """Makes an iteration's groups: one coroutine per prompt, `_make_group`."""

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
        self.prompts = {prompt.id: prompt for prompt in prompts}
        self.embeddings = {prompt.id: embeddings[prompt.id] for prompt in prompts}
        stages = ("explore",) if plan.one_stage else ("explore", "regenerate")
        self.clocks = {stage: StageClock() for stage in stages}
        self.groups: dict[str, Any] = {}
        """Prompt id → reference of its group."""
        self.rewards: dict[str, tuple[float, ...]] = {}
        self.explored = asyncio.Event()
        """Set when the rewards of all candidates have arrived."""
        self._grown = asyncio.Event()
        """Set when a group arrives; the waiting task clears it."""
        self._revised = asyncio.Event()
        """Set when the policy that regenerates is known."""
        self._world, self._tasks, self._router, self._selector = world, tasks, router, selector
        self._explored_with, self._tell, self._changed, self._staged = publication, tell, changed, staged
        self._publication: dict[str, float] = {}
        self._unexplored: set[str] = set()
        """Ids of units of pools without an accepted result."""
        self._requeued = 0
        self._reward_costs: Counter[str] = Counter()
        self._positions = {prompt_id: position for position, prompt_id in enumerate(plan.prompt_ids)}
        self._prompts_at_work: dict[str, asyncio.Task[None]] = {}
        """Prompt id → its `_make_group`, which may have ended."""

    # The path of a prompt

    async def _make_group(self, prompt_id: str, wanted: Sequence[WorkUnit]) -> None:
        """Explore a prompt's pool, have the selector choose, sample the chosen seeds again, and give the group to the
        learner.

        In two stages the learner gets the regenerator's group by reference; the selector only checks and stores a copy.

        `wanted`: the prompt's units without a result: a resumed run has some results already.
        """
        explored = await self._all_accepted([unit for unit in wanted if unit.stage in _EXPLORING])
        chosen = [unit for unit in wanted if unit.stage == "regenerate"]
        chosen += [ack.chosen for _, ack in explored.values() if ack.chosen is not None]
        if not chosen:
            raise RunError(f"the selector chose no seeds of prompt {prompt_id} in iteration {self.plan.iteration + 1}")
        if self.plan.one_stage:
            samples = {unit: reply.large for unit, (reply, _) in explored.items()}
            await self._assemble(chosen[0], samples)
            return
        if self._staged:
            await self.explored.wait()
        if self.plan.staleness:
            await self._revised.wait()
        while prompt_id not in self.groups:  # one regenerated before a resume came with the revision
            reply, ack = await self._accepted(chosen[0])
            rewards, group = reply.value.rewards, reply.large
            if ack.repeats:  # the acknowledgement of the first group was lost with a selector
                rewards, group = await self._selector.stored(self.plan.iteration, prompt_id)
            if group is not None:
                self._give_to_learner(prompt_id, rewards, group)

    async def _all_accepted(self, units: Sequence[WorkUnit]) -> dict[WorkUnit, tuple[Reply, Ack]]:
        """`_accepted` of several units at once."""
        async with asyncio.TaskGroup() as group:
            tasks = {unit: group.create_task(self._accepted(unit), name=unit.id) for unit in units}
        return {unit: task.result() for unit, task in tasks.items()}

    async def _accepted(self, unit: WorkUnit) -> tuple[Reply, Ack]:
        """The first answer to a unit that the selector accepts, with its acknowledgement."""
        exploring = unit.stage in _EXPLORING
        pool = EXPLORERS if exploring else REGENERATORS
        order = self.plan.iteration, self._positions[unit.prompt_id], unit.indices[0]
        arguments = unit, self.prompts[unit.prompt_id], self.embeddings[unit.prompt_id]
        call = Call(unit.stage, arguments, _PARTS.get(unit.stage, 1))
        while True:
            reply = await self._router.request(unit, call, pool=pool, order=order)
            self._requeued += reply.requeued
            try:
                if exploring:
                    ack = await self._selector.accept(reply.value)
                else:
                    ack = await self._selector.accept_group(self.plan.iteration, reply.large)
            except InputGone as error:  # the group was lost with its node
                self._tell(f"{unit.describe()} is done again ({error.reason})")
            else:
                if not ack.refused:
                    self._router.accepted(unit)
                    break
                self._router.strike(reply.worker, unit, ack.refused)
            self._requeued += 1
        self._reward_costs.update(reply.value.reward_costs or {})
        clock = self.clocks["explore" if exploring else "regenerate"]
        clock.add(reply.began, self._world.now(), reply.value.seconds)
        if exploring:
            self._explore_less(unit.id)
        return reply, ack

    async def _assemble(self, chosen: WorkUnit, samples: dict[WorkUnit, Any]) -> None:
        """Have the selector put a prompt's group together from samples of its pool; lost ones are made again.

        `samples`: references of the pool's samples by unit.
        """
        pool = [unit for unit in self.plan.pool_units_of(chosen.prompt_id) if set(unit.indices) & set(chosen.indices)]
        while True:
            again = await self._all_accepted([unit for unit in pool if unit not in samples])
            for unit, (reply, ack) in again.items():
                if ack.differs:
                    raise RunError(f"{ack.differs}, whose samples are lost")
                samples[unit] = reply.large
            try:
                rewards, group = await self._selector.assemble(chosen, *[samples[unit] for unit in pool])
            except InputGone as error:  # some were lost with their node
                self._tell(f"chosen samples of prompt {chosen.prompt_id} are made again ({error.reason})")
                samples.clear()
            else:
                self._give_to_learner(chosen.prompt_id, rewards, group)
                return

    def _give_to_learner(self, prompt_id: str, rewards: tuple[float, ...], group: Any) -> None:
        self.groups[prompt_id], self.rewards[prompt_id] = group, rewards
        self._grown.set()
        self._changed()

    def _explore_less(self, *unit_ids: str) -> None:
        """Note that units of pools have results."""
        self._unexplored.difference_update(unit_ids)
        if not self._unexplored and not self.explored.is_set():
            self._publication = self._explored_with()  # the next revision may be sent from now on
            self.explored.set()
        self._changed()

    # For `Rollouts`

    def begin(self, opened: Opened) -> None:
        """Begin with the units that the selector wants; a resumed run has results of some."""
        self._take_groups(opened)
        self._unexplored = {unit.id for unit in opened.units if unit.stage in _EXPLORING}
        self._explore_less()
        self._start(opened.units)

    def revised(self, opened: Opened) -> None:
        """The policy that regenerates is known, and so are the groups that it made before a resume."""
        self._take_groups(opened)
        self._revised.set()
        self._start(opened.units)

    def _take_groups(self, opened: Opened) -> None:
        """Take over groups that exist already."""
        for group in opened.groups:
            if group.prompt_id not in self.groups:
                self._give_to_learner(group.prompt_id, group.rewards, self._world.put(group))

    def _start(self, units: Sequence[WorkUnit]) -> None:
        """Start `_make_group` of these units' prompts, unless it runs."""
        wanted: defaultdict[str, list[WorkUnit]] = defaultdict(list)
        for unit in units:
            wanted[unit.prompt_id].append(unit)
        for prompt_id, its in wanted.items():
            task = self._prompts_at_work.get(prompt_id)
            if task is None or task.done():
                name = f"the group of prompt {prompt_id}, iteration {self.plan.iteration}"
                self._prompts_at_work[prompt_id] = self._tasks.start(self._make_group(prompt_id, its), name)

    async def finish(self) -> RolloutResult:
        """The samples for the update, once every prompt has its group."""
        for task in list(self._prompts_at_work.values()):
            await task  # each unit has its deadline
        order = self.plan.prompt_ids
        return RolloutResult(
            groups=[self.groups[p] for p in order],
            embeddings=[self.embeddings[p] for p in order],
            rewards=[self.rewards[p] for p in order],
            clocks={stage: replace(clock) for stage, clock in self.clocks.items()},
            publication=self._publication,
            staleness=self.plan.staleness,
            requeued=self._requeued,
            reward_costs=dict(self._reward_costs),
        )

    async def make_again(self, regenerating: Regenerating) -> None:
        """Make groups that the selector has lost; return when all of them have arrived."""
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
            _, stored[prompt_id] = await self._selector.stored(self.plan.iteration, prompt_id)
            if stored[prompt_id] is None:
                self._tell(f"the stored group of prompt {prompt_id} is damaged: it is made again")
        if None in stored.values():
            await self.make_again(regenerating)
        return [stored[prompt_id] or self.groups[prompt_id] for prompt_id in self.plan.prompt_ids]

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
            end = first
            while end < len(order) and order[end] in self.groups:
                end += 1
            if end == first:
                await self._grown.wait()
                continue
            new = order[first:end]
            yield first, [self.groups[p] for p in new], [self.embeddings[p] for p in new]
            first = end
