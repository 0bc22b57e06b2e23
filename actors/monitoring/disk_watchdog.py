"""What the controller does in its run folder, for those who ask how the run is: a disk that hangs answers nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from solrl_ray.errors import RunError


class DiskWatchdog:
    def __init__(self, folder: Path, *, seconds: float) -> None:
        """`seconds`: the longest that one piece of work may take, `fleet.deadlines.checkpoint`."""
        self._folder = folder
        self._seconds = seconds
        self._lock = threading.Lock()
        self._going: dict[object, tuple[str, float]] = {}
        """What goes on, and since when."""

    @contextmanager
    def work(self, what: str) -> Iterator[None]:
        """The ``with`` block reads or writes there. `what`: its name, as the subject of a sentence."""
        mine = object()
        with self._lock:
            self._going[mine] = what, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._going[mine]

    def check(self) -> None:
        """Raise RunError if some work has passed its deadline: nothing can end it, so the run has to. From any thread
        but the one that is at work."""
        with self._lock:
            going = list(self._going.values())
        for what, began in going:
            if time.monotonic() - began > self._seconds:
                raise RunError(
                    f"{what} in {self._folder} (fleet.deadlines.checkpoint) passed its deadline of {self._seconds:g} s"
                )
