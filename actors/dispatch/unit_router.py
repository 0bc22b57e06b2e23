"""Routes units to workers, and their answers back to the coroutines that requested them.

::

    request ─► dispatcher ─► worker ─► reply
                   ▲            │
                   └── requeue ─┘   the worker is lost, or its answer is invalid

`solrl_ray.scheduling.dispatcher` decides which worker gets which unit: when a unit is requested, a slot becomes free or
a worker becomes ready. Several such events in one pass of the event loop cause one decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from actors.world import World
from solrl_ray.config.fleet import FleetConfig
from solrl_ray.errors import RunError, UserError
from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.dispatcher import Dispatcher, Held, Order
from solrl_ray.scheduling.strikes import Strikes

if TYPE_CHECKING:  # the import loads Ray, which this module does not need
    from actors.monitoring.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Call:
    """The method call that computes one unit on a worker."""

    method: str
    arguments: tuple[Any, ...]
    parts: int = 1
    """Number of parts in the answer, 1 or 2. The second part stays on the worker's node."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker's answer to a unit."""

    worker: str
    value: Any
    """The answer, or its first part if it has two."""
    large: Any
    """Reference to the second part, None if the answer has one part."""
    began: float
    """Time at which the unit was first handed out, in seconds of `World.now`."""
    requeued: int
    """Number of times that the unit went to another worker before this answer."""


@dataclass(slots=True, eq=False)
class _Request:
    unit: WorkUnit
    call: Call
    pool: str
    order: Order
    holds: Held | None
    reply: asyncio.Future[Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    began: float | None = None
    requeued: int = 0


class Recipient(Protocol):
    """A worker, as the router sees it."""

    name: str
    pool: str

    @property
    def is_alone(self) -> bool: ...

    def give(self, unit: WorkUnit, call: Call) -> None: ...


class UnitRouter:
    def __init__(
        self, world: World, fleet: FleetConfig, telemetry: Telemetry, retire: Callable[[str, str], None]
    ) -> None:
        """`retire`: called with the name of a worker whose answers cannot be trusted, and the reason; replaces it."""
        self._world, self._telemetry, self._retire = world, telemetry, retire
        self._dispatcher = Dispatcher(max_inflight=fleet.max_inflight)
        self._strikes, self._strike_limit = Strikes(), fleet.strikes
        self._workers: dict[str, Recipient] = {}
        """Name → worker that has been ready."""
        self._requests: dict[str, _Request] = {}
        """Unit id → request without a reply."""
        self._waking = False

    # For requesters

    async def request(self, unit: WorkUnit, call: Call, *, pool: str, order: Order, holds: Held | None = None) -> Reply:
        """Queue a unit (see `Dispatcher.add`) and wait for its reply. If the worker is lost, another one gets the unit.

        Raises RunError or UserError if the unit raised one.
        """
        if unit.id in self._requests:
            raise RunError(f"{unit.describe()} was requested twice")  # a bug in this program
        request = self._requests[unit.id] = _Request(unit, call, pool, order, holds)
        self._queue(request)
        try:
            return await request.reply
        finally:
            self._requests.pop(unit.id, None)
            self._dispatcher.forget(unit)

    def accepted(self, unit: WorkUnit) -> None:
        """The reply to this unit was accepted. If the unit is repeated later, earlier refusals of its answers no longer
        count as a fault of the run.
        """
        self._strikes.accepted(unit)

    def strike(self, worker: str, unit: WorkUnit, reason: str) -> None:
        """Count an invalid answer against its worker. After `fleet.strikes` of them the worker is replaced. The caller
        repeats the unit.

        Raises RunError if the fault is in the run, not in the worker.
        """
        recipient = self._workers.get(worker)
        alone = recipient is not None and recipient.is_alone
        strikes = self._strikes.refuse(worker, unit, reason, alone=alone)
        self._telemetry.struck(worker)
        self._telemetry.message(
            f"{unit.describe()} is repeated; strike {strikes} of {self._strike_limit} for {worker}: {reason}",
            "strike",
        )
        if strikes >= self._strike_limit:
            self._retire(worker, f"strike {strikes}: {reason}")

    # For workers and their pools

    def ready(self, worker: Recipient, holds: Held) -> None:
        """A worker has proved that it holds the weights `holds`, and may get units."""
        self._workers[worker.name] = worker
        self._dispatcher.ready(worker.name, worker.pool, holds)
        self.wake()

    def not_ready(self, worker: Recipient) -> None:
        """A worker gets no unit until it is ready again."""
        self._dispatcher.not_ready(worker.name)

    def lost(self, worker: str) -> int:
        """A worker is gone. Returns the number of its units that go to others."""
        self._workers.pop(worker, None)
        units = self._dispatcher.lost(worker)
        for unit in units:
            self._requests[unit.id].requeued += 1
        self.wake()
        return len(units)

    def units_of(self, worker: str) -> list[WorkUnit]:
        """Units of a worker, in the order in which it runs them."""
        return self._dispatcher.units_of(worker)

    def answered(self, worker: Recipient, unit: WorkUnit, value: Any, large: Any) -> None:
        """A worker has answered, and its slot is free. An answer for another unit counts as invalid."""
        self._telemetry.unit(worker.name, unit, value.started, value.seconds)
        if value.unit != unit:
            self.nonsense(
                worker,
                unit,
                f"{worker.name} was given {unit.describe()} of revision {unit.revision} and answered "
                f"{value.unit.describe()} of revision {value.unit.revision}",
            )
            return
        self._strikes.answered(worker.name)
        request = self._free_slot(worker, unit)
        if request is not None:
            began = self._world.now() if request.began is None else request.began
            request.reply.set_result(Reply(worker.name, value, large, began, request.requeued))

    def failed(self, worker: Recipient, unit: WorkUnit, error: RunError | UserError) -> None:
        """A unit failed with an error that is not the worker's fault: `request` raises it."""
        request = self._free_slot(worker, unit)
        if request is not None:
            request.reply.set_exception(error)

    def nonsense(self, worker: Recipient, unit: WorkUnit, reason: str) -> None:
        """A worker gave an invalid answer: it gets a strike, and the unit is repeated."""
        request = self._free_slot(worker, unit)
        try:
            self.strike(worker.name, unit, reason)
        except RunError as error:
            if request is None:
                raise
            request.reply.set_exception(error)
            return
        if request is not None:
            request.requeued += 1
            self._queue(request)

    # Assignment

    def wake(self) -> None:
        """Assign units to workers soon, in the next pass of the event loop."""
        if not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        self._waking = False
        for assignment in self._dispatcher.assign():
            request = self._requests[assignment.unit.id]
            if request.began is None:
                request.began = self._world.now()
            try:
                self._workers[assignment.worker].give(assignment.unit, request.call)
            except Exception as error:  # this callback has no caller to raise to, so the request raises it
                if not request.reply.done():
                    request.reply.set_exception(error)

    def _queue(self, request: _Request) -> None:
        self._dispatcher.add(request.unit, pool=request.pool, order=request.order, holds=request.holds)
        self.wake()

    def _free_slot(self, worker: Recipient, unit: WorkUnit) -> _Request | None:
        """Free the slot of a unit that has ended; returns its request if that still waits for a reply."""
        self._dispatcher.answered(worker.name, unit)
        self.wake()
        request = self._requests.get(unit.id)
        return request if request is not None and request.unit == unit and not request.reply.done() else None
