"""The numbers of the report's tables: rank fidelity, times and precision of a run."""

from __future__ import annotations

import math
from collections import defaultdict

from solrl_ray.config.strategies import is_one_stage
from solrl_ray.records import Attestation
from solrl_ray.report.data import RunData
from solrl_ray.report.summary import finite_mean
from solrl_ray.report.timing import OVERLAP, SEGMENTS, wall_segments

TIERS = {
    "nvfp4": "NVFP4 in hardware",
    "nvfp4-emulated": "emulation: NVFP4 numerics, not its speed",
    "fp8": "FP8, which is not NVFP4",
    "bf16": "bfloat16, unquantised",
    "bfloat16": "bfloat16, unquantised",
    "float32": "float32, unquantised",
}
"""What each tier is, so that no reader confuses them."""

_AUDITED = {
    "whole pools: Spearman": "spearman",
    "its interval, low end": "spearman_low",
    "its interval, high end": "spearman_high",
    "whole pools: Kendall": "kendall",
    "best beat": "best_beats",
    "worst beat": "worst_beats",
    "regret": "regret",
    "contrast lost by pruning, at most": "contrast_lost",
    "its interval, from": "contrast_lost_low",
    "its interval, to": "contrast_lost_high",
}
"""Name in the report → key in `IterationMetrics.audit`."""


def fidelity(data: RunData) -> list[list[str]]:
    """Mean, first, last and least value of each measure of rank fidelity; empty before the first iteration."""
    if not data.iterations:
        return []
    measures = {
        "Spearman": [record.spearman for record in data.iterations],
        "Kendall": [record.kendall for record in data.iterations],
        "same half": [record.side_agreement for record in data.iterations],
    }
    audited = {name: [record.audit.get(key) for record in data.iterations] for name, key in _AUDITED.items()}
    measures |= {name: values for name, values in audited.items() if any(value is not None for value in values)}
    rows = []
    for name, values in measures.items():
        finite = [value for value in values if value is not None and math.isfinite(value)]
        shown = (finite_mean(values), values[0], values[-1], min(finite, default=math.nan))
        rows.append([name, *("–" if value is None else f"{value:.3f}" for value in shown)])
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
