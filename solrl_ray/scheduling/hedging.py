"""Which units are late, so that `dispatcher.py` hands them to an idle worker a second time. Pure.

A worker does its units one after the other, so all of them are late as soon as its present one is. Lateness is judged
by measured times of the same stage, once there are a few. No unit is late before `FLOOR` seconds: a shorter one is not
worth a second worker.
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
"""Answers of a stage that its median needs."""
REMEMBERED = 256
"""Newest answers of a stage in its median; also about how many answered units are remembered."""


@dataclass(frozen=True, slots=True)
class Out:
    """One worker's units."""

    units: tuple[WorkUnit, ...]
    """In the order in which it does them."""
    seconds: float
    """Since it began the first."""


class Hedging:
    def __init__(self, factor: float) -> None:
        """`factor`: medians of its stage after which a unit is late; 0: never."""
        self._factor = factor
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._answered: set[WorkUnit] = set()

    def answered(self, unit: WorkUnit, seconds: float) -> None:
        """Note an answer and its computing time; the unit is no longer late, even if another worker has it."""
        self._seconds[unit.stage].append(seconds)
        self._answered.add(unit)

    def pairs(self, idle: Sequence[str], out: Sequence[Out]) -> list[tuple[str, WorkUnit]]:
        """Which worker repeats which late unit: one for each idle worker, the longest out first."""
        if len(self._answered) > REMEMBERED:  # units that no worker has any more are never asked about
            self._answered.intersection_update(unit for entry in out for unit in entry.units)
        if not self._factor or not idle:
            return []
        known = {stage: seconds for stage, seconds in self._seconds.items() if len(seconds) >= ENOUGH}
        limits = {stage: max(FLOOR, self._factor * median(seconds)) for stage, seconds in known.items()}
        late = [each for each in out if each.units and each.seconds > limits.get(each.units[0].stage, float("inf"))]
        if not late:
            return []
        held = Counter(unit for entry in out for unit in entry.units)
        units = [unit for entry in sorted(late, key=lambda entry: -entry.seconds) for unit in entry.units]
        once = [unit for unit in units if unit not in self._answered and held[unit] == 1]
        return list(zip(idle, once, strict=False))
