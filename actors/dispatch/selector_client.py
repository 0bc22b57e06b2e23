"""The controller's connection to the selector, which is restarted when it dies or hangs.

::

    answers ─► inbox ─► accept (all that came while it answered before) ─► acknowledgements, to the senders

A new selector replays the journals of the open iterations. It gets all accepted results again, because a disk may have
damaged a line, and explorers may hold the next revision by now; and all groups, because the old one may not have
written them. Results without acknowledgement are sent again; one that was journaled already is a harmless duplicate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from actors.workers.selector import Ack, Opened
from actors.world import Sent, Tasks, Tell, World
from solrl_ray.errors import InputGone, WorkerGone
from solrl_ray.records import UnitResult, WorkUnit
from solrl_ray.scheduling.iteration_state import IterationPlan, IterationSummary
from solrl_ray.scheduling.worker_state import Replacements, replacement_name


@dataclass(frozen=True, slots=True)
class _PendingResult:
    """A result on its way to the selector."""

    iteration: int
    result: Any
    """A `UnitResult`, or the reference of a sample group."""
    is_group: bool
    ack: asyncio.Future[Ack]


class SelectorClient:
    def __init__(self, world: World, tasks: Tasks, *, seconds: float, replacements: Replacements, tell: Tell) -> None:
        """
        Args:
            seconds: deadline of one call.
            replacements: the budget that pays for restarts.
            tell: is given a sentence for the user.
        """
        self._world, self._seconds, self._replacements = world, seconds, replacements
        self._tell = tell
        self._name = "selector"
        self._actor = world.selector(self._name)
        self._plans: dict[int, IterationPlan] = {}
        self._revised: dict[int, str] = {}
        self._results: dict[int, list[UnitResult]] = {}
        """By iteration: accepted ones, also of the run before this one's resume."""
        self._groups: dict[int, list[Any]] = {}
        """By iteration: references of accepted groups."""
        self._inbox: list[_PendingResult] = []
        self._filled = asyncio.Event()
        self._restarting = asyncio.Lock()
        tasks.start(self._flush_loop(), "bringing answers to the selector")

    async def open(self, plan: IterationPlan) -> Opened:
        """`Selector.open`; until `drop`, a new selector reopens the iteration."""
        opened: Opened = await self._ask("open", plan)
        self._plans[plan.iteration], self._results[plan.iteration] = plan, list(opened.results)
        return opened

    async def revise(self, iteration: int, policy_digest: str) -> Opened:
        """`Selector.revise`, also for a new selector."""
        opened: Opened = await self._ask("revise", iteration, policy_digest)
        self._revised[iteration] = policy_digest
        return opened

    async def close(self, iteration: int) -> IterationSummary | tuple[WorkUnit, ...]:
        return await self._ask("close", iteration)

    async def drop(self, iteration: int) -> None:
        """Forget an iteration that a checkpoint contains; who sends a result of it is cancelled."""
        self._plans.pop(iteration, None)
        self._revised.pop(iteration, None)
        self._results.pop(iteration, None)
        self._groups.pop(iteration, None)
        await self._ask("drop", iteration)

    async def accept(self, result: UnitResult) -> Ack:
        return await self._delivered(result.unit.iteration, result, is_group=False)

    async def accept_group(self, iteration: int, group: Any) -> Ack:
        """As `accept`, for a group by reference. Raises InputGone if it is lost."""
        return await self._delivered(iteration, group, is_group=True)

    async def wanted(self, iteration: int) -> tuple[WorkUnit, ...]:
        return await self._ask("wanted", iteration)

    async def assemble(self, unit: WorkUnit, *parts: Any) -> tuple[tuple[float, ...], Any]:
        """`Selector.assemble` of parts by reference: rewards, and the reference of the group.

        Raises InputGone if some are lost.
        """
        what = f"putting the group of prompt {unit.prompt_id} together"
        rewards, group = await self._repeat("assemble", unit, *parts, what=what, parts=2)
        self._groups.setdefault(unit.iteration, []).append(group)
        return rewards, group

    async def stored(self, iteration: int, prompt_id: str) -> tuple[tuple[float, ...], Any]:
        """`Selector.stored`: rewards, and the reference of the group; or neither."""
        what = f"reading the group of prompt {prompt_id}"
        rewards, group = await self._repeat("stored", iteration, prompt_id, what=what, parts=2)
        return rewards, group if rewards else None

    # Results that come while the selector answers go in its next call

    async def _delivered(self, iteration: int, result: Any, *, is_group: bool) -> Ack:
        pending = _PendingResult(iteration, result, is_group, asyncio.get_running_loop().create_future())
        self._inbox.append(pending)
        self._filled.set()
        return await pending.ack

    async def _flush_loop(self) -> None:
        while True:
            self._filled.clear()
            while together := self._inbox:
                self._inbox = []
                for each in together:
                    if each.iteration not in self._plans:  # it was dropped
                        each.ack.cancel()
                results = [each for each in together if not (each.ack.done() or each.is_group)]
                if results:
                    self._acknowledge(results, await self._ask("accept", [each.result for each in results]))
                await self._flush_groups([each for each in together if not each.ack.done() and each.is_group])
            await self._filled.wait()

    async def _flush_groups(self, groups: list[_PendingResult]) -> None:
        if not groups:
            return
        try:
            acks = await self._ask("accept_groups", *[each.result for each in groups])
        except InputGone as error:  # a group was lost with its node on its way
            if len(groups) == 1:
                if not groups[0].ack.done():
                    groups[0].ack.set_exception(error)
            else:  # one by one, to find out which
                for each in groups:
                    await self._flush_groups([each])
            return
        self._acknowledge(groups, acks)

    def _acknowledge(self, pending: Sequence[_PendingResult], acks: Sequence[Ack]) -> None:
        for each, ack in zip(pending, acks, strict=True):
            if each.iteration not in self._plans:  # it was dropped meanwhile, and a new selector knows nothing of it
                each.ack.cancel()
                continue
            if not (ack.refused or ack.differs or ack.repeats):
                accepted: dict[int, list[Any]] = self._groups if each.is_group else self._results
                accepted.setdefault(each.iteration, []).append(each.result)
            if not each.ack.done():  # else who sent it is gone
                each.ack.set_result(ack)

    # Calls, and the restart

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """The selector's answer. Raises as `World.answer`, except for the loss of the selector."""
        answer, _ = await self._repeat(method, *arguments, what=f"the selector's answer to {method}", parts=1)
        return answer

    async def _repeat(self, method: str, *arguments: Any, what: str, parts: int) -> tuple[Any, Any]:
        while True:
            async with self._restarting:  # wait for the restart
                actor = self._actor
                sent = self._world.send(actor, method, *arguments, parts=parts)
            try:
                return await self._answer(sent, what), sent.large
            except WorkerGone as error:
                async with self._restarting:
                    if self._actor is actor:  # else another task has restarted it
                        await self._restart(error)

    async def _restart(self, error: WorkerGone) -> None:
        while True:
            self._replacements.spend("the selector", str(error))
            self._tell(f"the selector is restarted and replays its journal ({error})", "lost")
            self._world.kill(self._actor)
            self._name = replacement_name(self._name)
            self._actor = self._world.selector(self._name)
            try:
                for plan in list(self._plans.values()):
                    await self._reopen(plan)
                return
            except WorkerGone as again:
                error = again

    async def _reopen(self, plan: IterationPlan) -> None:
        opened: Opened = await self._call("open", plan)
        if opened.message:
            self._tell(opened.message)
        if plan.iteration in self._revised:
            await self._call("revise", plan.iteration, self._revised[plan.iteration])
        await self._call("accept_again", *self._results.get(plan.iteration, []))
        for group in self._groups.get(plan.iteration, []):
            with suppress(InputGone):  # it was lost with its node and is made again when the iteration is closed
                await self._call("accept_again", group)

    async def _call(self, method: str, *arguments: Any) -> Any:
        sent = self._world.send(self._actor, method, *arguments)
        return await self._answer(sent, f"the selector's answer to {method}")

    async def _answer(self, sent: Sent, what: str) -> Any:
        return await self._world.answer(sent, what=what, seconds=self._seconds)
