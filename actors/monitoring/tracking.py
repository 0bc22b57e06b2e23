"""Sends metrics to W&B and trackio. Each tracker has a queue and a task, so that none can delay the run.

A tracker that fails or hangs causes one message, and the run continues without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from actors.cluster.wait import first_line
from actors.world import MetricsWriter, World
from solrl_ray.config.schema import Config

Work = Callable[[MetricsWriter], None]
T = TypeVar("T")


class Tracking:
    def __init__(self, config: Config, folder: Path, world: World, tell: Callable[[str], None]) -> None:
        names = dict.fromkeys(config.tracking.trackers)
        self._trackers = [_Tracker(name, config, folder, world, tell) for name in names]
        self._seconds = config.fleet.deadlines.tracking

    async def keep(self) -> None:
        """Pass queued work to the trackers until they are closed; runs as a task."""
        await asyncio.gather(*(tracker.follow() for tracker in self._trackers))

    def bring(self, work: Work) -> None:
        """Queue `work` for each tracker that has not failed. Each tracker does its work in order."""
        for tracker in self._trackers:
            tracker.put(work)

    @property
    def open(self) -> list[str]:
        """Names of the trackers that have neither failed nor finished."""
        return [tracker.name for tracker in self._trackers if not tracker.is_over]

    async def close(self) -> None:
        """Wait until the trackers have everything, at most until the deadline `fleet.deadlines.tracking`."""
        await asyncio.gather(*(tracker.close(self._seconds) for tracker in self._trackers))


class _Tracker:
    def __init__(self, name: str, config: Config, folder: Path, world: World, tell: Callable[[str], None]) -> None:
        self.name, self._config, self._folder = name, config, folder
        self._world, self._report = world, tell
        self._queue: asyncio.Queue[Work | None] = asyncio.Queue()
        """Work to do; None marks the end."""
        self._over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def put(self, work: Work | None) -> None:
        if not self.is_over:
            self._queue.put_nowait(work)

    async def follow(self) -> None:
        try:
            writer = await self._blocking(self._open, "opening")
            while (work := await self._queue.get()) is not None:
                await self._blocking(lambda: work(writer), "writing to")
            await self._blocking(writer.close, "closing")
        except Exception as error:  # any error: the run continues without this tracker
            self._give_up(first_line(error))
        self._over.set()

    def _open(self) -> MetricsWriter:
        return self._world.tracker(self.name, self._config, self._folder)

    async def close(self, seconds: float) -> None:
        self.put(None)
        try:
            async with asyncio.timeout(seconds) as limit:
                await self._over.wait()
        except TimeoutError:
            if not limit.expired():
                raise
            self._give_up(f"it had not finished {seconds:g} s (fleet.deadlines.tracking) after the end of the run")

    def _give_up(self, reason: str) -> None:
        if not self.is_over:
            self._over.set()
            self._queue = asyncio.Queue()  # free the queued images, which are large
            self._report(f"warning: {self.name} failed, and the run goes on without it: {reason}")

    async def _blocking(self, work: Callable[[], T], what: str) -> T:
        seconds = self._config.fleet.deadlines.tracking
        return await self._world.blocking(work, f"{what} {self.name} (fleet.deadlines.tracking)", seconds)
