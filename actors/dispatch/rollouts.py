"""The rollouts of the open iterations: one, or two where exploring runs ahead (`rollout.max_staleness`).

The older one is regenerated and learned from. The younger one is explored with the revision before its own.
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
"""Seconds between two updates of the shown progress."""


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
            replacements: the budget that pays for restarts of the selector.
            publication: state of the explorers' revision: see `IterationMetrics.publication`.
        """
        self._world, self._tasks, self._router, self._telemetry = world, tasks, router, telemetry
        self._publication, self._staged = publication, bool(config.fleet.offload)
        self._selector = SelectorClient(
            world, tasks, seconds=config.fleet.deadlines.selector, replacements=replacements, tell=telemetry.message
        )
        self._open: dict[int, OpenIteration] = {}
        """By number, the oldest first."""
        self._shows = False

    async def open(self, plan: IterationPlan, prompts: Sequence[Prompt], embeddings: Mapping[str, Any]) -> None:
        """Open an iteration: from now on its units go to explorers that hold its revision.

        `embeddings`: prompt id → reference of its embedding.
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
            changed=self._changed,
            staged=self._staged,
        )
        this.begin(opened)
        self._show()

    def is_open(self, iteration: int) -> bool:
        return iteration in self._open

    def __getitem__(self, iteration: int) -> OpenIteration:
        return self._open[iteration]

    async def revise(self, iteration: int, policy_digest: str) -> None:
        """Set the policy that regenerates an iteration which was explored ahead, before regenerators get it.

        `policy_digest`: LoRA digest of the iteration's own revision.
        """
        this = self._open[iteration]
        if this.plan.staleness:
            this.revised(await self._selector.revise(iteration, policy_digest))

    async def close(self, iteration: int, regenerating: Regenerating) -> IterationSummary:
        """The summary of an iteration whose groups are complete. A group that the selector lost is made again.

        `regenerating`: enters a block in which regenerators hold the newest revision.
        """
        while not isinstance(summary := await self._selector.close(iteration), IterationSummary):
            await self._open[iteration].make_again(regenerating)
        for sentence in summary.violations:
            self._telemetry.message(f"{sentence}; the first result counts", "violation")
        return summary

    async def drop_before(self, iteration: int) -> None:
        """Forget earlier iterations, which a checkpoint contains."""
        for done in [number for number in self._open if number < iteration]:
            del self._open[done]
            await self._selector.drop(done)

    def _changed(self) -> None:
        """Show progress soon, once for many answers: computing its metrics costs as much as an answer."""
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
        for next_one in [each for each in ahead if each.plan.staleness]:
            stages["explore ahead"] = (next_one.candidates, next_one.pool_size)
        for name, (done, total) in stages.items():
            self._telemetry.stage(name, done, total)
