"""How long workers of a pool wait for a place in the cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping

from actors.fleet.events import Event, Unplaced
from actors.fleet.member import Member
from solrl_ray.config.schema import Deadlines
from solrl_ray.errors import RunError
from solrl_ray.scheduling.worker_state import State


class Places:
    def __init__(self, members: Mapping[str, Member], deadlines: Deadlines) -> None:
        """`members`: by name, as they are at any time."""
        self._members = members
        self._patience = deadlines.resources + deadlines.start
        self._placed = time.monotonic()
        """When somebody was last seen to have a place."""

    def late(self, now: float) -> list[Event]:
        """Who has waited for too long, each once. Raises RunError if nobody else is there."""
        patience = self._patience
        homeless = {name: member for name, member in self._members.items() if member.state is State.WAITING}
        if not homeless or len(homeless) < len(self._members):
            self._placed = now
        elif now - max(self._placed, min(m.opened for m in homeless.values())) > patience:
            raise RunError(
                f"{', '.join(homeless)} found no room in the cluster within {patience:g} s (fleet.deadlines.resources "
                f"and .start), and no other worker of the pool is left; add nodes or ask for less"
            )
        late = {name: m for name, m in homeless.items() if not m.overdue and now - m.opened > patience}
        for member in late.values():
            member.overdue = True
        return [Unplaced(name, patience) for name in late]
