"""How much of an iteration workers had nothing to do but get weights. Pure; times are seconds of a monotonic clock."""

from __future__ import annotations


class Waits:
    """Waits that ended, until they are asked for."""

    def __init__(self) -> None:
        self._ended: list[tuple[float, float]] = []

    def add(self, seconds: float, *, until: float) -> None:
        """Note that a worker waited for `seconds`, `until` it had proved the weights."""
        self._ended.append((until - seconds, until))

    def share(self, *, began: float, ended: float, workers: int) -> float:
        """Share of `workers` × (`ended` - `began`) that was waited, of what was noted since the last call.

        A wait that began earlier counts from `began` on.
        """
        waited = sum(max(0.0, until - max(since, began)) for since, until in self._ended)
        self._ended.clear()
        return waited / (workers * (ended - began)) if ended > began and workers else 0.0
