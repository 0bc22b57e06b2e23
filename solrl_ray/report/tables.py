"""The numbers of the report's tables: rank fidelity, times, counts and precision of a run."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from solrl_ray.config.strategies import is_one_stage
from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from solrl_ray.records import Attestation
from solrl_ray.report.data import RunData
from solrl_ray.report.summary import finite_mean
from solrl_ray.report.timing import OVERLAP, SEGMENTS, wall_segments
from solrl_ray.rollout.fallback import in_a_row

TIERS = {
    "nvfp4": "NVFP4 in hardware",
    "nvfp4-emulated": "emulation: NVFP4 numerics, not its speed",
    "fp8": "FP8, which is not NVFP4",
    "bf16": "bfloat16, unquantised",
    "bfloat16": "bfloat16, unquantised",
    "float32": "float32, unquantised",
}
"""What each tier is, so that no reader takes one for another."""

_AUDITED = (
    ("whole pools: Spearman", "spearman"),
    ("its interval, low end", "spearman_low"),
    ("its interval, high end", "spearman_high"),
    ("whole pools: Kendall", "kendall"),
    ("best beat", "best_beats"),
    ("worst beat", "worst_beats"),
    ("regret", "regret"),
)
"""Name in the report, key in `IterationMetrics.audit`."""


def fidelity(data: RunData) -> list[list[str]]:
    """Mean, first, last and least value of each measure of rank fidelity; empty before the first iteration."""
    if not data.iterations:
        return []
    measures: list[tuple[str, list[float | None]]] = [
        ("Spearman", [record.spearman for record in data.iterations]),
        ("Kendall", [record.kendall for record in data.iterations]),
        ("same half", [record.side_agreement for record in data.iterations]),
    ]
    measures += [
        (name, [record.audit.get(key) for record in data.iterations])
        for name, key in _AUDITED
        if any(key in record.audit for record in data.iterations)
    ]
    rows = []
    for name, values in measures:
        finite = [value for value in values if value is not None and math.isfinite(value)]
        shown = (finite_mean(values), values[0], values[-1], min(finite, default=math.nan))
        rows.append([name, *("–" if value is None else f"{value:.3f}" for value in shown)])
    return rows


@dataclass(frozen=True, slots=True)
class FallbackLevels:
    rule: str
    rows: list[list[object]]
    """First iteration on a level, level, preview steps, tier."""


def ladder(data: RunData) -> FallbackLevels | None:
    """From which iteration on previews were drawn how; None unless a fallback ladder is configured."""
    fidelity = data.config.fidelity
    if fidelity.floor is None:
        return None
    rows: list[list[object]] = []
    for number, record in enumerate(data.iterations):
        if number == 0 or record.fallback_level != data.iterations[number - 1].fallback_level:
            level = f"{record.fallback_level} of {len(fidelity.fallback)}"
            rows.append([record.iteration, level, record.preview_steps, record.preview_precision or ""])
    often = in_a_row(fidelity.patience)
    rule = f"After {often} with {fidelity.measure} below {fidelity.floor:g}, previews take the next fallback level."
    return FallbackLevels(rule, rows)


def stages(data: RunData) -> dict[str, float]:
    """Seconds of the run by part of the iteration; without what a strategy of one stage does not do."""
    split = [wall_segments(record) for record in data.iterations]
    left_out = (OVERLAP, "regenerate") if is_one_stage(data.config) else ()
    return {part: math.fsum(parts[part] for parts in split) for part in SEGMENTS if part not in left_out}


@dataclass(frozen=True, slots=True)
class Count:
    name: str
    expected: str
    actual: str
    mark: str = ""
    """``as expected``, ``differs`` or ``not finished``; empty if nothing was expected."""


def counts(data: RunData) -> list[Count]:
    """What was expected beside what was counted."""
    if is_one_stage(data.config):
        scored, trained = "sampled and scored", "trained on"
    else:
        scored, trained = "scored by previews", "regenerated and trained on"
    done = data.iterations
    differs = "differs" if data.finished else "not finished"
    records: list[IterationMetrics | EvaluationMetrics] = [*done, *data.evaluations]
    return [
        _count(f"candidates {scored}", sum(r.expected_candidates for r in done), sum(r.candidates for r in done)),
        _count(f"samples {trained}", sum(r.expected_samples for r in done), sum(r.samples for r in done)),
        _count("iterations", data.config.run.iterations, len(done), differs),
        Count("units given to another worker", "", f"{sum(r.requeued_units for r in done):,}"),
        Count("duplicate results, folded", "", f"{sum(r.duplicate_results for r in records):,}"),
        Count("of them with other bytes", "", f"{sum(r.differing_results for r in records):,}"),
        *_ratios(data),
    ]


def _count(name: str, expected: int, actual: int, otherwise: str = "differs") -> Count:
    return Count(name, f"{expected:,}", f"{actual:,}", "as expected" if actual == expected else otherwise)


def _ratios(data: RunData) -> list[Count]:
    """Of objectives that have a ratio: before the first optimiser step of an iteration the policy is unchanged."""
    first = [r.first_ratio_deviation for r in data.iterations if r.first_ratio_deviation is not None]
    if not first:
        return []
    clipped = finite_mean([r.clip_fraction for r in data.iterations])
    mark = "as expected" if max(first) == 0 else "differs"
    return [
        Count("largest |ratio − 1| in an iteration's first optimiser step", "0", f"{max(first):.3g}", mark),
        Count("mean share of ratios outside of the clip range", "", "–" if clipped is None else f"{clipped:.4f}"),
    ]


def differing(data: RunData) -> list[int]:
    """The iterations that had other numbers of candidates or samples than they should have."""
    return [
        record.iteration
        for record in data.iterations
        if (record.candidates, record.samples) != (record.expected_candidates, record.expected_samples)
    ]


def attested(data: RunData) -> list[list[Attestation]]:
    """What each worker really computes with, as it attested at its start: those that attest the same together."""
    alike: dict[tuple[object, ...], list[Attestation]] = defaultdict(list)
    for one in data.attestations:
        key = (one.tier, one.device, one.score_class, one.quantized_layers, *one.checks.items())
        alike[key].append(one)
    return list(alike.values())
