"""What happens in a pool of workers, as its owner is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from solrl_ray.records import Attestation, Receipt, WorkUnit


@dataclass(frozen=True, slots=True)
class Started:
    worker: str
    attestation: Attestation


@dataclass(frozen=True, slots=True)
class Warmed:
    """A worker has compiled its forward for one more shape."""

    worker: str
    left: int
    """Shapes that it has still to compile for, before it loads a revision."""


@dataclass(frozen=True, slots=True)
class Loaded:
    worker: str
    receipt: Receipt
    waited: float
    """Seconds that the worker had nothing to do but get these weights."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker could not take a revision as it was sent; it has been sent the whole of it."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    worker: str
    unit: WorkUnit
    value: Any
    """The answer; its small part, if the call returns two."""
    large: Any = None
    """Reference of the large part of an answer, which stays where it was made."""


@dataclass(frozen=True, slots=True)
class Nonsense:
    """A worker came upon something that cannot be right, and has no answer to a unit."""

    worker: str
    unit: WorkUnit
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    worker: str
    reason: str
    replacement: str
    """Empty for one that was leaving."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """A worker that came to others at work could not start, or would work otherwise than they do; it was ended."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Left:
    """A worker that was to leave has finished what it held, and is gone."""

    worker: str


@dataclass(frozen=True, slots=True)
class Unplaced:
    """The cluster has had no room for a worker for so long; it goes on waiting, and the others at their work."""

    worker: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Rested:
    """A worker has given back the GPU memory that it kept for later."""

    worker: str
    freed: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Lent:
    """A worker knows that it is lent."""

    worker: str


Event = Started | Warmed | Loaded | Refused | Done | Nonsense | Lost | Unfit | Left | Unplaced | Rested | Lent
Work = Done | Nonsense | Lost
"""What matters to whoever hands out units."""
