"""What a step of a validation finds: measures with their limits, and what became of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Value = float | int | str | bool

State = Literal["ok", "FAILS", "lacks", "skipped"]
"""``lacks``: this machine has no such thing, for the reason that is given; ``skipped``: another step failed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    name: str
    value: Value
    limit: str = ""
    """``at most 0.05``; empty if nothing is asked of it."""
    why: str = ""
    """The reason of the limit."""
    holds: bool = True

    @property
    def shown(self) -> str:
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        return f"{self.value:.4g}" if isinstance(self.value, float) else f"{self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a step."""

    step: str
    does: str
    """In a few words."""
    state: State
    seconds: float
    peak_gb: float | None
    """Of the GPU's memory, or on a CPU of this process; None where that cannot be told."""
    measures: tuple[Measure, ...] = ()
    reason: str = ""
    """Of a step that is not ok, in a sentence."""
    traceback: str = ""

    @property
    def line(self) -> str:
        """One line for the terminal."""
        peak = "" if self.peak_gb is None else f", {self.peak_gb:.2f} GB"
        told = self.reason or "; ".join(f"{each.name} {each.shown}" for each in self.measures if each.limit)
        spent = f"{self.seconds:.1f} s{peak}" if self.seconds else ""
        return f"{self.step:<24} {self.state:<8} {spent:<20} {told}".rstrip()


class Lacks(Exception):
    """This machine cannot do the step; the message says why."""


def info(name: str, value: Value) -> Measure:
    """Told, and nothing is asked of it."""
    return Measure(name=name, value=value)


def at_most(name: str, value: float, limit: float, why: str) -> Measure:
    """NaN does not hold."""
    return Measure(name=name, value=value, limit=f"at most {limit:g}", why=why, holds=value <= limit)


def at_least(name: str, value: float, limit: float, why: str) -> Measure:
    """NaN does not hold."""
    return Measure(name=name, value=value, limit=f"at least {limit:g}", why=why, holds=value >= limit)


def above_zero(name: str, value: float, why: str) -> Measure:
    """NaN and infinity do not hold."""
    return Measure(name=name, value=value, limit="above 0", why=why, holds=0 < value < math.inf)


def is_true(name: str, value: bool, why: str) -> Measure:
    return Measure(name=name, value=value, limit="yes", why=why, holds=value)


def misses(measures: Sequence[Measure]) -> str:
    """A sentence on those that do not hold; empty if all do."""
    return "; ".join(f"{each.name} is {each.shown}, not {each.limit}" for each in measures if not each.holds)
