"""What a simulated run is made of: workers, open iterations, events; and what it tells of an iteration."""

from __future__ import annotations

from dataclasses import dataclass, field

from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.iteration_state import IterationState, IterationSummary
from solrl_ray.scheduling.worker_state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedIteration:
    """Seconds of one iteration; its parts follow one another and make up `seconds`."""

    seconds: float
    publish: float
    """Revision and sending it off, until units are handed out."""
    rollout: float
    """From there to the last group, the wait for the revision's arrival included."""
    explored: float
    """From the begin of the rollout to the last result of a pool's unit, 0 if that came before; regeneration overlaps
    with it."""
    update: float
    """With what is left to wait for the checkpoint, and for groups on their way to the disk."""
    busy: dict[str, float]
    """Seconds at work, summed over the workers of a role; of ``controller``, those of the rollout."""
    lost: int
    requeued: int
    """Units that were given to another worker because theirs was lost."""
    hedged: int
    """Units that an idle worker did as well, because they were late."""
    closed: IterationSummary


@dataclass(slots=True)
class Worker:
    name: str
    device: str
    node: int
    factor: float
    """Its time for a unit, in times of the usual one."""
    dies: float
    state: State = State.STARTING
    loading: bool = False
    free: float = 0.0
    """When it has done all units that it was given."""


@dataclass(slots=True)
class OpenIteration:
    """An iteration under way."""

    state: IterationState
    explored: float
    """When the last result of a pool's unit came."""
    is_open: bool = False
    """Whether the selector has opened it."""
    early: list[Event] = field(default_factory=list)
    """Results that came before that, and wait for it."""

    @property
    def batch(self) -> str:
        return f"iteration {self.state.plan.iteration}"


@dataclass(frozen=True, slots=True)
class Event:
    kind: str
    """Of a worker: ``started``, ``loaded``, ``done`` or ``lost``; of the selector: ``opened``, ``judged`` or
    ``assembled``; ``look``: it is time to look for late units."""
    worker: str = ""
    unit: WorkUnit | None = None
    number: int = 0
    """Of the revision that was loaded, or of the iteration that was opened."""
    seconds: float = 0.0
    brought: tuple[Event, ...] = ()
    """The ``done`` ones that are judged."""

    @property
    def of_group(self) -> bool:
        return self.unit is not None and self.unit.stage == "regenerate"
