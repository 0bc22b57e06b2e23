"""Numbers for the tables of the report: wall time per stage, utilisation and precision of the workers."""

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
REST = "other"
SEGMENTS = ("explore", OVERLAP, "regenerate", "learn", "publish", REST)
"""Segments of an iteration's wall time, roughly in time order; they add up to the total."""
TIERS = {
    "nvfp4": "NVFP4 in hardware",
    "nvfp4-emulated": "emulation: NVFP4 numerics, not its speed",
    "fp8": "FP8, which is not NVFP4",
    "bf16": "bfloat16, unquantised",
    "bfloat16": "bfloat16, unquantised",
    "float32": "float32, unquantised",
}
"""Precision tier → explanation for readers."""


def wall_segments(record: IterationMetrics) -> dict[str, float]:
    """Split the wall seconds of one iteration into `SEGMENTS`, which add up to its total.

    Exploration and regeneration overlap; each is measured from its first start to its last end. Their union is taken to
    be the total minus the later stages, limited to at most their sum and at least the longer of the two. The checkpoint
    is written in the background and has no segment.
    """
    explore, regenerate = record.seconds.get("explore", 0.0), record.seconds.get("regenerate", 0.0)
    after = {stage: record.seconds.get(stage, 0.0) for stage in ("learn", "publish")}
    available = record.seconds["total"] - math.fsum(after.values())
    union = min(explore + regenerate, max(available, explore, regenerate))
    return {
        "explore": union - regenerate,
        OVERLAP: explore + regenerate - union,
        "regenerate": union - explore,
        **after,
        REST: max(0.0, available - union),
    }


def worker_times(config: Config, iterations: Sequence[IterationMetrics]) -> list[list[str]]:
    """Rows of the table of workers, one each for explorers, regenerators and learner ranks.

    Columns: role, number of workers, seconds spent computing, seconds available (workers × wall time of all
    iterations), and as shares of the latter: busy, idle and, for explorers, waiting for weights.
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
    """Segment → its wall seconds, summed over the run. One-stage strategies lack the segments of regeneration."""
    split = [wall_segments(record) for record in data.iterations]
    left_out = (OVERLAP, "regenerate") if is_one_stage(data.config) else ()
    return {name: math.fsum(segments[name] for segments in split) for name in SEGMENTS if name not in left_out}


def attested(data: RunData) -> list[list[Attestation]]:
    """Attestations by workers of their precision and device at start, grouped where they are equal."""
    groups: dict[tuple[object, ...], list[Attestation]] = defaultdict(list)
    for one in data.attestations:
        key = (one.tier, one.device, one.score_class, one.quantized_layers, *one.checks.items())
        groups[key].append(one)
    return list(groups.values())
