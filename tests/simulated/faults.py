"""Faults of the simulated world, and their times."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "dies before": "the process ends before it does the call",
    "dies after": "the process ends when the call is done, and its answer is lost",
    "dies before, and a line is damaged": "and on its disk, a line of an open journal has another byte",
    "hangs": "the call is never done",
    "hangs after": "the call is done, and never answered",
    "is slow": "the call takes nearly as long as its deadline allows",
    "is late": "the call takes a thousand times as long, which is later than every deadline",
    "comes twice": "the message comes twice: the call is done again, and its first answer counts",
    "answers NaN": "the rewards are not finite",
    "answers another unit": "the answer is of another unit than was asked for",
    "answers another revision": "the answer is of another revision than was asked for",
    "loses its input": "an object that the call is given is gone",
    "cannot start": "the start raises an error",
    "is never placed": "there is no room for it",
    "lost its samples": "what it made went down with its node",
    "dies": "the controller ends, with the machine of its disk; or a node, with all actors that are on it",
    "drains": "a node is about to go, and dies after a while",
    "dies beside the disk": "the controller ends before or after work that it has given to a thread",
    "hangs at the disk": "work that the controller has given to a thread never returns",
    "loses power": "the process that uses the disk ends in the middle of an operation, with the machine",
    "loses power and a block": "and afterwards a file of the newest checkpoint cannot be read, or it or a journal has "
    "another byte",
    "is full": "the disk takes no more bytes",
}
"""Possible faults of an actor's call, the controller, a node, or the disk."""


@dataclass(frozen=True, slots=True)
class Fault:
    role: str
    """An actor's role; or ``controller``, ``node``, ``disk``."""
    call: int
    """Affects the first possible call from this number on. Counted are calls of actors of the role; the controller's
    calls (``dies`` of controller or node); its blocking work; operations of the disk.
    """
    kind: str
    """A key of `KINDS`."""

    def __str__(self) -> str:
        return f"{self.role} {self.kind} (call {self.call})"
