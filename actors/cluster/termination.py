"""Handles SIGTERM in a worker: it finishes its unit and refuses the next call with `Leaving`.

Ray's handler would end the process in the middle of the unit. Nodes that Ray drains are handled by the fleet. Any other
sender of SIGTERM, such as a batch system or a user, kills the process later anyway.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

import ray

from solrl_ray.errors import Leaving

_received = threading.Event()


def listen() -> None:
    """Install the handler for SIGTERM. Call it in the main thread. Does nothing outside an actor, where the process is
    not ours.
    """
    if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
        signal.signal(signal.SIGTERM, _on_sigterm)


def check(worker: str) -> None:
    """Raises Leaving once SIGTERM has arrived."""
    if _received.is_set():
        raise Leaving(f"{worker} received SIGTERM")


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    _received.set()
