"""An open iteration: each prompt's path from its candidate pool to the sample group that the learner trains on.

::

    two stages: explore units ─► explorers ─► the selector chooses ─► regenerate unit ─► a regenerator ─► group
    one stage:  sample units ──► explorers ─► the selector chooses and assembles the kept samples ─────► group

`_make_group` implements this path. Each step requests units (`unit_router`) and passes their results to the selector.
If a worker is lost or gives a wrong answer, another worker gets the unit; if the selector is restarted, the new one
gets the result. Both cost time and change no result.
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
"""Returns a context in which regenerators hold the newest revision."""
_PARTS = {"sample": 2, "regenerate": 2}
"""Stage → number of parts in its answers, 1 if not listed. The second, large part stays on the worker's node."""
_EXPLORING = ("explore", "sample")


@dataclass(slots=True)
class StageClock:
    """Times of a stage: when its first unit was handed out, when its last result arrived, and the summed compute
    seconds of its workers.
    """

    first: float | None = None
    last: float = 0.0
    busy: float = 0.0

    def add(self, began: float, ended: float, seconds: float) -> None:
        """Add a unit that was handed out at `began`, accepted at `ended`, and took its worker `seconds`."""
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
    """References to the sample groups, in prompt order."""
    embeddings: list[Any]
    """References to the embeddings of their prompts."""
    rewards: list[tuple[float, ...]]
    """Rewards of the samples of each group, in prompt order and selection order."""
    clocks: dict[str, StageClock] = field(default_factory=dict)
    publication: dict[str, float] = field(default_factory=dict)
    """Publication of the revision used for exploring: see `IterationMetrics.publication`."""
    staleness: int = 0
    """Number of revisions that the explorers were behind."""
    requeued: int = 0
    """Number of times that a unit went to another worker because its answer was lost or refused."""
    reward_costs: dict[str, int] = field(default_factory=dict)
    """Use of reward servers and judges: see `IterationMetrics.reward_costs`."""

    @property
    def walls(self) -> dict[str, float]:
        """Stage → wall seconds. ``ahead`` is the time spent exploring before regenerators had the iteration's revision.

        It is not part of ``explore``.
        """
        walls = {name: clock.wall for name, clock in self.clocks.items()}
        explore = self.clocks["explore"]
        if self.staleness and explore.first is not None:
            begun = self.clocks["regenerate"].first
            walls["ahead"] = max(0.0, min(begun or explore.last, explore.last) - explore.first)
            walls["explore"] -= walls["ahead"]
        return walls


