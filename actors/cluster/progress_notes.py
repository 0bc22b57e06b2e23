"""What an actor does in a call that takes long, told to its controller meanwhile.

An actor that loads a model answers no question until it has. A thread beside the call looks now and then at what
`solrl_ray.common.doing` says, and sends it when it is something else than before. Nobody waits for what is sent.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from solrl_ray.common import doing

LOOK_SECONDS = 0.5
"""Between two looks at what the call does."""
REPEAT_SECONDS = 5.0
"""After which the same is sent again: what was not said for some of these is out of date, as of an actor that died."""

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

_receiver: tuple[str, str, str] | None = None
"""This actor's name; name and namespace of the actor that is told."""


def send_to(receiver: str, namespace: str, *, name: str) -> None:
    """From now on tell the actor `receiver`, by its method ``note``, what this one does; it is called `name` there."""
    global _receiver
    _receiver = name, receiver, namespace


def noted(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Have others told what an actor's method is doing while it does it."""

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
            beside.join(LOOK_SECONDS)  # what is said last is that nothing is done any more

    return call


def _tell(name: str, receiver: str, namespace: str, ended: threading.Event) -> None:
    try:
        actor: Any = ray.get_actor(receiver, namespace=namespace)
    except ValueError:  # it is gone, and this actor is about to
        return
    told, when = "", 0.0
    while not ended.is_set():
        words = doing.now()
        if words != told or (words and time.monotonic() - when > REPEAT_SECONDS):
            actor.note.remote(name, words)
            told, when = words, time.monotonic()
        ended.wait(LOOK_SECONDS)
    if told:
        actor.note.remote(name, "")
