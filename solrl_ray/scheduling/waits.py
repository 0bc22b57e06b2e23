"""Share of an iteration that workers spent only waiting for weights. Pure; times are seconds of a monotonic clock."""

from __future__ import annotations


class Waits:
    """Finished waits, until they are read."""

    def __init__(self) -> None:
        self._ended: list[tuple[float, float]] = []

    def add(self, seconds: float, *, until: float) -> None:
        """Note that a worker waited for `seconds`, `until` it had proved the weights."""
        self._ended.append((until - seconds, until))

    def share(self, *, began: float, ended: float, workers: int) -> float:
        """Share of `workers` × (`ended` - `began`) spent waiting, by the waits since the last call.

        A wait that began earlier counts from `began` on.
        """
        waited = sum(max(0.0, until - max(since, began)) for since, until in self._ended)
        self._ended.clear()
        return waited / (workers * (ended - began)) if ended > began and workers else 0.0
