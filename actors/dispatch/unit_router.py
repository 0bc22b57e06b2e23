"""Gives units to workers, and judged answers to who requested them.

::

    request ─► dispatcher ─► worker ─► answer ─► its owner judges it ─► the unit's future
                   ▲                                   │
                   └─────── refused, lost, late ◄──────┘

`solrl_ray.scheduling.dispatcher` decides which worker gets which unit. It is asked when a unit is requested, a slot
becomes free or a worker becomes ready, once for all that happens in the same pass of the event loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from actors.world import Tasks, World
from solrl_ray.config.fleet import FleetConfig
from solrl_ray.errors import InputGone, NonsenseError, RunError, UserError
from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.dispatcher import Dispatcher, Held

if TYPE_CHECKING:  # loads Ray, which handing out units does without
    from actors.monitoring.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker answered to a unit."""

    worker: str
    unit: WorkUnit
    value: Any
    """The answer, or its small part if it has two."""
    large: Any = None
    """Reference of the large part, which stays on the worker's node."""


class Owner(ABC):
    """Requests a batch of units: an open iteration, an evaluation."""

    batch: str

    @abstractmethod
    def call(self, unit: WorkUnit) -> tuple[str, tuple[Any, ...], int]:
        """The call for a unit that is handed out now: method, arguments, parts of the answer."""

    @abstractmethod
    async def judge(self, answer: Answer) -> Any:
        """Check an answer to a unit; a late unit may have two. What is returned first is the result of its future.

        Raises NonsenseError if it cannot be right, or InputGone if it was lost on its way: the unit is repeated.
        """

    def failed(self, error: RunError | UserError) -> bool:
        """A unit raised an error of its own. Returns whether the owner handles it; if not, it ends the run."""
        return False

    def lost(self, worker: str) -> bool:
        """A worker with units of this owner is gone. Returns whether the owner pays for it; if not, the run does."""
        return False


@dataclass(frozen=True, slots=True)
class Loss:
    """The effect of a worker's end on units."""

    requeued: int
    """Units that go to other workers."""
    charged: bool
    """Whether it counts against the run's replacements."""


class Recipient(Protocol):
    """A worker, as the router sees it."""

    name: str
    pool: str

    @property
    def is_alone(self) -> bool: ...

    def give(self, unit: WorkUnit, batch: str, method: str, arguments: tuple[Any, ...], parts: int) -> None: ...


