"""Whose turn it is on shared GPUs (docs/decisions/turns-on-a-shared-gpu.md).

::

    learners ──open──► a stage that wants the turn ──it is quiet, and the other one wants the turn──► the other stage
       ▲                             │   ▲                                                                    │
       └───────────take──────────────┘   └────────────────────────────────────────────────────────────────────┘

A stage is the pools that have weights on the GPUs at the same time: explorers and regenerators together with
`fleet.sharing: lay_down`, each alone with ``one_at_a_time``. It is quiet when none of its workers has a unit, starts or
loads weights, and no unit waits that they could do. A turn begins after the workers of the last one have given their
memory back. With ``keep`` every pool has the turn always.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from solrl_ray.config.fleet import FleetConfig
from solrl_ray.config.pools import lays_down, stages


class SharingPool(Protocol):
    """A pool that shares GPUs; `actors.fleet.pool.Pool` is one."""

    @property
    def wants_turn(self) -> bool: ...

    @property
    def is_quiet(self) -> bool: ...

    async def release_gpu_memory(self) -> None: ...

    def wake(self) -> None: ...


class _Stage:
    def __init__(self, names: Sequence[str], pools: Mapping[str, SharingPool]) -> None:
        self.names, self._by_name = names, pools
        self.turn = asyncio.Event()
        """Whether its workers may have their weights on the GPU."""

    @property
    def pools(self) -> list[SharingPool]:
        return [self._by_name[name] for name in self.names]

    async def release_gpu_memory(self) -> None:
        await asyncio.gather(*[pool.release_gpu_memory() for pool in self.pools])


class Turns:
    def __init__(self, fleet: FleetConfig, pools: Mapping[str, SharingPool]) -> None:
        """`pools`: all by name; may be filled later, because pools need `turn_of`."""
        self.lays_down = lays_down(fleet)
        """Whether workers also give up their weights' memory between turns."""
        self._stages = [_Stage(names, pools) for names in stages(fleet)]
        self.alternate = len(self._stages) > 1
        """Whether stages have separate turns, which `keep_passing_on` must give."""
        self._holder: _Stage | None = None
        """The stage that has the turn; None: the learners have it, or no stage yet."""
        self._learners = self.lays_down
        """Whether it is the learners' turn; they have the first one."""
        self._always = asyncio.Event()
        self._always.set()
        if not self.lays_down:
            for stage in self._stages:
                stage.turn.set()
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()
        """Held while a turn ends, so that learners cannot take theirs while it passes between stages."""

    def turn_of(self, pool: str) -> asyncio.Event:
        """Set while workers of a pool may have weights on their GPUs."""
        return next((stage.turn for stage in self._stages if pool in stage.names), self._always)

    async def take(self) -> None:
        """Begin the learners' turn: return when the workers on their GPUs have given back memory. If they lay down
        weights, they take no memory or units until `open`.

        A worker that does not answer in time is replaced, which frees its memory.
        """
        if not self.lays_down:
            await asyncio.gather(*[stage.release_gpu_memory() for stage in self._stages])
            return
        async with self._lock:
            self._learners = True
            await self._end()

    async def open(self) -> None:
        """End the learners' turn."""
        async with self._lock:
            if self._learners:
                self._learners = False
                if not self.alternate:  # no other stage could want it
                    self._begin(self._stages[0])
        self.look()

    def look(self) -> None:
        """Soon check which stage should have the turn, because a worker or a unit has changed."""
        self._changed.set()

    async def keep_passing_on(self) -> None:
        """Pass the turn between stages until the run ends."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            async with self._lock:
                following = self._next()
                if following is not None:
                    await self._end()
                    self._begin(following)

    def _next(self) -> _Stage | None:
        """The stage that should get the turn now; None: no change."""
        if self._learners or (self._holder and not all(pool.is_quiet for pool in self._holder.pools)):
            return None
        others = (stage for stage in self._stages if stage is not self._holder)
        return next((stage for stage in others if any(pool.wants_turn for pool in stage.pools)), None)

    async def _end(self) -> None:
        """Return once the stage with the turn has given its memory back."""
        if self._holder is not None:
            ended, self._holder = self._holder, None
            ended.turn.clear()
            await ended.release_gpu_memory()

    def _begin(self, stage: _Stage) -> None:
        self._holder = stage
        stage.turn.set()
        for pool in stage.pools:
            pool.wake()
