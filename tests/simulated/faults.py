"""Faults of the simulated world, their times, and which of them a call meets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulated.processes import Call, Ref

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
HARMLESS = ("is slow", "cannot start", "lost its samples")
"""Those because of which no process may be lost."""


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


class Faults:
    """Those that have not happened yet, and what is counted for them."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._left = sorted(faults, key=lambda fault: fault.call)
        self.counts: Counter[str] = Counter()
        """Calls of actors by role; the controller's calls (``sent``), its blocking work and the disk's operations."""

    @property
    def left(self) -> tuple[Fault, ...]:
        return tuple(self._left)

    def counted(self, what: str) -> int:
        """Count one more; returns how many there are."""
        self.counts[what] += 1
        return self.counts[what]

    def hits(self, role: str, kind: str, count: int) -> bool:
        """Whether a fault is due; it is then over."""
        for fault in self._left:
            if (fault.role, fault.kind) == (role, kind) and fault.call <= count:
                self._left.remove(fault)
                return True
        return False

    def of_call(self, role: str, call: Call) -> str:
        """The kind of fault that the next call of a role's actors meets: the first that is due and can happen to it."""
        count = self.counted(role)
        for fault in self._left:
            if fault.role == role and fault.call <= count and _can_happen(fault.kind, call):
                self._left.remove(fault)
                return fault.kind
        return ""


def _can_happen(fault: str, call: Call) -> bool:
    if fault.startswith("answers"):
        return call.method in ("explore", "sample")
    if fault == "cannot start":
        return call.method == "start"
    if fault == "is never placed":
        return call.method == "node"
    if fault == "lost its samples":
        return call.parts == 2
    if fault == "loses its input":
        return any(isinstance(each, Ref) for each in call.arguments)
    return True