class UnitRouter:
    def __init__(
        self, world: World, tasks: Tasks, fleet: FleetConfig, telemetry: Telemetry, retire: Callable[[str, str], None]
    ) -> None:
        """`retire` replaces an untrustworthy worker: its name, and the reason."""
        self._world, self._tasks = world, tasks
        self._telemetry = telemetry
        self._retire = retire
        self._dispatcher = Dispatcher(max_inflight=fleet.max_inflight, hedge=fleet.hedge)
        self._strike_limit = fleet.strikes
        self._workers: dict[str, Recipient] = {}
        """Workers that may get units, by name."""
        self._owners: dict[str, Owner] = {}
        """By batch."""
        self._results: defaultdict[str, dict[str, asyncio.Future[Any]]] = defaultdict(dict)
        """Batch → id of a unit without a result → its future."""
        self._waking = False
        self._hedge_timer: asyncio.TimerHandle | None = None

    # For owners

    def request(
        self, owner: Owner, units: Iterable[WorkUnit], pool: str, *, holds: Held | None = None, priority: int = 0
    ) -> list[asyncio.Future[Any]]:
        """Queue units as `Dispatcher.add`. Returns a future for each: what `owner` makes of the first good answer."""
        self._owners[owner.batch] = owner
        units, mine, loop = list(units), self._results[owner.batch], asyncio.get_running_loop()
        for unit in units:
            if unit.id not in mine:
                mine[unit.id] = loop.create_future()
        self._dispatcher.add(units, batch=owner.batch, pool=pool, holds=holds, priority=priority)
        self.wake()
        return [mine[unit.id] for unit in units]

    def withdraw(self, owner: Owner) -> None:
        """Forget the owner's waiting units until they are requested again."""
        self._dispatcher.withdraw(owner.batch)
        self.wake()

    def out(self, owner: Owner) -> int:
        """How many units of the owner workers have."""
        return self._dispatcher.out(owner.batch)

    def drop(self, owner: Owner) -> None:
        """Forget all units of the owner; later answers to them are ignored."""
        self._dispatcher.drop(owner.batch)
        self._owners.pop(owner.batch, None)
        for result in self._results.pop(owner.batch, {}).values():
            result.cancel()
        self.wake()

    def requeued(self, owner: Owner) -> int:
        """Units of the owner that went to another worker because an answer was lost or refused."""
        return self._dispatcher.requeued[owner.batch]

    # For workers and their pools

    def ready(self, worker: Recipient, holds: Held) -> None:
        """A worker has proved what it holds."""
        self._workers[worker.name] = worker
        self._dispatcher.ready(worker.name, worker.pool, holds)
        self.wake()

    def not_ready(self, worker: Recipient) -> None:
        """A worker gets no unit until it is ready again."""
        self._dispatcher.not_ready(worker.name)

    def lost(self, worker: str) -> Loss:
        """A worker is gone."""
        self._workers.pop(worker, None)
        owners = [self._owners[batch] for batch in self._dispatcher.batches_of(worker) if batch in self._owners]
        units = self._dispatcher.lost(worker)
        self.wake()
        return Loss(len(units), charged=not any([owner.lost(worker) for owner in owners]))

    def units_of(self, worker: str) -> list[WorkUnit]:
        """A worker's units, in the order in which it does them."""
        return self._dispatcher.units_of(worker)

    def answered(self, worker: Recipient, unit: WorkUnit, batch: str, value: Any, large: Any) -> None:
        """A worker has answered; its slot is free."""
        self._dispatcher.answered(worker.name, unit, now=self._world.now(), seconds=value.seconds)
        self._telemetry.unit(worker.name, unit, value.started, value.seconds)
        owner = self._owners.get(batch)
        if owner is not None:
            judged = self._judged(owner, Answer(worker.name, unit, value, large))
            self._tasks.start(judged, f"judging {unit.id} of {worker.name}")
        self.wake()

    def failed(self, worker: Recipient, unit: WorkUnit, batch: str, error: RunError | UserError) -> bool:
        """A unit raised an error of its own. Returns whether the run goes on: the owner handles it, or the unit is no
        longer wanted.
        """
        owner = self._owners.get(batch)
        if owner is not None and not owner.failed(error):
            return False
        self._dispatcher.failed(worker.name, unit, now=self._world.now())
        if owner is not None:  # else another owner may want the same unit now
            self._dispatcher.done(unit)
        self.wake()
        return True

    def nonsense(self, worker: Recipient, unit: WorkUnit, batch: str, error: NonsenseError) -> None:
        """A worker met a value that cannot be right, and has no answer to a unit."""
        if not self.failed(worker, unit, batch, error):
            self._refuse(worker.name, unit, str(error))

    # The answer

    async def _judged(self, owner: Owner, answer: Answer) -> None:
        """Give an answer that counts to who awaits the unit; else the unit is repeated."""
        unit, answered = answer.unit, answer.value.unit
        try:
            if answered != unit:
                raise NonsenseError(
                    f"{answer.worker} was given {unit.describe()} of revision {unit.revision} and answered "
                    f"{answered.describe()} of revision {answered.revision}"
                )
            result = await owner.judge(answer)
        except NonsenseError as error:
            self._refuse(answer.worker, unit, str(error))
        except InputGone as error:
            self._repeat(answer, error.reason)
        else:
            awaited = self._results.get(owner.batch, {}).pop(unit.id, None)
            if awaited is not None:  # else it has a result; another owner may want the same unit now
                self._dispatcher.done(unit)
                if not awaited.done():  # else who awaited it is gone
                    awaited.set_result(result)

    def _repeat(self, answer: Answer, reason: str) -> None:
        """Repeat a unit whose answer was lost on its way."""
        self._telemetry.message(f"{answer.unit.describe()} is done again ({reason})")
        self._dispatcher.requeue(answer.unit, answer.worker)
        self.wake()

    def _refuse(self, name: str, unit: WorkUnit, reason: str) -> None:
        """Repeat a unit whose answer cannot be right. Too many of them, and the worker is replaced.

        Raises RunError if the run is at fault.
        """
        worker = self._workers.get(name)
        alone = worker is not None and worker.is_alone
        strikes = self._dispatcher.refuse(name, unit, reason, now=self._world.now(), alone=alone)
        self._telemetry.struck(name)
        self._telemetry.message(
            f"{unit.describe()} is repeated; strike {strikes} of {self._strike_limit} for {name}: {reason}"
        )
        if strikes >= self._strike_limit:
            self._retire(name, f"strike {strikes}: {reason}")
        self.wake()

    # The decision

    def wake(self) -> None:
        """Soon check whether a worker can get a unit."""
        if not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        self._waking = False
        now = self._world.now()
        for each in self._dispatcher.assign(now):
            owner, worker = self._owners[each.batch], self._workers[each.worker]
            worker.give(each.unit, each.batch, *owner.call(each.unit))
            if each.hedge:
                self._telemetry.message(f"{each.unit.describe()} is late; {each.worker} repeats it")
        self._look_for_late_units(now)

    def _look_for_late_units(self, now: float) -> None:
        """Check again when a unit may be late, even if nothing happens until then."""
        if self._hedge_timer is not None:
            self._hedge_timer.cancel()
            self._hedge_timer = None
        seconds = self._dispatcher.hedge_look(now)
        if seconds is not None:
            self._hedge_timer = asyncio.get_running_loop().call_later(seconds, self.wake)
