"""SIGTERM to a worker: it finishes the unit that it is at, and refuses the next call with `Leaving`.

Ray's own handler would end the process in the middle of the unit. Who sends it without more (a batch system that takes
its nodes back, a person) ends the process later anyway; a node that Ray drains is the fleet's business.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

import ray

from solrl_ray.errors import Leaving

_told = threading.Event()


def listen() -> None:
    """From now on SIGTERM is noted. Nothing happens outside of an actor, whose process is not ours."""
    if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
        signal.signal(signal.SIGTERM, _note)


def check(worker: str) -> None:
    """Raises Leaving once SIGTERM has come."""
    if _told.is_set():
        raise Leaving(f"{worker} was told to end by SIGTERM")


def _note(number: int, frame: FrameType | None) -> None:
    _told.set()
