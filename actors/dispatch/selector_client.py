"""The controller's connection to the selector, which is restarted if it dies or hangs.

::

    results ─► inbox ─► accept (all results that arrived during the previous call) ─► acknowledgements, to the senders

A new selector replays the journals of the open iterations. Then it gets again:

- all accepted results: the disk may have damaged a line of the journal, and explorers may already hold the next
  revision, so that they could not repeat the unit;
- all groups: the old selector may not have written them;
- results without an acknowledgement. One that is already in the journal is a harmless duplicate.
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
    """A result that the selector has not acknowledged yet."""

    iteration: int
    result: Any
    """A `UnitResult`, or a reference to a sample group."""
    is_group: bool
    ack: asyncio.Future[Ack]


class SelectorClient:
    def __init__(self, world: World, tasks: Tasks, *, seconds: float, replacements: Replacements, tell: Tell) -> None:
        """
        Args:
            seconds: deadline of one call.
            replacements: budget that restarts are charged to.
            tell: reports a sentence to the user.
        """
        self._world, self._seconds, self._replacements = world, seconds, replacements
        self._report = tell
        self._name = "selector"
        self._actor = world.selector(self._name)
        self._plans: dict[int, IterationPlan] = {}
        self._revised: dict[int, str] = {}
        self._results: dict[int, list[UnitResult]] = {}
        """Iteration → accepted results, including those from before a resume."""
        self._groups: dict[int, list[Any]] = {}
        """Iteration → references to accepted groups."""
        self._inbox: list[_PendingResult] = []
        self._filled = asyncio.Event()
        self._restarting = asyncio.Lock()
        tasks.start(self._flush_loop(), "sending results to the selector")

    async def open(self, plan: IterationPlan) -> Opened:
        """`Selector.open`. Until `drop`, a new selector opens the iteration again."""
        opened: Opened = await self._request("open", plan)
        self._plans[plan.iteration], self._results[plan.iteration] = plan, list(opened.results)
        return opened

    async def revise(self, iteration: int, policy_digest: str) -> Opened:
        """`Selector.revise`; repeated on a new selector."""
        opened: Opened = await self._request("revise", iteration, policy_digest)
        self._revised[iteration] = policy_digest
        return opened

    async def close(self, iteration: int) -> IterationSummary | tuple[WorkUnit, ...]:
        return await self._request("close", iteration)

    async def drop(self, iteration: int) -> None:
        """Forget an iteration whose results a checkpoint contains. Pending `accept` calls for it are cancelled."""
        self._plans.pop(iteration, None)
        self._revised.pop(iteration, None)
        self._results.pop(iteration, None)
        self._groups.pop(iteration, None)
        await self._request("drop", iteration)

    async def accept(self, result: UnitResult) -> Ack:
        return await self._deliver(result.unit.iteration, result, is_group=False)

    async def accept_group(self, iteration: int, group: Any) -> Ack:
        """`accept` for a group, passed by reference. Raises InputGone if it is lost."""
        return await self._deliver(iteration, group, is_group=True)

    async def wanted(self, iteration: int) -> tuple[WorkUnit, ...]:
        return await self._request("wanted", iteration)

    async def assemble(self, unit: WorkUnit, *parts: Any) -> tuple[tuple[float, ...], Any]:
        """`Selector.assemble`, with parts passed by reference; returns rewards and a reference to the group.

        Raises InputGone if a part is lost.
        """
        what = f"assembling the group of prompt {unit.prompt_id}"
        rewards, group = await self._repeat("assemble", unit, *parts, what=what, parts=2)
        self._groups.setdefault(unit.iteration, []).append(group)
        return rewards, group

    async def stored(self, iteration: int, prompt_id: str) -> tuple[tuple[float, ...], Any]:
        """`Selector.stored`: rewards and a reference to the group; empty and None if it is damaged."""
        what = f"reading the group of prompt {prompt_id}"
        rewards, group = await self._repeat("stored", iteration, prompt_id, what=what, parts=2)
        return rewards, group if rewards else None

    # Results that arrive during a call of the selector are sent together in the next call

    async def _deliver(self, iteration: int, result: Any, *, is_group: bool) -> Ack:
        pending = _PendingResult(iteration, result, is_group, asyncio.get_running_loop().create_future())
        self._inbox.append(pending)
        self._filled.set()
        return await pending.ack

    async def _flush_loop(self) -> None:
        while True:
            self._filled.clear()
            while together := self._inbox:
                self._inbox = []
                for pending in together:
                    if pending.iteration not in self._plans:  # the iteration was dropped
                        pending.ack.cancel()
                results = [pending for pending in together if not (pending.ack.done() or pending.is_group)]
                if results:
                    self._acknowledge(results, await self._request("accept", [pending.result for pending in results]))
                await self._flush_groups(
                    [pending for pending in together if not pending.ack.done() and pending.is_group]
                )
            await self._filled.wait()

    async def _flush_groups(self, groups: list[_PendingResult]) -> None:
        if not groups:
            return
        try:
            acks = await self._request("accept_groups", *[each.result for each in groups])
        except InputGone as error:  # a group was lost with its node before the selector fetched it
            if len(groups) == 1:
                if not groups[0].ack.done():
                    groups[0].ack.set_exception(error)
            else:  # one by one, to find the lost one
                for each in groups:
                    await self._flush_groups([each])
            return
        self._acknowledge(groups, acks)

    def _acknowledge(self, pending: Sequence[_PendingResult], acks: Sequence[Ack]) -> None:
        for each, ack in zip(pending, acks, strict=True):
            if each.iteration not in self._plans:  # dropped meanwhile; a new selector would not know the iteration
                each.ack.cancel()
                continue
            if not (ack.refused or ack.differs or ack.repeats):
                accepted: dict[int, list[Any]] = self._groups if each.is_group else self._results
                accepted.setdefault(each.iteration, []).append(each.result)
            if not each.ack.done():  # otherwise the sender was cancelled
                each.ack.set_result(ack)

    # Calls, and the restart

    async def _request(self, method: str, *arguments: Any) -> Any:
        """Call the selector; if it is lost, restart it and call again. Raises as `World.answer`, except WorkerGone."""
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
                    if self._actor is actor:  # otherwise another task has restarted it
                        await self._restart(error)

    async def _restart(self, error: WorkerGone) -> None:
        while True:
            self._replacements.spend("the selector", str(error))
            self._report(f"the selector is restarted and replays its journal ({error})", "lost")
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
            self._report(opened.message)
        if plan.iteration in self._revised:
            await self._call("revise", plan.iteration, self._revised[plan.iteration])
        await self._call("accept_again", *self._results.get(plan.iteration, []))
        for group in self._groups.get(plan.iteration, []):
            with suppress(InputGone):  # lost with its node; it is made again when the iteration is closed
                await self._call("accept_again", group)

    async def _call(self, method: str, *arguments: Any) -> Any:
        sent = self._world.send(self._actor, method, *arguments)
        return await self._answer(sent, f"the selector's answer to {method}")

    async def _answer(self, sent: Sent, what: str) -> Any:
        return await self._world.answer(sent, what=what, seconds=self._seconds)
