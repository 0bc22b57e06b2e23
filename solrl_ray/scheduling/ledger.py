"""Who works on what: the ledger of an iteration's units. Pure; used by the live run and by simulations alike.

Life of a unit::

    WAITING ──lease──► LEASED(worker) ──finish──► DONE          first result wins, whoever brings it
       ▲                    │      └──hedge──► LEASED(worker, second worker)
       ├──────release───────┘                      │   the worker died, hung or was refused; the unit keeps its
       └────────────────────redo───────────────────┘   id and goes first; what it had made is lost

Invariants: a unit is leased to at most one worker at a time and hedged by at most one more, who takes its place if it
is lost; a unit that is DONE never changes its result, not even when it is done again; a later result of a DONE unit is
a duplicate, and a duplicate with other bytes is a counted violation.

>>> from solrl_ray.records import WorkUnit
>>> unit = WorkUnit(stage="explore", iteration=0, revision=0, prompt_id="p", indices=(0, 1))
>>> ledger = Ledger([unit])
>>> ledger.lease("explorer-0").id
'explore/0/p/0-1'
>>> ledger.release("explorer-0")
('explore/0/p/0-1',)
>>> ledger.finish(unit.id, "digest")
<Outcome.ACCEPTED: 'accepted'>
>>> ledger.complete
True
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from enum import Enum

from solrl_ray.records import WorkUnit


class Outcome(Enum):
    """What became of a result that was brought to the ledger."""

    ACCEPTED = "accepted"
    RESTORED = "restored"
    """The unit was done again because what it had made was lost, to the same bytes."""
    DUPLICATE = "duplicate"
    VIOLATION = "violation"
    """A duplicate whose bytes differ from the accepted result: determinism is broken somewhere."""


class Ledger:
    """Units of one stage, handed out in the order in which they were added; requeued ones go first.

    A unit may be for workers of one kind alone, which then have a queue of their own.
    """

    def __init__(self, units: Iterable[WorkUnit] = ()) -> None:
        self._units: dict[str, WorkUnit] = {}
        self._kinds: dict[str, str] = {}
        """Of units that not everybody may do."""
        self._queues: defaultdict[str, deque[str]] = defaultdict(deque)
        self._leases: dict[str, str] = {}
        self._hedges: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        self._finishers: dict[str, str] = {}
        self._again: set[str] = set()
        self.requeued = 0
        self.duplicates = 0
        self.violations = 0
        for unit in units:
            self.add(unit)

    def add(self, unit: WorkUnit, kind: str = "") -> None:
        """Take one more unit, for workers of a kind. Adding the same id again changes nothing."""
        if unit.id not in self._units:
            self._units[unit.id] = unit
            if kind:
                self._kinds[unit.id] = kind
            self._waiting(unit.id).append(unit.id)

    def lease(self, worker: str, kind: str = "") -> WorkUnit | None:
        """The next unit that waits for workers of that kind, now leased to `worker`; None if nothing waits."""
        waiting = self._queues[kind]
        while waiting:
            unit_id = waiting.popleft()
            if unit_id not in self._digests or unit_id in self._again:
                self._leases[unit_id] = worker
                return self._units[unit_id]
        return None

    def hold(self, worker: str, unit_id: str) -> None:
        """Note that `worker` has a unit already, as after a restart. Nothing happens if it is done."""
        waiting = self._waiting(unit_id)
        if unit_id in waiting:
            waiting.remove(unit_id)
            self._leases[unit_id] = worker
        else:
            self.hedge(worker, unit_id)

    def hedge(self, worker: str, unit_id: str) -> bool:
        """Lease a unit that another worker has to `worker` as well; False if it is not out, or hedged already."""
        holder = self._leases.get(unit_id)
        if holder is None or holder == worker or unit_id in self._hedges:
            return False
        self._hedges[unit_id] = worker
        return True

    def finish(self, unit_id: str, digest: str, worker: str = "") -> Outcome:
        """Bring a result, named by the digest of its bytes. Raises KeyError for a unit that was never planned."""
        if unit_id not in self._units:
            raise KeyError(f"unit {unit_id} is not in this ledger of {len(self._units)} units")
        if unit_id in self._digests:
            same = self._digests[unit_id] == digest
            if same and unit_id in self._again:
                self._again.discard(unit_id)
                self._take_back(unit_id)
                return Outcome.RESTORED
            self.duplicates += 1
            self.violations += not same
            return Outcome.DUPLICATE if same else Outcome.VIOLATION
        self._digests[unit_id], self._finishers[unit_id] = digest, worker
        self._take_back(unit_id)
        return Outcome.ACCEPTED

    def release(self, worker: str) -> tuple[str, ...]:
        """Take back what `worker` holds, because it is gone; returns the ids that nobody else has, now first in the
        queue."""
        held = [unit_id for unit_id, holder in self._leases.items() if holder == worker]
        held += [unit_id for unit_id, holder in self._hedges.items() if holder == worker]
        return tuple(reversed([unit_id for unit_id in reversed(held) if self.requeue(unit_id, worker)]))

    def requeue(self, unit_id: str, worker: str) -> bool:
        """Take one unit back from `worker`, who may live on; whether it waits now, for nobody else has it."""
        if self._hedges.get(unit_id) == worker:
            del self._hedges[unit_id]
        elif self._leases.get(unit_id) == worker:
            if unit_id in self._hedges:
                self._leases[unit_id] = self._hedges.pop(unit_id)
                return False
            del self._leases[unit_id]
            self._waiting(unit_id).appendleft(unit_id)
            self.requeued += 1
            return True
        return False

    def redo(self, unit_id: str) -> None:
        """Have a unit that is DONE done once more, because what it made is lost. Asking twice changes nothing."""
        if unit_id in self._digests and unit_id not in self._again:
            self._again.add(unit_id)
            waiting = self._waiting(unit_id)
            if unit_id in waiting:  # finished without a lease, from a journal
                waiting.remove(unit_id)
            waiting.appendleft(unit_id)
            self.requeued += 1

    def has(self, unit_id: str) -> bool:
        """Whether the unit's result is there."""
        return unit_id in self._digests

    def digest(self, unit_id: str) -> str:
        """Of the accepted result's bytes; empty if it is not there."""
        return self._digests.get(unit_id, "")

    def wants_again(self, unit_id: str) -> bool:
        """Whether the unit is DONE, but what it made is lost and must be made again."""
        return unit_id in self._again

    def finisher(self, unit_id: str) -> str:
        """Who brought the accepted result; empty if it is not there."""
        return self._finishers.get(unit_id, "")

    @property
    def all_out(self) -> bool:
        """Whether no unit waits for a worker."""
        return not any(self._queues.values())

    def __contains__(self, unit: WorkUnit) -> bool:
        return self._units.get(unit.id) == unit

    def __len__(self) -> int:
        return len(self._units)

    def _waiting(self, unit_id: str) -> deque[str]:
        """The queue that a unit is in while it waits."""
        return self._queues[self._kinds.get(unit_id, "")]

    def _take_back(self, unit_id: str) -> None:
        self._leases.pop(unit_id, None)
        self._hedges.pop(unit_id, None)

    @property
    def done(self) -> int:
        return len(self._digests)

    @property
    def complete(self) -> bool:
        return len(self._digests) == len(self._units)
