"""Runs work that may hang, such as reading a network disk, in a thread with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from solrl_ray.errors import RunError

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in a new daemon thread; the future gets its result or error.

    An executor's thread would not do: a process joins it at its end, so work that hangs would keep the process alive.
    """
    done: Future[T] = Future()

    done.set_running_or_notify_cancel()  # from now on it cannot be cancelled

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised again in the waiting thread
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def in_time(work: Callable[[], T], *, what: str, seconds: float, silent: str = "the disk") -> T:
    """The result of `work`, which must finish within `seconds`; its errors are raised again.

    An unreachable network disk blocks a process forever, even for signals. So `work` runs in its own thread, which is
    abandoned at the deadline.

    Args:
        what: name of the work, the subject of the error message.
        silent: name of the thing that does not answer, for the error message.

    Raises RunError if `work` takes longer than `seconds`.
    """
    done = in_thread(work, what)
    if not wait([done], timeout=seconds).done:
        raise RunError(f"{what} passed its deadline of {seconds:g} s: {silent} does not answer")
    return done.result()
