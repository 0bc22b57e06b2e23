"""Use of time: wall seconds without overlap, and the workers' share of working time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from solrl_ray.config.pools import explorers_in_all
from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import IterationMetrics

OVERLAP = "explore + regenerate"
REST = "rest"
SEGMENTS = ("explore", OVERLAP, "regenerate", "learn", "publish", REST)
"""Parts of an iteration's wall time, roughly in time order; they add up to the total."""


def wall_segments(record: IterationMetrics) -> dict[str, float]:
    """Splits one iteration's wall seconds into `SEGMENTS`, which sum to its total.

    Exploration and regeneration overlap; each is measured from its first start to its last end. Their union is the
    total without the later stages: at most the sum, at least the longer of the two. The checkpoint is written beside
    other work and has no part of its own.
    """
    explore, regenerate = record.seconds.get("explore", 0.0), record.seconds.get("regenerate", 0.0)
    after = {stage: record.seconds.get(stage, 0.0) for stage in ("learn", "publish")}
    room = record.seconds["total"] - math.fsum(after.values())
    union = min(explore + regenerate, max(room, explore, regenerate))
    return {
        "explore": union - regenerate,
        OVERLAP: explore + regenerate - union,
        "regenerate": union - explore,
        **after,
        REST: max(0.0, room - union),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTime:
    """Use of the wall time of one kind of worker over the whole run."""

    role: str
    workers: int
    busy: float
    """Summed seconds of computing."""
    available: float
    """Workers × wall seconds of the iterations."""
    weights: float = 0.0
    """Seconds of it spent waiting for weights; known for explorers."""

    @property
    def busy_share(self) -> float:
        return self.busy / self.available if self.available > 0 else 0.0

    @property
    def weights_share(self) -> float:
        return self.weights / self.available if self.available > 0 else 0.0


def worker_times(config: Config, iterations: Sequence[IterationMetrics]) -> list[WorkerTime]:
    """Busy and available seconds of explorers, regenerators and learner ranks over `iterations`."""
    wall = math.fsum(record.seconds["total"] for record in iterations)
    roles = (
        ("explorers", "explore", explorers_in_all(config.fleet)),
        ("regenerators", "regenerate", config.fleet.regenerators.count),
        ("learner", "learn", config.learner.world_size),
    )
    return [
        WorkerTime(
            role=role,
            workers=count,
            busy=math.fsum(record.busy_seconds.get(stage, 0.0) for record in iterations),
            available=count * wall,
            weights=math.fsum(count * r.weights_wait * r.seconds["total"] for r in iterations if role == "explorers"),
        )
        for role, stage, count in roles
    ]
