"""How long tests wait for what a busy machine does late.

A wait has the time that it would need on a quiet machine, many times over; what counts is the share of that time in
which the machine has a core for it, by the number of processes that want one.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

CORES = os.cpu_count() or 1
SECONDS = 120.0
"""Longest wait for anything, on a quiet machine."""


def slowness() -> float:
    """How many processes share a core at present: 1 on a quiet machine."""
    return max(1.0, os.getloadavg()[0] / CORES)


def patience(seconds: float = SECONDS) -> float:
    """So many seconds of a quiet machine, whole ones: for deadlines that are fixed before something begins."""
    return float(math.ceil(seconds * slowness()))


def _turns(what: str, reached: Callable[[], Any], seconds: float) -> Iterator[None]:
    """Until it is so. Raises AssertionError if it is not after `seconds`, of which a busy machine counts a part."""
    left, before = seconds, time.monotonic()
    while not reached():
        now = time.monotonic()
        left, before = left - (now - before) / slowness(), now
        assert left > 0, f"{what} never came"
        yield


def wait_until(what: str, reached: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Return once it is so."""
    for _ in _turns(what, reached, seconds):
        time.sleep(0.02)


async def until(reached: Callable[[], Any], seconds: float = SECONDS) -> None:
    """`wait_until`, while others go on."""
    for _ in _turns("what a test waits for", reached, seconds):
        await asyncio.sleep(0.02)
