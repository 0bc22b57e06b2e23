"""One worker of a pool, as its pool knows it, and the calls that it has not answered."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.worker_state import State

_WORDS = {State.WAITING: "waiting for a place"}


@dataclass(slots=True)
class Call:
    kind: str
    deadline: float
    seconds: float
    unit: WorkUnit | None = None
    publication: str = ""
    large: Any = None


@dataclass(slots=True)
class Member:
    name: str
    handle: Any
    opened: float
    state: State = State.WAITING
    node: str = ""
    """Id of the node that it was placed on."""
    overdue: bool = False
    """Whether it has been said that it found no place in time."""
    tier: str = ""
    """What it attested."""
    warm_ups: int = 0
    """Shapes of its forward for which it compiles before anything else."""
    cold: int = 0
    """As many shapes, of a worker that started before there was a revision to warm up for."""
    proved: bool = False
    """Whether it ever held a revision, which a delta may be against."""
    guest: float = 0.0
    """Of one that is or was lent, until it holds a revision of its run again: the longest that its borrower's call may
    take, seconds."""
    calls: dict[Any, Call] = field(default_factory=dict)
    """In flight; `add` and `take` change them."""
    units: int = field(default=0, init=False)
    """How many of them are units."""
    idle_since: float = 0.0
    """Since when it waits for weights, if it does."""
    turn_since: float = 0.0
    """Since when it has been at the first of its units, if it has any."""

    @property
    def held(self) -> list[WorkUnit]:
        """Its units, in the order in which it does them."""
        return [call.unit for call in self.calls.values() if call.unit]

    def add(self, ref: Any, call: Call) -> None:
        self.calls[ref] = call
        self.units += call.unit is not None

    def take(self, ref: Any) -> Call:
        """A call that is answered."""
        call = self.calls.pop(ref)
        self.units -= call.unit is not None
        return call

    @property
    def holds(self) -> bool:
        """Whether it has something to finish: its units, or what it did for its borrower when it was taken back."""
        return bool(self.units or (self.guest and self.count("load")))

    def loading(self) -> float:
        """Seconds that a load under way may still take."""
        left = [call.deadline - time.monotonic() for call in self.calls.values() if call.kind == "load"]
        return max([0.0, *left])

    def count(self, kind: str) -> int:
        """Calls in flight of a kind."""
        return sum(call.kind == kind for call in self.calls.values())

    def words(self) -> str:
        """What it does."""
        if left := self.count("warm-up"):
            return f"warming up {self.warm_ups - left + 1} of {self.warm_ups} shapes"
        if not self.held:
            return _WORDS.get(self.state, self.state.value)
        words = f"{self.held[0].stage} {self.held[0].prompt_id[:6]}"
        return f"{words}, then leaves" if self.state is State.DRAINING else words
