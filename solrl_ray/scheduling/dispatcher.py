"""Which unit goes to which worker. Pure: the clock and the names are given to it.

Runs and evaluations both use this one class.

Life of a unit::

    WAITING ──assign──► OUT(worker) ──answered──► JUDGED ──done──► forgotten
       ▲                  │  └──assign (late)──► OUT(worker, second worker)      │
       ├──── lost ────────┘                                                      │
       └──── refuse, requeue ◄───────────────────────────────────────────────────┘

Invariants: a unit is out with at most one worker, or two once it is late; a worker only gets units of the revision that
it holds, and at most `max_inflight` at a time; a unit that returns keeps its id and its place in the order, so it goes
first. A worker gets no second unit if another worker without any is about to be ready and could take it: one of the
last units would wait behind another, beside an idle worker.

>>> unit = WorkUnit(stage="explore", iteration=0, revision=0, prompt_id="p", indices=(0, 1))
>>> dispatcher = Dispatcher(max_inflight=2, hedge=0.0)
>>> dispatcher.add([unit], batch="iteration 0", pool="explorers")
>>> dispatcher.assign(now=0.0)
[]
>>> dispatcher.ready("explorer-0", "explorers", holds=("old", 0))
>>> [(each.worker, each.unit.id) for each in dispatcher.assign(now=1.0)]
[('explorer-0', 'explore/0/p/0-1')]
>>> [each.id for each in dispatcher.lost("explorer-0")]
['explore/0/p/0-1']
>>> dispatcher.waiting("iteration 0")
1
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.hedging import Hedging, Out
from solrl_ray.scheduling.strikes import Strikes

HEDGE_LOOK = 1.0
"""Seconds between two searches for late units; each looks at all units that are out."""
_ROUNDING = 1e-3
"""Seconds by which a timer may fire early."""

Held = tuple[str, int]
"""Policy and revision that a worker holds, or that a unit needs."""


@dataclass(frozen=True, slots=True)
class Assignment:
    worker: str
    unit: WorkUnit
    batch: str
    hedge: bool = False
    """Whether another worker has it as well, and is late."""


@dataclass(slots=True)
class _Entry:
    """A unit that is not done."""

    unit: WorkUnit
    batch: str
    place: tuple[str, Held]
    """The pool and revision of its queue."""
    order: tuple[int, int]
    """Priority, then order of adding."""
    workers: tuple[str, ...] = ()
    """Workers that have it."""
    waits: bool = False


@dataclass(slots=True)
class _Worker:
    pool: str
    holds: Held | None = None
    """What it has proved; None while it may get no unit."""
    units: list[WorkUnit] = field(default_factory=list)
    """In the order in which it does them."""
    turn_since: float = 0.0
    """When it began the first of them."""


class Dispatcher:
    def __init__(self, *, max_inflight: int, hedge: float) -> None:
        """
        Args:
            max_inflight: units that a worker may have at a time (``fleet.max_inflight``).
            hedge: medians of its stage after which an idle worker gets a unit too; 0: never.
        """
        self._max_inflight = max_inflight
        self._strikes = Strikes()
        self._hedge = hedge
        self._hedging: defaultdict[str, Hedging] = defaultdict(lambda: Hedging(hedge))
        """By pool."""
        self._look_at = 0.0
        self._entries: dict[str, _Entry] = {}
        """By unit id."""
        self._batches: defaultdict[str, dict[str, _Entry]] = defaultdict(dict)
        self._queues: defaultdict[tuple[str, Held], list[tuple[tuple[int, int], str]]] = defaultdict(list)
        """Order and id of waiting units; outdated entries are skipped."""
        self._waiting: Counter[tuple[str, Held]] = Counter()
        """Units that wait for a worker, by pool and revision."""
        self._free: defaultdict[tuple[str, Held], list[tuple[int, str]]] = defaultdict(list)
        """Number of units and name of workers with a free slot; outdated entries are skipped."""
        self._workers: dict[str, _Worker] = {}
        self._held = 0
        """Units that workers have, including those that count already."""
        self._holders: Counter[tuple[str, Held]] = Counter()
        """Workers that may get units, by pool and revision."""
        self._added = 0
        self.requeued: Counter[str] = Counter()
        """By batch: units that went to another worker because an answer was lost or refused."""

    # Units

    def add(
        self, units: Iterable[WorkUnit], *, batch: str, pool: str, holds: Held | None = None, priority: int = 0
    ) -> None:
        """Add units. Adding one again changes nothing.

        Args:
            batch: names what they belong to: an iteration, an evaluation.
            holds: what a worker must hold to do them, if not the unit's own policy and revision.
            priority: units of a lower one go first.
        """
        for unit in units:
            key = unit.id
            if key not in self._entries:
                self._added += 1
                place = pool, holds or (unit.policy, unit.revision)
                entry = _Entry(unit, batch, place, (priority, self._added))
                self._entries[key] = self._batches[batch][key] = entry
                self._wait(entry)

    def done(self, unit: WorkUnit) -> None:
        """Note that a unit's answer counts. A second worker that still has the unit keeps its slot until it answers."""
        entry = self._entries.pop(unit.id, None)
        if entry is not None:
            self._batches.get(entry.batch, {}).pop(unit.id, None)
            self._wait_no_longer(entry)

    def withdraw(self, batch: str) -> None:
        """Forget the waiting units of a batch; those with workers stay until they are answered."""
        for entry in [entry for entry in self._batches.get(batch, {}).values() if entry.waits]:
            self.done(entry.unit)

    def out(self, batch: str) -> int:
        """How many units of a batch are with workers, or answered and not judged yet."""
        return sum(not entry.waits for entry in self._batches.get(batch, {}).values())

    def drop(self, batch: str) -> None:
        """Forget all units of a batch."""
        for entry in list(self._batches.pop(batch, {}).values()):
            self.done(entry.unit)
        self.requeued.pop(batch, None)

    def requeue(self, unit: WorkUnit, worker: str) -> None:
        """Repeat a unit whose answer by `worker` does not count."""
        entry = self._entries.get(unit.id)
        if entry is not None:
            self._give_up(entry, worker)

    def waiting(self, batch: str) -> int:
        """How many units of a batch wait for a worker."""
        return sum(entry.waits for entry in self._batches.get(batch, {}).values())

    # Workers

    def ready(self, worker: str, pool: str, holds: Held) -> None:
        """A worker has proved what it holds: from now on it gets units of that revision."""
        self.not_ready(worker)
        mine = self._workers.setdefault(worker, _Worker(pool))
        mine.holds = holds
        self._holders[pool, holds] += 1
        self._offer_slot(worker, mine)

    def not_ready(self, worker: str) -> None:
        """A worker gets no unit until it is `ready` again; it keeps its units."""
        mine = self._workers.get(worker)
        if mine is None or mine.holds is None:
            return
        place = mine.pool, mine.holds
        mine.holds = None
        self._holders[place] -= 1
        if not self._holders[place]:  # else slots of every revision would be kept
            del self._holders[place]
            self._free.pop(place, None)

    def lost(self, worker: str) -> list[WorkUnit]:
        """Forget a worker; returns the units that therefore wait for another one."""
        self.not_ready(worker)
        mine = self._workers.pop(worker, None)
        held = [self._entries.get(unit.id) for unit in mine.units] if mine else []
        self._held -= len(held)
        return [entry.unit for entry in held if entry is not None and self._give_up(entry, worker)]

    def batches_of(self, worker: str) -> set[str]:
        """The batches of a worker's units."""
        held = [self._entries.get(unit.id) for unit in self.units_of(worker)]
        return {entry.batch for entry in held if entry is not None}

    def units_of(self, worker: str) -> list[WorkUnit]:
        """A worker's units, in the order in which it does them."""
        return list(self._workers[worker].units) if worker in self._workers else []

    def answered(self, worker: str, unit: WorkUnit, *, now: float, seconds: float) -> None:
        """A worker has answered a unit after computing for `seconds`; whether the answer counts is decided later."""
        self._strikes.answered(worker)
        self._free_slot(worker, unit, now)
        if self._hedge and worker in self._workers:  # else it would be remembered for ever
            self._hedging[self._workers[worker].pool].answered(unit, seconds)

    def failed(self, worker: str, unit: WorkUnit, *, now: float) -> None:
        """A worker raised an error. That says neither how long a unit takes nor that the worker is right."""
        self._free_slot(worker, unit, now)

    def refuse(self, worker: str, unit: WorkUnit, reason: str, *, now: float, alone: bool) -> int:
        """An answer that cannot be right: a strike against its worker, and the unit is repeated.

        `alone`: whether the worker's pool has no other worker.

        Returns the worker's strikes. Raises RunError if the run is at fault (`scheduling.strikes`).
        """
        self._free_slot(worker, unit, now)
        strikes = self._strikes.refuse(worker, unit, reason, alone=alone)
        self.requeue(unit, worker)
        return strikes

    # The decision

    def assign(self, now: float) -> list[Assignment]:
        """Give waiting units to free slots, the least busy workers first; and late units to idle workers. `now`:
        seconds of a monotonic clock.
        """
        found: list[Assignment] = []
        for place, queue in list(self._queues.items()):
            while (entry := self._next_unit(queue)) is not None and (worker := self._next_slot(place)) is not None:
                heapq.heappop(queue)
                self._wait_no_longer(entry)
                found.append(self._give(worker, entry, now))
            if not queue:
                del self._queues[place]
        if self._hedge and now >= self._look_at - _ROUNDING:
            self._look_at = now + HEDGE_LOOK
            found += self._hedges(now)
        return found

    def hedge_look(self, now: float) -> float | None:
        """Seconds until `assign` should look for late units; None if nothing can be late."""
        return max(_ROUNDING, self._look_at - now) if self._hedge and self._held else None

    def _hedges(self, now: float) -> list[Assignment]:
        found = []
        waiting = {place[0] for place, queue in self._queues.items() if self._next_unit(queue)}
        for pool in sorted({mine.pool for mine in self._workers.values()} - waiting):
            mates = {name: mine for name, mine in self._workers.items() if mine.pool == pool}
            out = [Out(tuple(mine.units), now - mine.turn_since) for mine in mates.values() if mine.units]
            idle = [name for name, mine in mates.items() if mine.holds and not mine.units]
            for worker, unit in self._hedging[pool].pairs(idle, out):
                entry = self._entries.get(unit.id)
                if entry is not None and entry.place == (pool, mates[worker].holds) and len(entry.workers) == 1:
                    found.append(self._give(worker, entry, now, hedge=True))
        return found

    def _give(self, worker: str, entry: _Entry, now: float, *, hedge: bool = False) -> Assignment:
        mine = self._workers[worker]
        if not mine.units:
            mine.turn_since = now
        mine.units.append(entry.unit)
        self._held += 1
        entry.workers += (worker,)
        self._offer_slot(worker, mine)
        return Assignment(worker, entry.unit, entry.batch, hedge)

    def _give_up(self, entry: _Entry, worker: str) -> bool:
        """`worker` will not answer a unit; whether the unit therefore waits for another one."""
        entry.workers = tuple(name for name in entry.workers if name != worker)
        if entry.workers or entry.waits:
            return False
        self.requeued[entry.batch] += 1
        self._wait(entry)
        return True

    def _wait(self, entry: _Entry) -> None:
        entry.waits = True
        self._waiting[entry.place] += 1
        heapq.heappush(self._queues[entry.place], (entry.order, entry.unit.id))

    def _wait_no_longer(self, entry: _Entry) -> None:
        if entry.waits:
            entry.waits = False
            self._waiting[entry.place] -= 1
            if not self._waiting[entry.place]:
                del self._waiting[entry.place]

    def _free_slot(self, worker: str, unit: WorkUnit, now: float) -> None:
        mine = self._workers.get(worker)
        if mine is not None and unit in mine.units:
            mine.units.remove(unit)
            self._held -= 1
            mine.turn_since = now
            self._offer_slot(worker, mine)

    def _offer_slot(self, worker: str, mine: _Worker) -> None:
        if mine.holds is not None and len(mine.units) < self._max_inflight:
            heapq.heappush(self._free[mine.pool, mine.holds], (len(mine.units), worker))

    def _next_unit(self, queue: list[tuple[tuple[int, int], str]]) -> _Entry | None:
        """The first waiting unit, which stays in its queue."""
        while queue:
            entry = self._entries.get(queue[0][1])
            if entry is not None and entry.waits and entry.order == queue[0][0]:
                return entry
            heapq.heappop(queue)
        return None

    def _next_slot(self, place: tuple[str, Held]) -> str | None:
        """Take a slot of the worker with the fewest units that may have one more, by name among equals."""
        free = self._free[place]
        while free:
            units, worker = free[0]
            mine = self._workers.get(worker)
            is_true = mine is not None and (mine.pool, mine.holds) == place and len(mine.units) == units
            if is_true and units and self._is_kept_for_others(place):
                return None  # it gets the unit once it is free, if no other worker has taken it
            heapq.heappop(free)
            if is_true:
                return worker
        return None

    def _is_kept_for_others(self, place: tuple[str, Held]) -> bool:
        """Whether as many workers as units wait: workers without units that still load weights."""
        waiting = self._waiting[place]
        if waiting > len(self._workers):  # counting takes time
            return False
        mates = (mine for mine in self._workers.values() if mine.pool == place[0])
        return waiting <= sum(mine.holds is None and not mine.units for mine in mates)
