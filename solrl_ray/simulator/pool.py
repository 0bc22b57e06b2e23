"""The workers of a simulated run, and who of them takes the next unit. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from solrl_ray.scheduling.worker_state import State


@dataclass(slots=True)
class SimulatedWorker:
    name: str
    device: str
    node: int
    factor: float
    dies: float
    state: State = State.STARTING
    units: int = 0


@dataclass(slots=True)
class SimulatedPool:
    role: str
    revision: int = 0
    """The one that it was sent last."""
    members: dict[str, SimulatedWorker] = field(default_factory=dict)
    free: list[tuple[int, str]] = field(default_factory=list)
    """A heap of (units held, name), with outdated entries in it."""

    def settle(self, member: SimulatedWorker, max_inflight: int) -> None:
        """Note a member whose state or units have changed."""
        if member.state is State.READY and member.units < max_inflight:
            heapq.heappush(self.free, (member.units, member.name))

    def slot(self, max_inflight: int) -> str | None:
        """Who takes the next unit: the least busy, by name, as in `actors.fleet.pool.Pool.slots`; None if all full."""
        while self.free:
            units, name = self.free[0]
            member = self.members.get(name)
            if member is not None and member.state is State.READY and member.units == units:
                return name if units < max_inflight else None
            heapq.heappop(self.free)
        return None
