"""Exports the metrics of `solrl_ray.metrics.instruments` with `ray.util.metrics`, from one process of a run."""

from __future__ import annotations

import asyncio

from ray.util.metrics import Counter, Gauge, Histogram

from solrl_ray.metrics.instruments import INSTRUMENTS, SECONDS, Instrument

REFRESH_SECONDS = 5.0
"""Seconds between two refreshes of all gauges: Ray drops a gauge that was not set for about 20 s."""


class PrometheusExporter:
    """Implements `actors.world.Exporter`. Ray's agent on the node exposes changes about 10 s later."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        """Name and tags → last value."""
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
        """Increase a counter. A value of 0 is skipped, because Ray's counters refuse it."""
        if value > 0:
            self._metrics[name].inc(value, tags=self._tags(name, tags))

    def observe(self, name: str, value: float, **tags: str) -> None:
        self._metrics[name].observe(value, tags=self._tags(name, tags))

    def _refresh(self) -> None:
        """Set every gauge again, every `REFRESH_SECONDS` until the event loop ends."""
        for (name, tags), value in self._gauges.items():
            self._metrics[name].set(value, tags=self._tags(name, dict(tags)))
        asyncio.get_running_loop().call_later(REFRESH_SECONDS, self._refresh)

    def _tags(self, name: str, tags: dict[str, str]) -> dict[str, str]:
        """Add the run's name to the tags. Raises ValueError unless the tags are those of the metric: Ray would export a
        missing one as empty.
        """
        if set(tags) != set(self._tag_names[name]):
            raise ValueError(f"{name} needs the tags {self._tag_names[name]}, got {tuple(tags)}")
        return {"run": self._run, **tags}


def _made(entry: Instrument) -> Counter | Gauge | Histogram:
    keys = ("run", *entry.tags)
    if entry.kind == "histogram":
        return Histogram(entry.name, description=entry.meaning, boundaries=list(SECONDS), tag_keys=keys)
    kind = Counter if entry.kind == "counter" else Gauge
    return kind(entry.name, description=entry.meaning, tag_keys=keys)
