"""Counts invalid answers and decides whether the worker or the run is at fault.

A refused answer is a strike against its worker, and its unit is repeated. A worker with too many strikes is retired.
The run is at fault, and ends, in two cases:

- A second worker (a replacement counts as one) gives an invalid answer to the same unit, which has no accepted answer.
- The pool has only this worker, and it has never given a valid answer.
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
        """Id of a unit without an accepted answer → the first worker whose answer was refused."""

    def answered(self, worker: str) -> None:
        """Note a plausible answer."""
        self._right.add(worker)

    def accepted(self, unit: WorkUnit) -> None:
        """Forget refused answers to a unit, because one was accepted."""
        self._refused.pop(unit.id, None)

    def refuse(self, worker: str, unit: WorkUnit, reason: str, *, alone: bool) -> int:
        """Note a refused answer; returns the worker's strikes.

        Args:
            reason: why it was refused, as a sentence.
            alone: whether the worker is the only one of its pool.

        Raises RunError if the run is at fault.
        """
        before = self._refused.setdefault(unit.id, worker)
        if before != worker:
            raise RunError(f"{unit.describe()} was refused from {before} and from {worker}: {reason}")
        if alone and worker not in self._right:
            raise RunError(
                f"{unit.describe()} was refused from {worker}, the only worker of its pool, which never gave a valid "
                f"answer: {reason}"
            )
        self._counts[worker] += 1
        return self._counts[worker]
