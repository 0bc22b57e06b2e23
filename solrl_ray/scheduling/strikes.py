"""Answers that cannot be right: whether the worker or the run is at fault.

A refused answer is a strike against its worker, and its unit is repeated. A worker with too many strikes is retired.
The run is at fault, and ends, when a second worker (a replacement counts as one) gives nonsense for the same unit, no
answer to which was accepted; or when there is no other worker and this one has never been right.
"""

from __future__ import annotations

from collections import Counter

from solrl_ray.errors import RunError
from solrl_ray.records import WorkUnit


class Strikes:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._right: set[str] = set()
        self._refused: dict[str, str] = {}
        """Id of a unit without an accepted answer → the worker whose answer was refused."""

    def answered(self, worker: str) -> None:
        """Note an answer that may be right."""
        self._right.add(worker)

    def accepted(self, unit: WorkUnit) -> None:
        """Forget who was refused before an answer to the unit was accepted."""
        self._refused.pop(unit.id, None)

    def refuse(self, worker: str, unit: WorkUnit, reason: str, *, alone: bool) -> int:
        """Note a refused answer; returns the worker's strikes.

        Args:
            reason: what is wrong with it, as a sentence.
            alone: whether the worker's pool has no other worker.

        Raises RunError: the run is at fault.
        """
        before = self._refused.setdefault(unit.id, worker)
        if before != worker:
            raise RunError(f"{unit.describe()} was refused from {before} and from {worker}: {reason}")
        if alone and worker not in self._right:
            raise RunError(f"{unit.describe()} was refused from {worker}, which is alone and was never right: {reason}")
        self._counts[worker] += 1
        return self._counts[worker]
