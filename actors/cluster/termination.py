"""SIGTERM to a worker: it finishes its unit and refuses the next call with `Leaving`.

Ray's own handler would end the process in the middle of the unit. The fleet handles nodes that Ray drains; any other
sender of SIGTERM (a batch system, a person) kills the process later anyway.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

import ray

from solrl_ray.errors import Leaving

_told = threading.Event()


def listen() -> None:
    """From now on, note SIGTERM. Call it in the main thread. Does nothing outside an actor, where the process is not
    ours.
    """
    if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
        signal.signal(signal.SIGTERM, _note)


def check(worker: str) -> None:
    """Raises Leaving once SIGTERM has come."""
    if _told.is_set():
        raise Leaving(f"{worker} was told to end by SIGTERM")


def _note(number: int, frame: FrameType | None) -> None:
    _told.set()
