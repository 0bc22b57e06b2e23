"""The numbers of the report's tables: use of time (wall seconds without overlap, and the workers' share
of working time) and precision of a run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage
from solrl_ray.metrics.records import IterationMetrics
from solrl_ray.records import Attestation
from solrl_ray.report.data import RunData

OVERLAP = "explore + regenerate"
REST = "rest"
SEGMENTS = ("explore", OVERLAP, "regenerate", "learn", "publish", REST)
"""Parts of an iteration's wall time, roughly in time order; they add up to the total."""
TIERS = {
    "nvfp4": "NVFP4 in hardware",
    "nvfp4-emulated": "emulation: NVFP4 numerics, not its speed",
    "fp8": "FP8, which is not NVFP4",
    "bf16": "bfloat16, unquantised",
    "bfloat16": "bfloat16, unquantised",
    "float32": "float32, unquantised",
}
"""What each tier is, so that no reader confuses them."""


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
        ("explorers", "explore", config.fleet.explorers.count),
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


def stages(data: RunData) -> dict[str, float]:
    """Seconds of the run by part of the iteration; a one-stage strategy lacks some parts."""
    split = [wall_segments(record) for record in data.iterations]
    left_out = (OVERLAP, "regenerate") if is_one_stage(data.config) else ()
    return {part: math.fsum(parts[part] for parts in split) for part in SEGMENTS if part not in left_out}


def attested(data: RunData) -> list[list[Attestation]]:
    """What each worker really computes with, as attested at its start; workers with equal attestations are grouped."""
    alike: dict[tuple[object, ...], list[Attestation]] = defaultdict(list)
    for one in data.attestations:
        key = (one.tier, one.device, one.score_class, one.quantized_layers, *one.checks.items())
        alike[key].append(one)
    return list(alike.values())
