"""Who is in a pool, and what users and metrics are told of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from actors.fleet.member import Member
from solrl_ray.scheduling.hedging import Out
from solrl_ray.scheduling.worker_state import State


class Roll:
    def __init__(self, members: Mapping[str, Member]) -> None:
        """`members`: by name, as they are at any time."""
        self._members = members

    def lives(self) -> dict[str, State]:
        """Worker → state of its life."""
        return {name: member.state for name, member in self._members.items()}

    def states(self) -> dict[str, str]:
        """Worker → what it does, in words."""
        return {name: member.words() for name, member in self._members.items()}

    def tiers(self) -> dict[str, int]:
        """Tier → members that attested it."""
        return dict(Counter(member.tier for member in self._members.values() if member.tier))

    def warmed(self) -> tuple[int, int]:
        """Shapes for which the members' forwards are compiled, and for which they will be; 0 of 0 if none is."""
        shapes = sum(member.warm_ups for member in self._members.values())
        return shapes - sum(member.count("warm-up") for member in self._members.values()), shapes

    def census(self) -> dict[str, int]:
        """State of a life → workers in it; every state but that of the dead, who are no members."""
        counts = Counter(member.state for member in self._members.values())
        return {state.value: counts[state] for state in State if state is not State.DEAD}

    def idle(self) -> list[str]:
        """Workers that may take a unit and have nothing to do."""
        return [name for name, member in self._members.items() if member.state is State.READY and not member.calls]

    def out(self) -> list[Out]:
        """What each worker holds, and since when it has been at the first of it."""
        now = time.monotonic()
        return [Out(n, tuple(m.held), now - m.turn_since) for n, m in self._members.items() if m.units]

    @property
    def at_work(self) -> int:
        """Workers that have a place and are not leaving."""
        return sum(member.state not in (State.WAITING, State.DRAINING) for member in self._members.values())
