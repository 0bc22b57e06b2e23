"""Held-out reward of a run over updates and time, for time-to-target and for comparing runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

from solrl_ray.config.pools import reserved
from solrl_ray.report.data import RunData
from solrl_ray.report.rendering import clock

SHARES = (0.5, 0.75, 0.9, 1.0)
"""Targets, as shares of the first run's gain."""


@dataclass(frozen=True, slots=True)
class Point:
    """A held-out evaluation of the policy."""

    updates: float
    seconds: float
    """Wall-clock seconds of the iterations so far, without start-up and evaluations."""
    reward: float
    """Mean held-out reward."""
    stderr: float
    """Standard error of `reward` over prompts; NaN for an interpolated point."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The held-out evaluations of a run, with the GPUs that it used."""

    points: tuple[Point, ...]
    """Evaluations, ordered by updates; the first is the base model."""
    gpus: float
    """GPUs of the whole fleet; 0 for a run on CPUs."""

    @classmethod
    def of(cls, run: RunData) -> Curve:
        """The curve of a run; without points if it was not evaluated."""
        seconds = list(accumulate((record.seconds["total"] for record in run.iterations), initial=0.0))
        evaluated = {e.iteration: e for e in run.evaluations if e.policy in ("base", "ema")}
        points = [
            Point(updates, seconds[updates], e.reward_mean, e.reward_stderr)
            for updates, e in sorted(evaluated.items())
            if updates < len(seconds)
        ]
        return cls(tuple(points), reserved(run.config, "num_gpus"))

    @property
    def gain(self) -> float:
        """Held-out reward of the last evaluation minus that of the base model; 0 without evaluations."""
        return self.points[-1].reward - self.points[0].reward if self.points else 0.0

    def time(self, seconds: float) -> str:
        """Format the cost of `seconds` of iterations: GPU-hours of the fleet, or the time for a run on CPUs."""
        return f"{self.gpus * seconds / 3600:.3g} GPU-hours" if self.gpus else clock(seconds)

    def reaches(self, reward: float) -> Point | None:
        """The point at which the policy first reached this held-out reward, by linear interpolation; None if it never
        did.
        """
        if self.points and self.points[0].reward >= reward:
            return self.points[0]
        for one, other in pairwise(self.points):
            if other.reward >= reward:
                share = (reward - one.reward) / (other.reward - one.reward)
                return Point(
                    one.updates + share * (other.updates - one.updates),
                    one.seconds + share * (other.seconds - one.seconds),
                    reward,
                    math.nan,
                )
        return None
