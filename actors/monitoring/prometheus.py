"""The instruments of `solrl_ray.metrics.instruments` on `ray.util.metrics`; one process of a run exports all."""

from __future__ import annotations

import asyncio

from ray.util.metrics import Counter, Gauge, Histogram

from solrl_ray.metrics.instruments import INSTRUMENTS, SECONDS, Instrument

REFRESH_SECONDS = 5.0
"""Seconds between two refreshes of all gauges: Ray forgets a gauge that was not set for about 20 s."""


class PrometheusExporter:
    """Sets, adds and observes by name. Ray's agent on the node shows changes about ten seconds later."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        """Last values, by name and tags."""
        self._refreshes = False
        self._metrics = {entry.name: _made(entry) for entry in INSTRUMENTS}
        self._tag_names = {entry.name: entry.tags for entry in INSTRUMENTS}

    def set(self, name: str, value: float, **tags: str) -> None:
        self._metrics[name].set(value, tags=self._tags(name, tags))
        self._gauges[name, tuple(tags.items())] = value
        if not self._refreshes:
            self._refreshes = True
            asyncio.get_running_loop().call_later(REFRESH_SECONDS, self._refresh)

    def add(self, name: str, value: float, **tags: str) -> None:
        """A value of 0 is skipped: Ray's counters refuse it."""
        if value > 0:
            self._metrics[name].inc(value, tags=self._tags(name, tags))

    def observe(self, name: str, value: float, **tags: str) -> None:
        self._metrics[name].observe(value, tags=self._tags(name, tags))

    def _refresh(self) -> None:
        """Set every gauge again, regularly until the event loop ends."""
        for (name, tags), value in self._gauges.items():
            self._metrics[name].set(value, tags=self._tags(name, dict(tags)))
        asyncio.get_running_loop().call_later(REFRESH_SECONDS, self._refresh)

    def _tags(self, name: str, tags: dict[str, str]) -> dict[str, str]:
        """Raises ValueError unless the tags are those of the table: a missing one would be exported as empty."""
        if set(tags) != set(self._tag_names[name]):
            raise ValueError(f"{name} has the tags {self._tag_names[name]}, it was given {tuple(tags)}")
        return {"run": self._run, **tags}


def _made(entry: Instrument) -> Counter | Gauge | Histogram:
    keys = ("run", *entry.tags)
    if entry.kind == "histogram":
        return Histogram(entry.name, description=entry.meaning, boundaries=list(SECONDS), tag_keys=keys)
    kind = Counter if entry.kind == "counter" else Gauge
    return kind(entry.name, description=entry.meaning, tag_keys=keys)