class OpenIteration:
    """Makes the sample groups of an iteration, with one coroutine for each prompt (`_make_group`)."""

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
            embeddings: prompt id → reference to its embedding.
            publication: returns the state of the explorers' revision: see `IterationMetrics.publication`.
            tell: reports a sentence to the user.
            changed: called when the displayed progress has changed.
            staged: if True, regenerating starts only when the whole iteration is explored.
        """
        self.plan = plan
        self.prompts = {prompt.id: prompt for prompt in prompts}
        self.embeddings = {prompt.id: embeddings[prompt.id] for prompt in prompts}
        stages = ("explore",) if plan.one_stage else ("explore", "regenerate")
        self.clocks = {stage: StageClock() for stage in stages}
        self.groups: dict[str, Any] = {}
        """Prompt id → reference to its group."""
        self.rewards: dict[str, tuple[float, ...]] = {}
        self.explored = asyncio.Event()
        """Set when the rewards of all candidates have arrived."""
        self._grown = asyncio.Event()
        """Set when a group has arrived; cleared by the task that waits for it."""
        self._revised = asyncio.Event()
        """Set when the policy for regenerating is known."""
        self._world, self._tasks, self._router, self._selector = world, tasks, router, selector
        self._explored_with, self._report, self._changed, self._staged = publication, tell, changed, staged
        self._publication: dict[str, float] = {}
        self._unexplored: set[str] = set()
        """Ids of explore and sample units without an accepted result."""
        self._requeued = 0
        self._reward_costs: Counter[str] = Counter()
        self._positions = {prompt_id: position for position, prompt_id in enumerate(plan.prompt_ids)}
        self._prompts_at_work: dict[str, asyncio.Task[None]] = {}
        """Prompt id → its `_make_group` task, which may have ended."""

    # The path of a prompt

    async def _make_group(self, prompt_id: str, wanted: Sequence[WorkUnit]) -> None:
        """Explore a prompt's pool, let the selector choose seeds, sample them again, and pass the group to the learner.

        With two stages, the learner gets the regenerator's group by reference, and the selector checks and stores a
        copy.

        `wanted`: the prompt's units without a result. A resumed run already has some results.
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
        while prompt_id not in self.groups:  # `revised` adds groups that were regenerated before a resume
            reply, ack = await self._accepted(chosen[0])
            rewards, group = reply.value.rewards, reply.large
            if ack.repeats:  # a first group was accepted, but its acknowledgement was lost with the selector
                rewards, group = await self._selector.stored(self.plan.iteration, prompt_id)
            if group is not None:
                self._give_to_learner(prompt_id, rewards, group)

    async def _all_accepted(self, units: Sequence[WorkUnit]) -> dict[WorkUnit, tuple[Reply, Ack]]:
        """`_accepted` for several units at once."""
        async with asyncio.TaskGroup() as group:
            tasks = {unit: group.create_task(self._accepted(unit), name=unit.id) for unit in units}
        return {unit: task.result() for unit, task in tasks.items()}

    async def _accepted(self, unit: WorkUnit) -> tuple[Reply, Ack]:
        """Request a unit until the selector accepts an answer; returns this answer and the acknowledgement."""
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
                self._report(f"{unit.describe()} is done again ({error.reason})")
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
            self._on_explored(unit.id)
        return reply, ack

    async def _assemble(self, chosen: WorkUnit, samples: dict[WorkUnit, Any]) -> None:
        """Let the selector assemble a prompt's group from the samples of its pool. Lost samples are made again.

        `samples`: unit → reference to its samples.
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
            except InputGone as error:  # some samples were lost with their node
                self._report(f"chosen samples of prompt {chosen.prompt_id} are made again ({error.reason})")
                samples.clear()
            else:
                self._give_to_learner(chosen.prompt_id, rewards, group)
                return

    def _give_to_learner(self, prompt_id: str, rewards: tuple[float, ...], group: Any) -> None:
        self.groups[prompt_id], self.rewards[prompt_id] = group, rewards
        self._grown.set()
        self._changed()

    def _on_explored(self, *unit_ids: str) -> None:
        """These explore or sample units have results."""
        self._unexplored.difference_update(unit_ids)
        if not self._unexplored and not self.explored.is_set():
            self._publication = self._explored_with()  # read now: the next revision may be sent after this
            self.explored.set()
        self._changed()

    # For `Rollouts`

    def begin(self, opened: Opened) -> None:
        """Begin with the units that the selector requests. A resumed run already has results of the others."""
        self._take_groups(opened)
        self._unexplored = {unit.id for unit in opened.units if unit.stage in _EXPLORING}
        self._on_explored()
        self._start(opened.units)

    def revised(self, opened: Opened) -> None:
        """The policy for regenerating is known; `opened` has the groups that it made before a resume."""
        self._take_groups(opened)
        self._revised.set()
        self._start(opened.units)

    def _take_groups(self, opened: Opened) -> None:
        """Take over groups that exist already in the run folder."""
        for group in opened.groups:
            if group.prompt_id not in self.groups:
                self._give_to_learner(group.prompt_id, group.rewards, self._world.put(group))

    def _start(self, units: Sequence[WorkUnit]) -> None:
        """Start `_make_group` for the prompts of these units, unless it is running."""
        wanted: defaultdict[str, list[WorkUnit]] = defaultdict(list)
        for unit in units:
            wanted[unit.prompt_id].append(unit)
        for prompt_id, units_of_prompt in wanted.items():
            task = self._prompts_at_work.get(prompt_id)
            if task is None or task.done():
                name = f"the group of prompt {prompt_id}, iteration {self.plan.iteration}"
                self._prompts_at_work[prompt_id] = self._tasks.start(self._make_group(prompt_id, units_of_prompt), name)

    async def finish(self) -> RolloutResult:
        """Wait until every prompt has its group; returns the samples for the update."""
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
        """Recreate groups that the selector lost; returns when all of them have arrived."""
        async with regenerating():
            units = await self._selector.wanted(self.plan.iteration)
            for unit in units:
                self.groups.pop(unit.prompt_id, None)
            self._start(units)
            await self.finish()

    async def stored(self, regenerating: Regenerating) -> list[Any]:
        """References to the groups in prompt order, read from the run folder. Groups that are damaged there are made
        again.
        """
        stored: dict[str, Any] = {}
        for prompt_id in self.plan.prompt_ids:
            _, stored[prompt_id] = await self._selector.stored(self.plan.iteration, prompt_id)
            if stored[prompt_id] is None:
                self._report(f"the stored group of prompt {prompt_id} is damaged: it is made again")
        if None in stored.values():
            await self.make_again(regenerating)
        return [stored[prompt_id] or self.groups[prompt_id] for prompt_id in self.plan.prompt_ids]

    @property
    def candidates(self) -> int:
        """Number of candidates that have rewards."""
        return self.pool_size - self.plan.unit * len(self._unexplored)

    @property
    def pool_size(self) -> int:
        return self.plan.pool * len(self.prompts)

    async def in_order(self) -> AsyncIterator[tuple[int, list[Any], list[Any]]]:
        """Yields groups in prompt order as they arrive: index of the first, references to groups and embeddings."""
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
