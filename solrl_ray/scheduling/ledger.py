"""Decides which results of an iteration's units count. Pure.

It only judges results; `scheduling.dispatcher` assigns units to workers.

Life of a unit::

    OPEN ──finish──► DONE ──redo──► AGAIN ──finish, same bytes──► DONE
                     first result wins      its output is lost

Invariants:

- The result of a DONE unit never changes, not even when the unit is repeated.
- A later result of a DONE unit is a duplicate. A duplicate with other bytes is counted as a violation.

>>> from solrl_ray.records import WorkUnit
>>> unit = WorkUnit(stage="explore", iteration=0, revision=0, prompt_id="p", indices=(0, 1))
>>> ledger = Ledger([unit])
>>> ledger.finish(unit.id, "digest", "explorer-0")
<Outcome.ACCEPTED: 'accepted'>
>>> ledger.finish(unit.id, "other digest", "explorer-1")
<Outcome.VIOLATION: 'violation'>
>>> ledger.complete
True
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from solrl_ray.records import WorkUnit


class Outcome(Enum):
    """The ledger's verdict on a result."""

    ACCEPTED = "accepted"
    RESTORED = "restored"
    """The output was lost, and a repetition gave the same bytes."""
    DUPLICATE = "duplicate"
    VIOLATION = "violation"
    """A duplicate whose bytes differ from the accepted result: something is not deterministic."""


class Ledger:
    """Units and their accepted results, in the order in which the units were added."""

    def __init__(self, units: Iterable[WorkUnit] = ()) -> None:
        self._units: dict[str, WorkUnit] = {}
        self._digests: dict[str, str] = {}
        self._workers: dict[str, str] = {}
        self._again: set[str] = set()
        self.duplicates = 0
        self.violations = 0
        for unit in units:
            self.add(unit)

    def add(self, unit: WorkUnit) -> None:
        """Add a unit. Adding the same id again changes nothing."""
        self._units.setdefault(unit.id, unit)

    def finish(self, unit_id: str, digest: str, worker: str = "") -> Outcome:
        """Record a result by the digest of its bytes. Raises KeyError for a unit that was never added."""
        if unit_id not in self._units:
            raise KeyError(f"unit {unit_id} is not in this ledger of {len(self._units)} units")
        if unit_id in self._digests:
            same = self._digests[unit_id] == digest
            if same and unit_id in self._again:
                self._again.discard(unit_id)
                return Outcome.RESTORED
            self.duplicates += 1
            self.violations += not same
            return Outcome.DUPLICATE if same else Outcome.VIOLATION
        self._digests[unit_id], self._workers[unit_id] = digest, worker
        return Outcome.ACCEPTED

    def redo(self, unit_id: str) -> None:
        """Repeat a DONE unit, because its output is lost. A second call changes nothing."""
        if unit_id in self._digests:
            self._again.add(unit_id)

    def wants(self, unit_id: str) -> bool:
        """Whether the unit must be done: it has no result, or its output is lost."""
        return unit_id not in self._digests or unit_id in self._again

    def wants_again(self, unit_id: str) -> bool:
        """Whether the unit is DONE but its output is lost, so that it must be repeated."""
        return unit_id in self._again

    def wanted(self) -> list[WorkUnit]:
        """All units that must be done."""
        return [unit for unit in self._units.values() if self.wants(unit.id)]

    def digest(self, unit_id: str) -> str:
        """Digest of the accepted result; empty if there is none."""
        return self._digests.get(unit_id, "")

    def finisher(self, unit_id: str) -> str:
        """Worker of the accepted result; empty if there is none."""
        return self._workers.get(unit_id, "")

    @property
    def complete(self) -> bool:
        return len(self._digests) == len(self._units)
