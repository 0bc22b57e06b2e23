"""Assigns work units to workers. Pure: it knows units, and each worker's name and policy revision.

Training runs and evaluations both use it.

Life of a unit::

    add ─► WAITING ──assign──► OUT(worker) ──answered──► forgotten
              ▲                    │
              └─────── lost ───────┘

Invariants:

- A unit is out with at most one worker.
- A worker gets only units of the revision that it holds, and at most `max_inflight` at a time.
- Units go out by their `order`, so a returned unit keeps its place in the queue.
- A worker gets no second unit if an idle worker is about to be ready and could take it. Otherwise one of the last units
  would queue at a busy worker, next to an idle one.

>>> unit = WorkUnit(stage="explore", iteration=0, revision=0, prompt_id="p", indices=(0, 1))
>>> dispatcher = Dispatcher(max_inflight=2)
>>> dispatcher.add(unit, pool="explorers", order=(0,))
>>> dispatcher.assign()
[]
>>> dispatcher.ready("explorer-0", "explorers", holds=("old", 0))
>>> [(assignment.worker, assignment.unit.id) for assignment in dispatcher.assign()]
[('explorer-0', 'explore/0/p/0-1')]
>>> [unit.id for unit in dispatcher.lost("explorer-0")]
['explore/0/p/0-1']
>>> dispatcher.waiting()
1
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from solrl_ray.records import WorkUnit

Held = tuple[str, int]
"""Policy and revision that a worker holds, or that a unit needs."""
Order = tuple[int, ...]
"""Priority of a unit; lower values go out first."""


@dataclass(frozen=True, slots=True)
class Assignment:
    worker: str
    unit: WorkUnit


@dataclass(slots=True)
class _Entry:
    """A unit without an answer."""

    unit: WorkUnit
    place: tuple[str, Held]
    """The pool and revision of its queue."""
    order: Order
    worker: str = ""
    """The worker that has it; empty while it waits."""


@dataclass(slots=True)
class _Worker:
    pool: str
    holds: Held | None = None
    """Policy and revision whose weights it has proved; None while it may get no unit."""
    units: list[WorkUnit] = field(default_factory=list)
    """Its units, in processing order."""


class Dispatcher:
    def __init__(self, *, max_inflight: int) -> None:
        """`max_inflight`: units that a worker may have at a time (``fleet.max_inflight``)."""
        self._max_inflight = max_inflight
        self._entries: dict[str, _Entry] = {}
        """Unit id → its entry."""
        self._queues: defaultdict[tuple[str, Held], list[tuple[Order, str]]] = defaultdict(list)
        """Pool and revision → order and id of waiting units, as a heap; outdated entries are skipped."""
        self._waiting: Counter[tuple[str, Held]] = Counter()
        """Pool and revision → number of waiting units."""
        self._free: defaultdict[tuple[str, Held], list[tuple[int, str]]] = defaultdict(list)
        """Pool and revision → number of units and name of workers with a free slot; outdated entries are skipped."""
        self._workers: dict[str, _Worker] = {}
        self._holders: Counter[tuple[str, Held]] = Counter()
        """Pool and revision → number of workers that may get units."""

    # Units

    def add(self, unit: WorkUnit, *, pool: str, order: Order, holds: Held | None = None) -> None:
        """Queue a unit. Adding it again before it is answered changes nothing.

        Args:
            order: units with a lower order go out first.
            holds: policy and revision that a worker must hold for it; None: those of the unit.
        """
        if unit.id not in self._entries:
            entry = self._entries[unit.id] = _Entry(unit, (pool, holds or (unit.policy, unit.revision)), order)
            self._wait(entry)

    def forget(self, unit: WorkUnit) -> None:
        """Forget a unit that is no longer requested. A worker that has it keeps its slot until it answers."""
        entry = self._entries.pop(unit.id, None)
        if entry is not None and not entry.worker:
            self._count_waiting(entry, -1)

    def waiting(self) -> int:
        """Number of units that wait for a worker."""
        return self._waiting.total()

    # Workers

    def ready(self, worker: str, pool: str, holds: Held) -> None:
        """Note that a worker has proved its weights: from now on it gets units of that revision."""
        self.not_ready(worker)
        mine = self._workers.setdefault(worker, _Worker(pool))
        mine.holds = holds
        self._holders[pool, holds] += 1
        self._offer_slot(worker, mine)

    def not_ready(self, worker: str) -> None:
        """Give a worker no further units until it is `ready` again; it keeps those it has."""
        mine = self._workers.get(worker)
        if mine is None or mine.holds is None:
            return
        place = mine.pool, mine.holds
        mine.holds = None
        self._holders[place] -= 1
        if not self._holders[place]:  # otherwise slots of old revisions would accumulate
            del self._holders[place]
            self._free.pop(place, None)

    def lost(self, worker: str) -> list[WorkUnit]:
        """Forget a worker; returns its units, which are queued for other workers again."""
        self.not_ready(worker)
        mine = self._workers.pop(worker, None)
        held = [self._entries.get(unit_id) for unit_id in {unit.id: None for unit in mine.units}] if mine else []
        returned = [entry for entry in held if entry is not None and entry.worker == worker]
        for entry in returned:
            entry.worker = ""
            self._wait(entry)
        return [entry.unit for entry in returned]

    def units_of(self, worker: str) -> list[WorkUnit]:
        """A worker's units, in processing order."""
        return list(self._workers[worker].units) if worker in self._workers else []

    def answered(self, worker: str, unit: WorkUnit) -> None:
        """Note a worker's answer, valid or not: frees its slot and forgets the unit."""
        mine = self._workers.get(worker)
        if mine is not None and unit in mine.units:
            mine.units.remove(unit)
            self._offer_slot(worker, mine)
        entry = self._entries.get(unit.id)
        if entry is not None and entry.worker == worker and entry.unit == unit:
            self.forget(unit)

    # The decision

    def assign(self) -> list[Assignment]:
        """Assign waiting units to free slots; the workers with the fewest units come first."""
        assignments: list[Assignment] = []
        for place, queue in list(self._queues.items()):
            while (entry := self._next_unit(place, queue)) is not None and (
                worker := self._next_slot(place)
            ) is not None:
                heapq.heappop(queue)
                assignments.append(self._assign_to(worker, entry))
            if not queue:
                del self._queues[place]
        return assignments

    def _assign_to(self, worker: str, entry: _Entry) -> Assignment:
        self._count_waiting(entry, -1)
        entry.worker = worker
        mine = self._workers[worker]
        mine.units.append(entry.unit)
        self._offer_slot(worker, mine)
        return Assignment(worker, entry.unit)

    def _wait(self, entry: _Entry) -> None:
        self._count_waiting(entry, 1)
        heapq.heappush(self._queues[entry.place], (entry.order, entry.unit.id))

    def _count_waiting(self, entry: _Entry, change: int) -> None:
        self._waiting[entry.place] += change
        if not self._waiting[entry.place]:
            del self._waiting[entry.place]

    def _offer_slot(self, worker: str, mine: _Worker) -> None:
        if mine.holds is not None and len(mine.units) < self._max_inflight:
            heapq.heappush(self._free[mine.pool, mine.holds], (len(mine.units), worker))

    def _next_unit(self, place: tuple[str, Held], queue: list[tuple[Order, str]]) -> _Entry | None:
        """The first waiting unit, which stays in its queue."""
        while queue:
            entry = self._entries.get(queue[0][1])
            if entry is not None and not entry.worker and (entry.place, entry.order) == (place, queue[0][0]):
                return entry
            heapq.heappop(queue)
        return None

    def _next_slot(self, place: tuple[str, Held]) -> str | None:
        """Take a free slot of the worker with the fewest units; ties are broken by name."""
        free = self._free[place]
        while free:
            units, worker = free[0]
            mine = self._workers.get(worker)
            is_true = mine is not None and (mine.pool, mine.holds) == place and len(mine.units) == units
            if is_true and units and self._is_kept_for_others(place):
                return None  # this worker gets the unit once it is idle, unless another worker takes it first
            heapq.heappop(free)
            if is_true:
                return worker
        return None

    def _is_kept_for_others(self, place: tuple[str, Held]) -> bool:
        """True if there are at least as many idle workers that still load weights as waiting units."""
        waiting = self._waiting[place]
        if waiting > len(self._workers):  # avoids counting
            return False
        mates = (mine for mine in self._workers.values() if mine.pool == place[0])
        return waiting <= sum(mine.holds is None and not mine.units for mine in mates)
