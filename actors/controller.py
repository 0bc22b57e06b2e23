"""The controller: the run as one page, one awaited step after another.

::

    evaluate base ─► iteration: explore ∥ select ∥ regenerate ─► learn ─► publish revision + 1 ─► evaluate EMA ─► report
                        ▲                                        ∥ evaluation that is due   │
                        └── checkpoint ∥ the next iteration begins ◄────────────────────────┘

`run` awaits one step after another. What overlaps is a named task: the lives of workers, bringing answers to the
selector, exploring ahead, offering samples to the learners, a checkpoint, writing metrics. The first error of any task
ends the run, and the end of the run ends all tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from actors.dispatch.open_iteration import RolloutResult
from actors.evaluation.requests import EvaluationRequests
from actors.run_components import RunComponents
from actors.training.iteration_clock import IterationClock
from actors.world import Tasks, World
from solrl_ray.config.pools import is_colocated
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage
from solrl_ray.errors import RunError
from solrl_ray.learning.state import LearnerState
from solrl_ray.metrics.records import IterationMetrics, Progress
from solrl_ray.policy.digest import lora_digest
from solrl_ray.scheduling.iteration_state import IterationSummary, staleness_of


class Controller:
    def __init__(self, config: Config, folder: Path, world: World) -> None:
        self._config, self._world = config, world
        self._components = RunComponents(config, folder, world)
        self.note = self._components.telemetry.note
        self._opened, self._scaling = False, asyncio.Lock()
        self._checkpoint: asyncio.Task[float] | None = None
        self._colocated = is_colocated(config.fleet)
        self._staleness, self._last = config.rollout.max_staleness, config.run.iterations

    async def run(self) -> None:
        """Train from the run folder's state to `run.iterations`, then write the results."""
        async with Tasks() as self._tasks:
            components, first, last = await self._open(), self._components.point.updates, self._last
            await self._check_fidelity(first)
            await components.evaluations.before_training() if first == 0 else await self._evaluate_on_the_way(first)
            self._clock.restart()
            for iteration in range(first, last):
                await self._begin(iteration)
                record = await self._learn(iteration, await self._roll_out(iteration))
                state = await self._publish(iteration + 1, record)
                self._checkpoint = self._save(state, iteration + 1)
                del state  # else it stays in memory for an iteration
                await self._check_fidelity(iteration + 1)
                if iteration + 1 < last and not self._evaluates_before(iteration + 1):
                    await self._begin(iteration + 1)
                await self._evaluate_on_the_way(iteration + 1)
            await self._checkpoint_written()
            await components.evaluations.evaluate_ema(last)
            await components.checkpoints.finish(components.point.seconds + self._clock.elapsed)

    # Called from outside while `run` is at work

    async def progress(self) -> Progress:
        return self._components.telemetry.progress()

    async def scale(self, sizes: Mapping[str, int]) -> str:
        """Resize pools; see `Fleet.scale`."""
        components = self._ready()
        async with self._scaling:  # so that the last request is noted last
            said = await components.fleet.scale(sizes)
            await components.on_disk(lambda: components.folder.note_sizes(sizes), "noting the sizes of pools")
        return said

    @property
    def requests(self) -> EvaluationRequests:
        """Evaluations requested from outside."""
        return self._ready().requests

    def _ready(self) -> RunComponents:
        if not self._opened:
            raise RunError("the run is still looking for its last checkpoint; ask again in a moment")
        return self._components

    # The steps

    async def _open(self) -> RunComponents:
        await self._components.open(self._tasks)
        self._opened = True
        self._clock = IterationClock(self._config, self._world, self._components.fleet)
        return self._components

    async def _begin(self, iteration: int) -> None:
        """Open an iteration, unless it is open already."""
        components = self._components
        if not components.rollouts.is_open(iteration):
            await components.open_iteration(iteration)
        await components.rollouts.revise(iteration, await components.publisher.newest.digest)
        await components.publisher.to_regenerators()

    async def _roll_out(self, iteration: int) -> RolloutResult:
        """Return once every prompt has its group. The next iteration may be explored as soon as this one is."""
        components = self._components
        components.telemetry.begin_iteration(iteration)
        words = "sampling" if is_one_stage(self._config) else "exploring"
        explored = components.rollouts[iteration].explored.is_set()
        components.telemetry.state("regenerating" if explored else words, stage="rollout")
        await self._checkpoint_written()
        await components.rollouts.drop_before(iteration)
        ahead = self._tasks.start(self._explore_ahead(iteration), f"exploring iteration {iteration + 1} ahead")
        offers = self._tasks.start(self._offer(iteration), f"offering samples of iteration {iteration}")
        rollout = await components.rollouts[iteration].finish()
        offers.cancel()
        await ahead
        return rollout

    async def _explore_ahead(self, iteration: int) -> None:
        """Start exploring the next iteration when this one is explored, if staleness allows it."""
        components, following = self._components, iteration + 1
        if self._staleness and following < self._last and not components.rollouts.is_open(following):
            await components.rollouts[iteration].explored.wait()
            if components.publisher.sent_to_explorers is not components.publisher.newest:
                await components.publisher.to_explorers()
            await components.open_iteration(following)

    async def _offer(self, iteration: int) -> None:
        """Offer samples to the learners as they arrive, in prompt order."""
        if self._colocated:  # samplers would wait for what a learner does early, and the other way round
            return
        this = self._components.rollouts[iteration]
        async for first, groups, embeddings in this.in_order():
            self._components.learners.offer(iteration, [this.plan.keep] * len(this.prompts), first, groups, embeddings)

    async def _learn(self, iteration: int, rollout: RolloutResult) -> IterationMetrics:
        """Make the update. Beside it: the rest of its rollout, work ahead, and an evaluation that is due."""
        components = self._components
        components.telemetry.state("learning", stage="learn")
        self._clock.learn()
        ended = asyncio.Event()
        beside = self._tasks.start(self._beside_update(iteration, ended), f"background work of update {iteration + 1}")
        update = await components.learners.update(iteration, rollout.groups, rollout.embeddings)
        self._clock.learned()
        ended.set()
        summary = await beside
        return self._clock.record(iteration, rollout, summary, update)

    async def _beside_update(self, iteration: int, learned: asyncio.Event) -> IterationSummary:
        components = self._components
        summary = await components.rollouts.close(
            iteration, lambda: components.publisher.regenerating(after=learned if self._colocated else None)
        )
        unexplored = iteration + 1 + self._staleness
        if unexplored < self._last:
            prompts, further = components.prompts(unexplored), components.prompts_from(unexplored)
            self._tasks.start(components.embeddings.prefetch(prompts, further), "encoding prompts ahead")
        await components.evaluations.beside_update()
        if not self._colocated:
            await components.requests.window(learned, free=True)
        return summary

    async def _publish(self, updates: int, record: IterationMetrics) -> LearnerState:
        """Make revision `updates`; returns the state that it is of. Explorers get it as soon as staleness allows,
        regenerators when their iteration begins.

        `record`: of the iteration that made it; its digest is that of the state.
        """
        components = self._components
        components.telemetry.state(f"publishing revision {updates}", stage="publish")
        self._clock.publish()
        if back := await components.checkpoints.gone_back_to(updates):
            best, state = back
            record = replace(record, rollback=best)
            await components.learners.load(state)
            await components.publisher.make(updates)
        else:
            state = await components.publisher.make_updated(updates)
        if not staleness_of(updates, self._staleness) and updates < self._last:  # no exploring follows the last one
            await components.publisher.to_explorers()
        digest = await components.on_disk(lambda: lora_digest(state.default), "taking the digest of the trained policy")
        components.telemetry.iteration(replace(record, lora_digest=digest))
        components.rollouts[updates - 1].learned()
        return state

    def _save(self, state: LearnerState, updates: int) -> asyncio.Task[float]:
        self._components.telemetry.state("writing the checkpoint", stage="checkpoint")
        return self._tasks.start(self._components.checkpoints.save(state, updates), f"the checkpoint after {updates}")

    async def _checkpoint_written(self) -> None:
        """Return once the last checkpoint is on the disk. What comes next must not count before."""
        if self._checkpoint is not None:
            self._clock.checkpoint = await self._checkpoint
            self._checkpoint = None

    async def _check_fidelity(self, updates: int) -> None:
        """End the run after these updates if previews rank too badly, once their checkpoint is on the disk."""
        components = self._components
        if updates < self._last and components.checkpoints.low_fidelity:
            await self._checkpoint_written()
            raise RunError(components.checkpoints.low_fidelity)

    def _evaluates_before(self, iteration: int) -> bool:
        """Whether an iteration begins after evaluations: on cards, explorers would be in their way."""
        components = self._components
        return components.evaluations.holds_up(iteration) or (self._colocated and components.requests.wait)

    async def _evaluate_on_the_way(self, updates: int) -> None:
        if await self._components.evaluations.before_iteration(updates):
            self._clock.restart()  # an evaluation has its own record
        if self._colocated:  # requested evaluations get part of the time between iterations
            ended = asyncio.Event()
            seconds = self._config.evaluation.share * self._clock.last
            asyncio.get_running_loop().call_later(seconds, ended.set)
            await self._components.requests.window(ended, free=False)
