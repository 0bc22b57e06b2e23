"""A piece of work in a thread of its own, and the errands that it has the main thread do.

The controller's main thread alone touches fleet, selector and telemetry. What the learner group needs takes minutes:
it runs aside, so that workers are looked after meanwhile. The learner group, checkpoints and the making of
revisions belong to whatever is aside, and nothing is aside twice at a time; while nothing is, the main thread offers
the learner group samples (`LearnerGroup.offer`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from solrl_ray.errors import RunError

POLL = 0.05
"""How long a wait for the fleet may keep the main thread from what happened aside, and the other way round; seconds."""
FIRST_POLL = 0.002
"""The same in the beginning: what is done soon is noticed soon."""

T = TypeVar("T")


class Background(Generic[T]):
    def __init__(
        self, work: Callable[[], T], *, seconds: float, deadline: float = math.inf, what: str = "the work aside"
    ) -> None:
        """Begin `work`.

        Args:
            seconds: the longest that an errand may wait for the main thread.
            deadline: the longest that `work` may take, seconds; none if each of its waits has its own.
            what: the work's name, as the subject of a sentence.
        """
        self._work = work
        self._seconds = seconds
        self._deadline = deadline
        self._what = what
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._errand: Callable[[], Any] | None = None
        self._answer: tuple[Any, BaseException | None] | None = None
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="aside", daemon=True).start()

    def await_end(self, poll: Callable[[float], bool]) -> None:
        """Look after the rest until the work is done. For the main thread.

        Args:
            go_on: does so, and waits for at most so many seconds; whether there is anybody at work.

        Raises RunError if it has passed its deadline; its thread, which nobody can end, is left to itself.
        """
        at_work, seconds = True, FIRST_POLL
        while not self.finished(seconds=0.0 if at_work else seconds):
            if time.monotonic() - self._began > self._deadline:
                raise RunError(f"{self._what} passed its deadline of {self._deadline:g} s")
            at_work = poll(seconds)
            seconds = min(POLL, 2 * seconds)

    def finished(self, *, seconds: float) -> bool:
        """Whether the work is done, after at most `seconds`; does an errand if there is one. For the main thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._errand is not None, timeout=seconds)
            errand = self._errand
        if errand is not None:
            self._do(errand)
        return self._done

    def result(self) -> T:
        """What came of finished work. Raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def ask(self, errand: Callable[[], Any], *, what: str) -> Any:
        """Have the main thread call `errand`; returns what it returns and raises what it raises. For the work's thread.

        Raises RunError if the main thread does not come to it in time.
        """
        with self._changed:
            self._errand, self._answer = errand, None
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._answer is not None, timeout=self._seconds):
                raise RunError(f"{what}: the controller did not come to it within {self._seconds:g} s")
            assert self._answer is not None
            value, error = self._answer
        if error is not None:
            raise error
        return value

    def _do(self, errand: Callable[[], Any]) -> None:
        value, error = None, None
        try:
            value = errand()
        except BaseException as raised:  # it is the asking thread's to handle
            error = raised
        with self._changed:
            self._errand, self._answer = None, (value, error)
            self._changed.notify_all()

    def _run(self) -> None:
        value, error = None, None
        try:
            value = self._work()
        except BaseException as raised:  # the main thread raises it again
            error = raised
        with self._changed:
            self._value, self._error, self._done = value, error, True
            self._changed.notify_all()
