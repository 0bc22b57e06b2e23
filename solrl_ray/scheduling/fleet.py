"""States of a worker, as a pure machine: there is no way back from DEAD, and no way past proving the weights.

::

    STARTING ──started──► STALE ──proved──► READY ──outdated──► STALE
        │                   │                │
        │                   │                └──lent──► LENT ──returned──► STALE
        └───────────────────┴────────lost────┴────────────┴──────► DEAD

A replacement is a new worker with a name of its own; it enters at STARTING and must fetch and prove its policy
revision like everybody else before it gets work. So does one that was lent to an evaluation (`scheduling.lending`).
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    STARTING = "starting"
    STALE = "stale"
    READY = "ready"
    LENT = "lent"
    DEAD = "dead"


_TRANSITIONS: dict[tuple[State, str], State] = {
    (State.STARTING, "started"): State.STALE,
    (State.STALE, "proved"): State.READY,
    (State.READY, "outdated"): State.STALE,
    (State.STALE, "outdated"): State.STALE,
    (State.STARTING, "outdated"): State.STARTING,
    (State.READY, "lent"): State.LENT,
    (State.LENT, "outdated"): State.LENT,
    (State.LENT, "returned"): State.STALE,
    (State.LENT, "lost"): State.DEAD,
    (State.STARTING, "lost"): State.DEAD,
    (State.STALE, "lost"): State.DEAD,
    (State.READY, "lost"): State.DEAD,
}


def advance(state: State, event: str) -> State:
    """The state after `event`: ``started``, ``proved``, ``outdated``, ``lent``, ``returned`` or ``lost``.

    Raises ValueError if it is not allowed.
    """
    try:
        return _TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"a worker that is {state.value} cannot become {event}") from None


def role_of(name: str) -> str:
    """``explorer-2.1`` → ``explorer``."""
    return name.partition("-")[0]


def replacement_name(name: str) -> str:
    """Name of the worker that takes the place of `name`: ``explorer-2`` → ``explorer-2.1`` → ``explorer-2.2``."""
    slot, _, generation = name.partition(".")
    return f"{slot}.{int(generation or 0) + 1}"
