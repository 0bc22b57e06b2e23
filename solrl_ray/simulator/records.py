"""Records of a simulated run: workers, open iterations, events, and the result of an iteration."""

from __future__ import annotations

from dataclasses import dataclass, field

from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.iteration_state import IterationState, IterationSummary
from solrl_ray.scheduling.worker_state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedIteration:
    """Seconds of one iteration; its parts are consecutive and add up to `seconds`."""

    seconds: float
    publish: float
    """Making and sending the revision, until units are handed out."""
    rollout: float
    """From there to the last group, including the wait for the revision's arrival."""
    explored: float
    """From the beginning of the rollout to the last result of a pool's unit, 0 if that came before; overlaps with
    regeneration.
    """
    update: float
    """Includes the remaining wait for the checkpoint, and for groups on their way to the disk."""
    busy: dict[str, float]
    """Busy seconds, summed over the workers of a role; for ``controller``, those of the rollout."""
    lost: int
    requeued: int
    """Units that went to another worker because theirs was lost."""
    hedged: int
    """Late units repeated by an idle worker."""
    closed: IterationSummary


@dataclass(slots=True)
class Worker:
    name: str
    device: str
    node: int
    factor: float
    """Its time for a unit, relative to the usual one."""
    dies: float
    state: State = State.STARTING
    loading: bool = False
    free: float = 0.0
    """When it has done all its units."""


@dataclass(slots=True)
class OpenIteration:
    """An open iteration."""

    state: IterationState
    explored: float
    """When the last result of a pool's unit came."""
    is_open: bool = False
    """Whether the selector has opened it."""
    early: list[Event] = field(default_factory=list)
    """Results that came before that, and wait for it."""
    held: list[WorkUnit] = field(default_factory=list)
    """Units of regeneration that wait until everything is explored."""

    @property
    def batch(self) -> str:
        return f"iteration {self.state.plan.iteration}"


@dataclass(frozen=True, slots=True)
class Event:
    kind: str
    """For a worker: ``started``, ``loaded``, ``done`` or ``lost``; for the selector: ``opened``, ``judged`` or
    ``assembled``; ``look``: it is time to look for late units.
    """
    worker: str = ""
    unit: WorkUnit | None = None
    number: int = 0
    """Number of the loaded revision or the opened iteration."""
    seconds: float = 0.0
    brought: tuple[Event, ...] = ()
    """The ``done`` events that are judged."""

    @property
    def of_group(self) -> bool:
        return self.unit is not None and self.unit.stage == "regenerate"
