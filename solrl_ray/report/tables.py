"""The report's tables: counts, precision, times, identity and configuration of a run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from solrl_ray.config.strategies import is_one_stage, pool_sampling
from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from solrl_ray.records import Attestation
from solrl_ray.report.data import RunData
from solrl_ray.report.markup import escape, table
from solrl_ray.report.summary import finite_mean, run_selection_digest
from solrl_ray.report.timing import OVERLAP, SEGMENTS, WorkerTime, wall_segments
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


def clock(seconds: float) -> str:
    """Seconds for reading: ``48.2 s``, ``2 min 50 s``, ``3 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


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


def fidelity(data: RunData) -> str:
    """Mean, first, last and least value of each measure of rank fidelity."""
    measures: tuple[tuple[str, list[float | None]], ...] = (
        ("Spearman", [record.spearman for record in data.iterations]),
        ("Kendall", [record.kendall for record in data.iterations]),
        ("same half", [record.side_agreement for record in data.iterations]),
    )
    measures += tuple(
        (name, [record.audit.get(key) for record in data.iterations])
        for name, key in _AUDITED
        if any(key in record.audit for record in data.iterations)
    )
    rows = []
    for name, values in measures:
        finite = [value for value in values if value is not None and math.isfinite(value)]
        shown = (finite_mean(values), values[0], values[-1], min(finite, default=math.nan))
        rows.append([escape(name), *("–" if value is None else f"{value:.3f}" for value in shown)])
    return table(("measure", "mean", "first", "last", "least"), rows, numbers=(1, 2, 3, 4))


def fallback_levels(data: RunData) -> str:
    """From which iteration on previews were drawn how; empty unless a fallback ladder is configured."""
    fidelity = data.config.fidelity
    if fidelity.floor is None:
        return ""
    rows = []
    for number, record in enumerate(data.iterations):
        if number == 0 or record.fallback_level != data.iterations[number - 1].fallback_level:
            drawn = [str(record.preview_steps), escape(record.preview_precision or "")]
            rows.append([str(record.iteration), f"{record.fallback_level} of {len(fidelity.fallback)}", *drawn])
    note = (
        f"After {in_a_row(fidelity.patience)} with {fidelity.measure} below {fidelity.floor:g}, previews take the "
        "next fallback level."
    )
    body = table(("from iteration", "fallback level", "preview steps", "tier"), rows, numbers=(0, 2))
    return f'<div class="card scroll top"><h3>Fallback ladder</h3><p class="note">{escape(note)}</p>{body}</div>'


def stage_times(data: RunData, times: Sequence[WorkerTime]) -> str:
    """Totals of the run by part of the iteration, then what each kind of worker did with its time."""
    split = [wall_segments(record) for record in data.iterations]
    total = math.fsum(record.seconds["total"] for record in data.iterations)
    rows = []
    for segment in SEGMENTS:
        if is_one_stage(data.config) and segment in (OVERLAP, "regenerate"):
            continue  # nothing is sampled a second time
        seconds = math.fsum(parts[segment] for parts in split)
        share = 100 * seconds / total if total > 0 else 0.0
        rows.append([escape(segment), f"{seconds:.1f}", f"{share:.1f} %"])
    rows.append(["<strong>all iterations</strong>", f"{total:.1f}", "100.0 %"])
    rows += _outside_iterations(data, total)
    stages = table(("part of the iteration", "wall, s", "share"), rows, numbers=(1, 2))
    work = [
        [
            escape(time.role),
            str(time.workers),
            f"{time.busy:.1f}",
            f"{time.available:.1f}",
            f"{100 * time.busy_share:.1f} %",
            f"{100 - 100 * time.busy_share:.1f} %",
            f"{100 * time.weights_share:.1f} %" if time.role == "explorers" else "–",
        ]
        for time in times
    ]
    header = ("workers", "number", "busy, s", "available, s", "busy", "idle", "for weights")
    workers = table(header, work, numbers=(1, 2, 3, 4, 5, 6))
    return f'<div class="tables"><div>{stages}</div><div>{workers}</div></div>'


def _outside_iterations(data: RunData, inside: float) -> list[list[str]]:
    """Rows for the wall time of a finished run that no iteration contains."""
    if data.summary is None:
        return []
    evaluating = math.fsum(record.seconds for record in data.evaluations)
    other = max(0.0, data.summary.seconds - inside - evaluating)
    return [
        ["held-out evaluations", f"{evaluating:.1f}", ""],
        ["start, end and between iterations", f"{other:.1f}", ""],
        ["<strong>whole run</strong>", f"{data.summary.seconds:.1f}", ""],
    ]


def counts(data: RunData) -> str:
    """What was expected beside what was counted."""
    if not data.iterations:
        return ""
    expected_candidates = sum(record.expected_candidates for record in data.iterations)
    expected_samples = sum(record.expected_samples for record in data.iterations)
    if is_one_stage(data.config):
        scored, trained = "sampled and scored", "trained on"
    else:
        scored, trained = "scored by previews", "regenerated and trained on"
    rows = [
        _count(f"candidates {scored}", expected_candidates, sum(r.candidates for r in data.iterations)),
        _count(f"samples {trained}", expected_samples, sum(r.samples for r in data.iterations)),
        _count("iterations", data.config.run.iterations, len(data.iterations), done=data.finished),
    ]
    records: list[IterationMetrics | EvaluationMetrics] = [*data.iterations, *data.evaluations]
    for name, total in (
        ("units given to another worker", sum(record.requeued_units for record in data.iterations)),
        ("duplicate results, folded", sum(record.duplicate_results for record in records)),
        ("of them with other bytes", sum(record.differing_results for record in records)),
    ):
        rows.append([escape(name), "", f"{total:,}", ""])
    rows += _ratios(data)
    wrong = [
        str(record.iteration)
        for record in data.iterations
        if record.candidates != record.expected_candidates or record.samples != record.expected_samples
    ]
    note = f'<p class="note">Iterations that differ: {escape(", ".join(wrong))}.</p>' if wrong else ""
    body = table(("count", "expected", "actual", ""), rows, numbers=(1, 2))
    return f'<h2>Expected and actual</h2><div class="card scroll">{body}{note}</div>'


