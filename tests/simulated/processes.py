"""What the simulated world keeps of processes, their actors, calls and values."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from actors.world import Process, Sent
from solrl_ray.errors import InputGone


class Ref:
    """A reference; its value exists once its maker has made it."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self.future = future
        self.lost = False
        self.seconds: float | None = None
        """Of an answer: the deadline that a wait for it must have."""

    @property
    def value(self) -> Any:
        """Raises InputGone if it is lost, or was never made."""
        if self.lost or not self.future.done() or self.future.cancelled() or self.future.exception() is not None:
            raise InputGone("an input", "an object it needs is lost")
        return self.future.result()


@dataclass(slots=True)
class Call:
    method: str
    arguments: tuple[Any, ...]
    parts: int
    sent: Sent


@dataclass(eq=False)
class Host:
    """A process, with one actor or with the roles of a card."""

    node: str
    process: Process
    inbox: asyncio.Queue[tuple[SimulatedActor, Call]] = field(default_factory=asyncio.Queue)
    actors: list[SimulatedActor] = field(default_factory=list)
    life: asyncio.Task[None] | None = None
    alive: bool = True
    cause: str = ""
    """A fault because of which the run may lose it."""


@dataclass(eq=False)
class SimulatedActor:
    """An actor, alive until it is killed."""

    name: str
    role: str
    player: Any
    """A plain object with the role's methods."""
    host: Host
    user: str
    """Its name at the disk."""
    waiting: list[Call] = field(default_factory=list)
    """Unanswered calls."""
    made: list[Ref] = field(default_factory=list)
    """Values that are lost with its node."""
    died: float | None = None
    """When, on the world's clock, if the controller did not kill it."""
    alive: bool = True
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a learner rank must leave the collective in which it waits."""
