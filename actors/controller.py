"""The controller: a whole run on one page, as a sequence of awaited steps.

::

    evaluate base ─► iteration: explore ∥ select ∥ regenerate ─► learn ─► publish revision + 1 ─► evaluate EMA ─► report
                        ▲                                                                       │
                        └── checkpoint ∥ the next iteration begins ◄────────────────────────────┘

Everything concurrent with these steps is a named task: running each worker, sending results to the selector, writing
metrics, and the work of `overlap`. The first error in any task ends the run, and the end of the run cancels all tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from actors.monitoring.telemetry import Telemetry
from actors.overlap import Overlap
from actors.run_components import RunComponents, open_run
from actors.training.iteration_clock import IterationClock
from actors.world import Tasks, World
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage
from solrl_ray.errors import RunError
from solrl_ray.learning.state import LearnerState
from solrl_ray.metrics.records import IterationMetrics, Progress
from solrl_ray.policy.digest import lora_digest
from solrl_ray.scheduling.iteration_state import staleness_of
from solrl_ray.storage.run_folder import RunFolder


class Controller:
    def __init__(self, config: Config, folder: Path, world: World) -> None:
        self._config, self._folder, self._world = config, folder, world
        self._telemetry = Telemetry(config, RunFolder(folder), world)
        self.note = self._telemetry.note
        self._run: RunComponents | None = None

    async def run(self) -> None:
        """Train from the state in the run folder up to `run.iterations`, then write the results."""
        last, telemetry = self._config.run.iterations, self._telemetry
        async with telemetry.last_events(), Tasks() as tasks:
            run = self._run = await open_run(self._config, self._folder, telemetry, self._world, tasks)
            overlap, clock = Overlap(run, tasks), IterationClock(self._config, self._world, run.fleet)
            first = run.point.updates
            self._check_fidelity(run, first)
            await (run.evaluations.before_iteration(first) if first else run.evaluations.before_training())
            clock.restart()
            for iteration in range(first, last):
                await run.begin(iteration)

                telemetry.begin_iteration(iteration)
                telemetry.state(self._rolls_out(run, iteration), stage="rollout")
                clock.checkpoint = await overlap.saved() or clock.checkpoint
                await run.rollouts.drop_before(iteration)
                async with overlap.rollout(iteration):
                    rollout = await run.rollouts[iteration].finish()

                telemetry.state("learning", stage="learn")
                clock.learn()
                async with overlap.update(iteration) as background:
                    update = await run.learners.update(iteration, rollout.groups, rollout.embeddings)
                    clock.learned()
                record = clock.record(iteration, rollout, background.result(), update)

                telemetry.state(f"publishing revision {iteration + 1}", stage="publish")
                clock.publish()
                state = await self._publish(run, iteration + 1, record)
                overlap.save(state, iteration + 1)
                del state  # otherwise it stays in memory for another iteration
                if run.checkpoints.low_fidelity:
                    await overlap.saved()
                    self._check_fidelity(run, iteration + 1)
                if iteration + 1 < last and not run.evaluations.holds_up(iteration + 1):
                    await run.begin(iteration + 1)
                if await run.evaluations.before_iteration(iteration + 1):
                    clock.restart()  # the evaluation's time is in its own record
            await overlap.saved()
            await run.evaluations.evaluate_ema(last)
            await run.checkpoints.finish(run.point.seconds + clock.elapsed)

    async def _publish(self, run: RunComponents, updates: int, record: IterationMetrics) -> LearnerState:
        """Make revision `updates` and record its iteration; returns the learner state of this revision.

        Explorers get the revision as soon as staleness allows, regenerators when their iteration begins.
        """
        if back := await run.checkpoints.gone_back_to(updates):
            best, state = back
            record = replace(record, rollback=best)
            await run.learners.load(state)
            await run.publisher.make(updates)
        else:
            state = await run.publisher.make_updated(updates)
        stale = staleness_of(updates, self._config.rollout.max_staleness)
        if not stale and updates < self._config.run.iterations:  # nothing is explored after the last update
            await run.publisher.to_explorers()
        digest = await run.on_disk(lambda: lora_digest(state.default), "taking the digest of the trained policy")
        self._telemetry.iteration(replace(record, lora_digest=digest))
        return state

    def _check_fidelity(self, run: RunComponents, updates: int) -> None:
        """Raises RunError if rank fidelity is too low to continue after these updates (`fidelity.on_low`)."""
        if updates < self._config.run.iterations and run.checkpoints.low_fidelity:
            raise RunError(run.checkpoints.low_fidelity)

    def _rolls_out(self, run: RunComponents, iteration: int) -> str:
        """Status line shown when a rollout begins."""
        if run.rollouts[iteration].explored.is_set():
            return "regenerating"
        return "sampling" if is_one_stage(self._config) else "exploring"

    # Called from outside while `run` is running

    async def progress(self, since: int = 0) -> Progress:
        """See `Telemetry.progress`."""
        return self._telemetry.progress(since)

    async def scale(self, sizes: Mapping[str, int]) -> str:
        """Resize pools; see `Fleet.scale`."""
        run = self._run
        if run is None:
            raise RunError("the run is still loading its last checkpoint; try again in a moment")
        return await run.fleet.scale(sizes)
