"""The rollouts of the open iterations: one, or two if exploring runs ahead (`rollout.max_staleness`).

With two, the older iteration is regenerated and trained on; the newer one is explored with the previous revision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.dispatch.open_iteration import OpenIteration, Regenerating
from actors.dispatch.selector_client import SelectorClient
from actors.dispatch.unit_router import UnitRouter
from actors.monitoring.telemetry import Telemetry
from actors.world import Tasks, World
from solrl_ray.config.schema import Config
from solrl_ray.records import Prompt
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationSummary
from solrl_ray.scheduling.worker_state import Replacements

SHOW_SECONDS = 0.2
"""Minimum seconds between two updates of the displayed progress."""


class Rollouts:
    def __init__(
        self,
        config: Config,
        world: World,
        tasks: Tasks,
        router: UnitRouter,
        telemetry: Telemetry,
        *,
        replacements: Replacements,
        publication: Callable[[], dict[str, float]],
    ) -> None:
        """
        Args:
            replacements: budget that restarts of the selector are charged to.
            publication: returns the state of the explorers' revision: see `IterationMetrics.publication`.
        """
        self._world, self._tasks, self._router, self._telemetry = world, tasks, router, telemetry
        self._publication, self._staged = publication, bool(config.fleet.offload)
        self._selector = SelectorClient(
            world, tasks, seconds=config.fleet.deadlines.selector, replacements=replacements, tell=telemetry.message
        )
        self._open: dict[int, OpenIteration] = {}
        """Iteration number → rollout, oldest first."""
        self._shows = False

    async def open(self, plan: IterationPlan, prompts: Sequence[Prompt], embeddings: Mapping[str, Any]) -> None:
        """Open an iteration: from now on, explorers that hold its revision get its units.

        `embeddings`: prompt id → reference to its embedding.
        """
        opened = await self._selector.open(plan)
        if opened.message:
            self._telemetry.message(opened.message)
        this = self._open[plan.iteration] = OpenIteration(
            plan,
            prompts,
            embeddings,
            world=self._world,
            tasks=self._tasks,
            router=self._router,
            selector=self._selector,
            publication=self._publication,
            tell=self._telemetry.message,
            changed=self._on_change,
            staged=self._staged,
        )
        this.begin(opened)
        self._show()

    def is_open(self, iteration: int) -> bool:
        return iteration in self._open

    def __getitem__(self, iteration: int) -> OpenIteration:
        return self._open[iteration]

    async def revise(self, iteration: int, policy_digest: str) -> None:
        """Set the policy for regenerating an iteration that was explored ahead. Call before regenerators load it.

        `policy_digest`: LoRA digest of the iteration's revision, not of the one that explored.
        """
        this = self._open[iteration]
        if this.plan.staleness:
            this.revised(await self._selector.revise(iteration, policy_digest))

    async def close(self, iteration: int, regenerating: Regenerating) -> IterationSummary:
        """Close an iteration and return its summary. Groups that the selector lost are made again first.

        `regenerating`: returns a context in which regenerators hold the newest revision.
        """
        while not isinstance(summary := await self._selector.close(iteration), IterationSummary):
            await self._open[iteration].make_again(regenerating)
        for sentence in summary.violations:
            self._telemetry.message(f"{sentence}; the first result counts", "violation")
        return summary

    async def drop_before(self, iteration: int) -> None:
        """Forget iterations before this one, whose results a checkpoint contains."""
        for done in [number for number in self._open if number < iteration]:
            del self._open[done]
            await self._selector.drop(done)

    def _on_change(self) -> None:
        """Show progress soon, once for many results: one update costs as much as handling a result."""
        if not self._shows:
            self._shows = True
            asyncio.get_running_loop().call_later(SHOW_SECONDS, self._show)

    def _show(self) -> None:
        """Show the oldest open iteration, and the one explored ahead."""
        self._shows = False
        if not self._open:
            return
        this, *ahead = self._open.values()
        stages = {"explore": (this.candidates, this.pool_size)}
        stages["select" if this.plan.one_stage else "regenerate"] = (len(this.groups), len(this.prompts))
        for following in [rollout for rollout in ahead if rollout.plan.staleness]:
            stages["explore ahead"] = (following.candidates, following.pool_size)
        for name, (done, total) in stages.items():
            self._telemetry.stage(name, done, total)
