"""Progress notes: reports to the controller what an actor is doing during a long call.

An actor that is loading a model cannot answer other calls. So a thread polls `solrl_ray.common.progress_note` during
the call and sends each change to the controller, without waiting for a reply.
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
"""Seconds after which an unchanged note is sent again. The receiver drops a note that is not repeated for several of
these intervals.
"""

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

_receiver: tuple[str, str, str] | None = None
"""Name of this actor, then name and namespace of the actor that receives its notes."""


def send_to(receiver: str, namespace: str, *, name: str) -> None:
    """Set the receiver of this actor's notes: the method ``note`` of the actor `receiver`. They carry `name`."""
    global _receiver
    _receiver = name, receiver, namespace


def speak_as(name: str) -> None:
    """Send notes under another name: that of the role whose method is called."""
    global _receiver
    if _receiver is not None:
        _receiver = name, *_receiver[1:]


def noted(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorator for an actor's method: sends progress notes while the method runs."""

    @functools.wraps(method)
    def call(self: S, *arguments: P.args, **keywords: P.kwargs) -> T:
        if _receiver is None:
            return method(self, *arguments, **keywords)
        ended = threading.Event()
        sender = threading.Thread(target=_send_notes, args=(*_receiver, ended), name="progress notes", daemon=True)
        sender.start()
        try:
            return method(self, *arguments, **keywords)
        finally:
            ended.set()
            sender.join(LOOK_SECONDS)  # the last note, an empty one, reports the end of the call

    return call


def _send_notes(name: str, receiver: str, namespace: str, ended: threading.Event) -> None:
    try:
        actor: Any = ray.get_actor(receiver, namespace=namespace)
    except ValueError:  # the receiver is gone, and this actor will end too
        return
    sent, sent_at = "", 0.0
    while not ended.is_set():
        words = progress_note.now()
        if words != sent or (words and time.monotonic() - sent_at > REPEAT_SECONDS):
            actor.note.remote(name, words)
            sent, sent_at = words, time.monotonic()
        ended.wait(LOOK_SECONDS)
    if sent:
        actor.note.remote(name, "")