def _ratios(data: RunData) -> list[list[str]]:
    """Of objectives that have a ratio: before the first optimiser step of an iteration the policy is unchanged."""
    first = [r.first_ratio_deviation for r in data.iterations if r.first_ratio_deviation is not None]
    if not first:
        return []
    clipped = finite_mean([r.clip_fraction for r in data.iterations if r.clip_fraction is not None])
    mark = '<span class="chip good">as expected</span>' if max(first) == 0 else '<span class="chip warn">differs</span>'
    return [
        ["largest |ratio − 1| in an iteration's first optimiser step", "0", f"{max(first):.3g}", mark],
        ["mean share of ratios outside of the clip range", "", "–" if clipped is None else f"{clipped:.4f}", ""],
    ]


def _count(name: str, expected: int, actual: int, *, done: bool = True) -> list[str]:
    if actual == expected:
        mark = '<span class="chip good">as expected</span>'
    elif not done:
        mark = '<span class="chip warn">not finished</span>'
    else:
        mark = '<span class="chip warn">differs</span>'
    return [escape(name), f"{expected:,}", f"{actual:,}", mark]


def precision(data: RunData) -> str:
    """What each worker really computes with, as it attested at its start."""
    wanted = pool_sampling(data.config).tier
    sampled = "Samples" if is_one_stage(data.config) else "Previews"
    if not data.attestations:
        note = '<p class="note">This run folder holds no attestations.</p>'
        return f"<h2>Precision, as attested</h2>{note}"
    alike: dict[tuple[object, ...], list[Attestation]] = defaultdict(list)
    for record in data.attestations:
        key = (
            record.tier,
            record.device,
            record.score_class,
            record.quantized_layers,
            *record.checks.items(),
        )
        alike[key].append(record)
    rows = [_attestation_row(records) for records in alike.values()]
    header = ("workers", "tier", "device", "layers quantised", "checks", "score class")
    note = (
        f"{sampled} are configured to run in <code>{escape(wanted)}</code>. Each worker tests its own kernels "
        "when it starts and states what it runs; workers of one score class give the same bits."
    )
    if wanted != "auto" and all(record.tier != wanted for record in data.attestations):
        note += f' <span class="chip warn">no worker attests {escape(wanted)}</span>'
    body = table(header, rows, numbers=(3,))
    return f'<h2>Precision, as attested</h2><p class="note">{note}</p><div class="card scroll">{body}</div>'


def _attestation_row(records: Sequence[Attestation]) -> list[str]:
    first = records[0]
    names = "<br>".join(f'<span class="keep">{escape(record.worker)}</span>' for record in records)
    chip = "warn" if first.tier in ("nvfp4-emulated", "fp8") else "good"
    tier = f'<span class="chip {chip}">{escape(first.tier)}</span>'
    if first.tier in TIERS:
        tier += f'<br><span class="note">{escape(TIERS[first.tier])}</span>'
    layers = f"{first.quantized_layers:,}"
    if first.quantized_layers:
        layers += f" of {first.quantized_layers + first.skipped_layers:,}"
    checks = "<br>".join(f"{escape(name)}: {escape(found)}" for name, found in first.checks.items()) or "–"
    score_class = escape(first.score_class)
    digest = f'<span class="digest keep" title="{score_class}">{escape(first.score_class[:12])}</span>'
    return [names, tier, escape(first.device), layers, checks, digest]


def identity(data: RunData) -> str:
    """Digests, by which two runs are compared, and package versions."""
    if not data.iterations:
        return ""
    selection = data.summary.selection_digest if data.summary else run_selection_digest(data.iterations)
    lora = data.summary.lora_digest if data.summary else data.iterations[-1].lora_digest
    terms = [("selection digest", selection), ("LoRA digest", lora)]
    rows = "".join(f'<dt>{name}</dt><dd class="digest">{escape(value)}</dd>' for name, value in terms)
    if data.summary and data.summary.versions:
        versions = ", ".join(f"{name} {number}" for name, number in data.summary.versions.items())
        rows += f"<dt>versions</dt><dd>{escape(versions)}</dd>"
    note = (
        "Two runs of one configuration and one score class end with the same digests, "
        "whatever the number of explorers and whoever was lost on the way."
    )
    return f'<h2>Identity of the result</h2><p class="note">{note}</p><div class="card"><dl>{rows}</dl></div>'


def configuration(data: RunData) -> str:
    """The resolved configuration, folded away."""
    text = escape(data.config_text.rstrip())
    return (
        '<h2>Configuration</h2><details class="card"><summary>config.yaml, resolved</summary>'
        f"<pre>{text}</pre></details>"
    )
