"""Work that may hang, such as reading a network disk, is done in a thread with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from solrl_ray.errors import RunError

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in its own thread; the future gets its result or error.

    Not an executor's thread: a process joins those when it ends, so work that hangs would keep it alive.
    """
    done: Future[T] = Future()

    done.set_running_or_notify_cancel()  # so that it cannot be cancelled

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised by the waiting thread
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def in_time(work: Callable[[], T], *, what: str, seconds: float, silent: str = "the disk") -> T:
    """The result of `work`, within a deadline; raises what it raises.

    A network disk that is gone blocks a process for ever, and signals do not reach it. So `work` runs in its own
    thread, which is abandoned at the deadline.

    Args:
        what: its name, as the subject of a sentence.
        silent: what does not answer then.

    Raises RunError if it takes longer than `seconds`.
    """
    done = in_thread(work, what)
    if not wait([done], timeout=seconds).done:
        raise RunError(f"{what} passed its deadline of {seconds:g} s: {silent} does not answer")
    return done.result()
