"""A run's progress by updates and by time: for time to target, and for comparing runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

from solrl_ray.config.pools import reserved
from solrl_ray.report.data import RunData
from solrl_ray.report.rendering import clock

SHARES = (0.5, 0.75, 0.9, 1.0)
"""Shares of a gain, as targets."""


@dataclass(frozen=True, slots=True)
class Point:
    """A held-out evaluation of the policy."""

    updates: float
    seconds: float
    """Time of the iterations so far, without evaluations and start."""
    reward: float
    stderr: float
    """Over prompts."""


@dataclass(frozen=True, slots=True)
class Curve:
    points: tuple[Point, ...]
    """By updates; the first is the base."""
    gpus: float
    """Of the whole fleet; 0 on CPUs."""

    @classmethod
    def of(cls, run: RunData) -> Curve:
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
        """The last evaluation minus the base; 0 before there is one."""
        return self.points[-1].reward - self.points[0].reward if self.points else 0.0

    def time(self, seconds: float) -> str:
        """The fleet's cost of iterations of `seconds`: GPU-hours, or on CPUs time."""
        return f"{self.gpus * seconds / 3600:.3g} GPU-hours" if self.gpus else clock(seconds)

    def reaches(self, reward: float) -> Point | None:
        """When the policy first had this held-out reward, by linear interpolation between evaluations."""
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
