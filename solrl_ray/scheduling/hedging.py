"""Which units are out for too long, so that an idle worker does them as well. Pure.

A worker has its units one after the other, so all that it holds is late as soon as the one at its turn is. Only
measured times of the same stage judge it; a few of them are needed, and no unit is late before `FLOOR` seconds, for
what is that short is not worth a second worker.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from solrl_ray.records import WorkUnit

FLOOR = 5.0
"""Seconds."""
ENOUGH = 3
"""Answers of a stage before its median says something."""
REMEMBERED = 256
"""Newest answers of a stage that the median is of; and about how many answered units are kept in mind."""


@dataclass(frozen=True, slots=True)
class Out:
    """What one worker holds."""

    units: tuple[WorkUnit, ...]
    """In the order in which it does them."""
    seconds: float
    """Since the first one's turn came."""


class Hedging:
    def __init__(self, factor: float) -> None:
        """`factor`: how many medians of its stage a unit may take before it is late; 0: none ever is."""
        self._factor = factor
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._answered: set[WorkUnit] = set()

    def answered(self, unit: WorkUnit, seconds: float) -> None:
        """Note an answer and what it took to compute; the unit is not late any more, whoever else has it."""
        self._seconds[unit.stage].append(seconds)
        self._answered.add(unit)

    def pairs(self, idle: Sequence[str], out: Sequence[Out]) -> list[tuple[str, WorkUnit]]:
        """Who is to do which late unit as well: one for each idle worker, those out longest first."""
        if len(self._answered) > REMEMBERED:  # those that nobody has any more are not asked about
            self._answered.intersection_update(unit for entry in out for unit in entry.units)
        if not self._factor or not idle:
            return []
        late = [entry for entry in out if entry.units and entry.seconds > self._patience(entry.units[0].stage)]
        if not late:
            return []
        held = Counter(unit for entry in out for unit in entry.units)
        units = [unit for entry in sorted(late, key=lambda entry: -entry.seconds) for unit in entry.units]
        once = [unit for unit in units if unit not in self._answered and held[unit] == 1]
        return list(zip(idle, once, strict=False))

    def _patience(self, stage: str) -> float:
        seconds = self._seconds[stage]
        return max(FLOOR, self._factor * median(seconds)) if len(seconds) >= ENOUGH else float("inf")
