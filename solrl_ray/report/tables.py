"""The numbers of the report's tables: use of time (wall seconds without overlap, and the workers' share
of working time) and precision of a run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

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


def worker_times(config: Config, iterations: Sequence[IterationMetrics]) -> list[list[str]]:
    """Rows of explorers, regenerators and learner ranks: role, number, seconds of computing, workers × wall seconds of
    the iterations, and shares of those: busy, idle, and for explorers waiting for weights.
    """
    wall = math.fsum(record.seconds["total"] for record in iterations)
    waited = math.fsum(record.weights_wait * record.seconds["total"] for record in iterations)
    rows = []
    for role, stage, count in (
        ("explorers", "explore", config.fleet.explorers.count),
        ("regenerators", "regenerate", config.fleet.regenerators.count),
        ("learner", "learn", config.learner.world_size),
    ):
        busy = math.fsum(record.busy_seconds.get(stage, 0.0) for record in iterations)
        share, available = busy / (count * wall) if count and wall else 0.0, count * wall
        weights = f"{waited / wall if wall else 0:.1%}" if role == "explorers" else "–"
        rows.append([role, f"{count}", f"{busy:.1f}", f"{available:.1f}", f"{share:.1%}", f"{1 - share:.1%}", weights])
    return rows


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
