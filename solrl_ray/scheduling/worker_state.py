"""The state machine of a worker, and the budget of replacements of a run. Pure.

DEAD is final, and READY requires proved weights.

::

    WAITING ──placed──► STARTING ──started──► STALE ──proved──► READY ──outdated──► STALE
    any of these ──leave──► DRAINING            finishes its units, gets no more
    any of these, and DRAINING ──lost──► DEAD

A replacement is a new worker with its own name. It starts in WAITING, until the cluster has a place for it, and must
fetch and prove its policy revision before it gets work.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

from solrl_ray.errors import RunError


class State(Enum):
    WAITING = "waiting"
    STARTING = "starting"
    STALE = "stale"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


_TRANSITIONS: dict[tuple[State, str], State] = {
    (State.WAITING, "placed"): State.STARTING,
    (State.STARTING, "started"): State.STALE,
    (State.STALE, "proved"): State.READY,
    (State.READY, "outdated"): State.STALE,
    (State.STALE, "outdated"): State.STALE,
    (State.STARTING, "outdated"): State.STARTING,
    (State.WAITING, "outdated"): State.WAITING,
    **{(State.DRAINING, event): State.DRAINING for event in ("placed", "started", "proved", "outdated")},
    **{(state, "leave"): State.DRAINING for state in State if state is not State.DEAD},
    **{(state, "lost"): State.DEAD for state in State if state is not State.DEAD},
}


def advance(state: State, event: str) -> State:
    """The state after ``placed``, ``started``, ``proved``, ``outdated``, ``leave`` or ``lost``.

    Raises ValueError if `event` is not allowed in `state`.
    """
    try:
        return _TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"a worker that is {state.value} cannot become {event}") from None


def role_of(name: str) -> str:
    """``explorer-2.1`` → ``explorer``."""
    return name.partition("-")[0]


def pool_of(name: str) -> str:
    """``explorer-2.1`` → ``explorers``, as in `config.pools`."""
    return f"{role_of(name)}s"


def worker_name(pool: str, slot: int) -> str:
    """The worker in slot 2 of ``explorers``: ``explorer-2``."""
    return f"{pool.removesuffix('s')}-{slot}"


def slot_of(name: str) -> int:
    """``explorer-2.1`` → 2."""
    return int(name.partition("-")[2].partition(".")[0])


def replacement_name(name: str) -> str:
    """Name of the replacement of `name`: ``explorer-2`` → ``explorer-2.1`` → ``explorer-2.2``."""
    slot, _, generation = name.partition(".")
    return f"{slot}.{int(generation or 0) + 1}"


def leavers(states: Mapping[str, State], count: int, on_cards: Collection[str] = ()) -> list[str]:
    """The `count` workers of a pool that should leave; empty if `count` is below 0, when the pool should grow.

    First those that still wait for a place, then the newest slots. Workers on the GPUs of learner ranks (`on_cards`)
    come last: removing them frees no GPU, and other workers may need larger transfers.
    """
    staying = [name for name, state in states.items() if state not in (State.DRAINING, State.DEAD)]
    return sorted(staying, key=lambda name: (name in on_cards, states[name] is not State.WAITING, -slot_of(name)))[
        : max(0, count)
    ]


class Replacements:
    """Budget of replacements in this run, over all pools. A fleet that keeps dying needs a diagnosis, not retries."""

    def __init__(self, total: int) -> None:
        self.left = self.total = self._excuses = total

    def excuse(self) -> bool:
        """Whether a loss that is no fault of the worker, such as a cut network, is free: as many as there are
        replacements are. A node that is cut again and again must use up the budget.
        """
        self._excuses -= 1
        return self._excuses >= 0

    def spend(self, worker: str, reason: str) -> None:
        """Use one replacement. Raises RunError if none is left."""
        if self.left == 0:
            raise RunError(
                f"{worker} was lost ({reason}), and all {self.total} replacements of fleet.max_replacements are used"
            )
        self.left -= 1
