"""The results of a validation's step: measures with their limits, and the outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Value = float | int | str | bool

State = Literal["ok", "FAILS", "lacks", "skipped"]
"""``lacks``: this machine cannot do it, for the given reason; ``skipped``: another step failed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    name: str
    value: Value
    limit: str = ""
    """``at most 0.05``; empty if there is none."""
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
    """The outcome of a step."""

    step: str
    does: str
    """In a few words."""
    state: State
    seconds: float
    peak_gb: float | None
    """Peak memory of the GPU, or on a CPU of this process; None where it is unknown."""
    measures: tuple[Measure, ...] = ()
    reason: str = ""
    """Why a step is not ok, in a sentence."""
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
    """A measure without a limit."""
    return Measure(name=name, value=value)


def at_most(name: str, value: float, limit: float, why: str) -> Measure:
    """NaN fails."""
    return Measure(name=name, value=value, limit=f"at most {limit:g}", why=why, holds=value <= limit)


def at_least(name: str, value: float, limit: float, why: str) -> Measure:
    """NaN fails."""
    return Measure(name=name, value=value, limit=f"at least {limit:g}", why=why, holds=value >= limit)


def above_zero(name: str, value: float, why: str) -> Measure:
    """NaN and infinity fail."""
    return Measure(name=name, value=value, limit="above 0", why=why, holds=0 < value < math.inf)


def is_true(name: str, value: bool, why: str) -> Measure:
    return Measure(name=name, value=value, limit="yes", why=why, holds=value)


def misses(measures: Sequence[Measure]) -> str:
    """A sentence on the failed measures; empty if there are none."""
    return "; ".join(f"{each.name} is {each.shown}, not {each.limit}" for each in measures if not each.holds)
