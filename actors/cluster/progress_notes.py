"""Tells the controller what an actor does during a long call.

An actor that loads a model cannot answer meanwhile. A thread beside the call polls
`solrl_ray.common.progress_note` and sends each change. It does not wait for a reply.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from solrl_ray.common import progress_note

LOOK_SECONDS = 0.5
"""Seconds between two polls."""
REPEAT_SECONDS = 5.0
"""Seconds after which an unchanged note is sent again. A note that is not repeated for some of these is out of date."""

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

_receiver: tuple[str, str, str] | None = None
"""This actor's name; name and namespace of the actor that gets its notes."""


def send_to(receiver: str, namespace: str, *, name: str) -> None:
    """From now on, send this actor's notes to the method ``note`` of the actor `receiver`, under `name`."""
    global _receiver
    _receiver = name, receiver, namespace


def speak_as(name: str) -> None:
    """Send notes under another name: that of the role that is called."""
    global _receiver
    if _receiver is not None:
        _receiver = name, *_receiver[1:]


def noted(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate an actor's method so that its progress is sent while it runs."""

    @functools.wraps(method)
    def call(self: S, *arguments: P.args, **keywords: P.kwargs) -> T:
        if _receiver is None:
            return method(self, *arguments, **keywords)
        ended = threading.Event()
        beside = threading.Thread(target=_tell, args=(*_receiver, ended), name="progress notes", daemon=True)
        beside.start()
        try:
            return method(self, *arguments, **keywords)
        finally:
            ended.set()
            beside.join(LOOK_SECONDS)  # the last note says that the call is over

    return call


def _tell(name: str, receiver: str, namespace: str, ended: threading.Event) -> None:
    try:
        actor: Any = ray.get_actor(receiver, namespace=namespace)
    except ValueError:  # the receiver is gone, and this actor will end too
        return
    told, when = "", 0.0
    while not ended.is_set():
        words = progress_note.now()
        if words != told or (words and time.monotonic() - when > REPEAT_SECONDS):
            actor.note.remote(name, words)
            told, when = words, time.monotonic()
        ended.wait(LOOK_SECONDS)
    if told:
        actor.note.remote(name, "")
