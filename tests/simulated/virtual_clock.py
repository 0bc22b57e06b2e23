"""An event loop whose clock jumps: waiting takes no time, and the order of events is a function of the program
alone.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(AssertionError):
    """All tasks wait, without a deadline, for something that will never happen."""


class _NoWait(selectors.SelectSelector):
    """Moves the clock to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Stuck("nothing is left that could happen")
        self.now += max(0.0, timeout)
        return []  # no file or socket is waited for


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Its time begins at 0 and only moves when every task waits."""

    def __init__(self) -> None:
        self._clock = _NoWait()
        super().__init__(self._clock)
        self._clock_resolution = 1e-9
        self._tasks: list[asyncio.Task[Any]] = []
        self.set_task_factory(partial(_kept, self._tasks))

    @property
    def unseen(self) -> list[str]:
        """Ended tasks with an error that nobody has asked for; asyncio tells of them when they are forgotten."""
        failed: list[Any] = [task for task in self._tasks if task.done() and not task.cancelled()]
        return [f"{task.get_name()}: {task._exception!r}" for task in failed if task._log_traceback]

    def time(self) -> float:
        return self._clock.now


def _kept(tasks: list[asyncio.Task[Any]], loop: Any, work: Any, **how: Any) -> asyncio.Task[Any]:
    tasks.append(asyncio.Task(work, loop=loop, **how))
    return tasks[-1]


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, in virtual time. Raises Stuck if it waits for ever."""
    loop = VirtualClockLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.close()
