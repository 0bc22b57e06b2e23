"""Work that may hang, with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from solrl_ray.errors import RunError

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Begin `work` in a thread of its own; the future has what it returns or raises.

    Not an executor's thread: those are joined when the process ends, which work that hangs would keep from ending.
    """
    done: Future[T] = Future()

    done.set_running_or_notify_cancel()  # from now on nobody can cancel it

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # whoever waits raises it
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def in_time(work: Callable[[], T], *, what: str, seconds: float, silent: str = "the disk") -> T:
    """What `work` returns; raises what it raises.

    A network disk that is gone lets a process wait for ever, where no signal reaches it: `work` has a thread of its
    own, which is left to itself then.

    Args:
        what: its name, as the subject of a sentence.
        silent: what does not answer then.

    Raises RunError if it takes longer than `seconds`.
    """
    done = in_thread(work, what)
    if not wait([done], timeout=seconds).done:
        raise RunError(f"{what} passed its deadline of {seconds:g} s: {silent} does not answer")
    return done.result()
