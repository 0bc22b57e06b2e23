"""Work that overlaps the steps of an iteration. Each block starts its work and, at its end, waits for the part that the
next step needs.

::

    rollout(t)   explores iteration t + 1 once t is explored (`rollout.max_staleness` 1)
                 offers samples to the learners as they arrive
    update(t)    closes iteration t in the selector · encodes prompts ahead · runs a due evaluation
    checkpoint   is written until the next iteration's rollout
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from actors.run_components import RunComponents
from actors.world import Tasks
from solrl_ray.config.pools import is_colocated
from solrl_ray.learning.state import LearnerState
from solrl_ray.scheduling.iteration_state import IterationSummary


class Overlap:
    def __init__(self, run: RunComponents, tasks: Tasks) -> None:
        self._run, self._tasks = run, tasks
        self._colocated = is_colocated(run.config.fleet)
        self._staleness, self._last = run.config.rollout.max_staleness, run.config.run.iterations
        self._checkpoint: asyncio.Task[float] | None = None

    @asynccontextmanager
    async def rollout(self, iteration: int) -> AsyncIterator[None]:
        """Context in which the sample groups of an iteration are made."""
        ahead = self._tasks.start(self._explore_ahead(iteration), f"exploring iteration {iteration + 1} ahead")
        offers = self._tasks.start(self._offer(iteration), f"offering samples of iteration {iteration}")
        yield
        offers.cancel()
        await ahead

    @asynccontextmanager
    async def update(self, iteration: int) -> AsyncIterator[asyncio.Task[IterationSummary]]:
        """Context in which the learners run an iteration's update; the yielded task returns the iteration's summary."""
        learned = asyncio.Event()
        background = self._tasks.start(
            self._during_update(iteration, learned), f"background work of update {iteration + 1}"
        )
        yield background
        learned.set()
        await background

    def save(self, state: LearnerState, updates: int) -> None:
        """Start writing the checkpoint after `updates` updates."""
        self._run.telemetry.state("writing the checkpoint", stage="checkpoint")
        work = self._run.checkpoints.save(state, updates)
        self._checkpoint = self._tasks.start(work, f"the checkpoint after {updates}")

    async def saved(self) -> float | None:
        """Wait until the last checkpoint is on disk. Returns the seconds it took, None if none was being written.

        Results of the next step must not count before.
        """
        checkpoint, self._checkpoint = self._checkpoint, None
        return None if checkpoint is None else await checkpoint

    async def _explore_ahead(self, iteration: int) -> None:
        """Explore the next iteration as soon as this one is explored, if `rollout.max_staleness` allows it."""
        run, following = self._run, iteration + 1
        if self._staleness and following < self._last and not run.rollouts.is_open(following):
            await run.rollouts[iteration].explored.wait()
            if run.publisher.sent_to_explorers is not run.publisher.newest:
                await run.publisher.to_explorers()
            await run.explore(following)

    async def _offer(self, iteration: int) -> None:
        """Offer samples to the learners as they arrive, in prompt order."""
        if self._colocated:  # on a shared GPU, this work of the learner would only delay sampling
            return
        this = self._run.rollouts[iteration]
        async for first, groups, embeddings in this.in_order():
            self._run.learners.offer(iteration, [this.plan.keep] * len(this.prompts), first, groups, embeddings)

    async def _during_update(self, iteration: int, learned: asyncio.Event) -> IterationSummary:
        run, after = self._run, learned if self._colocated else None
        summary = await run.rollouts.close(iteration, lambda: run.publisher.regenerating(after=after))
        unexplored = iteration + 1 + self._staleness
        if unexplored < self._last:
            prompts, further = run.prompts.of(unexplored), run.prompts.encoded_with(unexplored)
            self._tasks.start(run.embeddings.prefetch(prompts, further), "encoding prompts ahead")
        await run.evaluations.beside_update()
        return summary
