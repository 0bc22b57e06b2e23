"""Gives units to workers, and their answers to the coroutines that requested them.

::

    request ─► dispatcher ─► worker ─► reply
                   ▲            │
                   └── lost ────┘   also an answer that cannot be one

`solrl_ray.scheduling.dispatcher` decides which worker gets which unit. It is asked when a unit is requested, a slot
becomes free or a worker becomes ready, once for all that happens in the same pass of the event loop.
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

if TYPE_CHECKING:  # loads Ray, which handing out units does without
    from actors.monitoring.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Call:
    """The call that a worker answers for a unit."""

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
    """Reference of the second part."""
    began: float
    """When the unit was handed out first; seconds of the world's clock."""
    requeued: int
    """How often the unit went to another worker before."""


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
        """`retire` replaces an untrustworthy worker: its name, and the reason."""
        self._world, self._telemetry, self._retire = world, telemetry, retire
        self._dispatcher = Dispatcher(max_inflight=fleet.max_inflight)
        self._strikes, self._strike_limit = Strikes(), fleet.strikes
        self._workers: dict[str, Recipient] = {}
        """Workers that may get units, by name."""
        self._requests: dict[str, _Request] = {}
        """Requests without a reply, by unit id."""
        self._waking = False

    # For those who need units done

    async def request(self, unit: WorkUnit, call: Call, *, pool: str, order: Order, holds: Held | None = None) -> Reply:
        """A worker's reply to a unit, queued as by `Dispatcher.add`. A unit whose worker is lost goes to another one.

        Raises RunError or UserError, if the unit raised one.
        """
        if unit.id in self._requests:
            raise RunError(f"{unit.describe()} was requested twice")  # a mistake of this program
        request = self._requests[unit.id] = _Request(unit, call, pool, order, holds)
        self._queue(request)
        try:
            return await request.reply
        finally:
            self._requests.pop(unit.id, None)
            self._dispatcher.forget(unit)

    def accepted(self, unit: WorkUnit) -> None:
        """Note that a unit's reply counts. If it is ever repeated, an earlier refusal is no reason to end the run."""
        self._strikes.accepted(unit)

    def strike(self, worker: str, unit: WorkUnit, reason: str) -> None:
        """Note an answer that cannot be right, whose unit is repeated. After too many the worker is replaced.

        Raises RunError if the run is at fault.
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
        """A worker has proved what it holds."""
        self._workers[worker.name] = worker
        self._dispatcher.ready(worker.name, worker.pool, holds)
        self.wake()

    def not_ready(self, worker: Recipient) -> None:
        """A worker gets no unit until it is ready again."""
        self._dispatcher.not_ready(worker.name)

    def lost(self, worker: str) -> int:
        """A worker is gone; returns how many units go to others."""
        self._workers.pop(worker, None)
        units = self._dispatcher.lost(worker)
        for unit in units:
            self._requests[unit.id].requeued += 1
        self.wake()
        return len(units)

    def units_of(self, worker: str) -> list[WorkUnit]:
        """A worker's units, in the order in which it does them."""
        return self._dispatcher.units_of(worker)

    def answered(self, worker: Recipient, unit: WorkUnit, value: Any, large: Any) -> None:
        """A worker has answered; its slot is free."""
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
        request = self._ended(worker, unit)
        if request is not None:
            began = self._world.now() if request.began is None else request.began
            request.reply.set_result(Reply(worker.name, value, large, began, request.requeued))

    def failed(self, worker: Recipient, unit: WorkUnit, error: RunError | UserError) -> None:
        """A unit raised an error of its own, which its request raises."""
        request = self._ended(worker, unit)
        if request is not None:
            request.reply.set_exception(error)

    def nonsense(self, worker: Recipient, unit: WorkUnit, reason: str) -> None:
        """A worker has no answer that can be right: a strike, and the unit is repeated."""
        request = self._ended(worker, unit)
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

    # The decision

    def wake(self) -> None:
        """Soon check whether a worker can get a unit."""
        if not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        self._waking = False
        for each in self._dispatcher.assign():
            request = self._requests[each.unit.id]
            if request.began is None:
                request.began = self._world.now()
            try:
                self._workers[each.worker].give(each.unit, request.call)
            except Exception as error:  # nobody awaits this callback: the request must raise it
                if not request.reply.done():
                    request.reply.set_exception(error)

    def _queue(self, request: _Request) -> None:
        self._dispatcher.add(request.unit, pool=request.pool, order=request.order, holds=request.holds)
        self.wake()

    def _ended(self, worker: Recipient, unit: WorkUnit) -> _Request | None:
        """Free the slot of a unit that has ended; returns its request, unless that is gone."""
        self._dispatcher.answered(worker.name, unit)
        self.wake()
        request = self._requests.get(unit.id)
        return request if request is not None and request.unit == unit and not request.reply.done() else None
