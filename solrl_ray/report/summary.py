"""Summary of a finished run, ``summary.json``: its results and the digests of its files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from solrl_ray.common.checked_json import with_checksum
from solrl_ray.common.files import read_regular, replace_file
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage, warnings
from solrl_ray.evaluation import stability
from solrl_ray.evaluation.paired_gain import paired_gain
from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics, added
from solrl_ray.rollout.constant_rewards import constant_rewards
from solrl_ray.rollout.low_fidelity import low_fidelity
from solrl_ray.storage.run_folder import SUMMARY_FILE

COVERED = (
    "metrics.jsonl",
    "trace.json",
    "attestations.json",
    "prompts.json",
    "lora/pytorch_lora_weights.safetensors",
    "lora_best/pytorch_lora_weights.safetensors",
)
"""Files whose digests are in the summary."""
PACKAGES = ("solrl-ray", "torch", "diffusers", "transformers", "peft", "deepspeed", "ray", "numpy")
"""Packages whose versions are in the summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Results of a finished run. Rewards are means over held-out prompts, each with the same fixed seeds."""

    run: str
    """Name of the run."""
    iterations: int
    """Number of iterations, which equals the number of updates."""
    seconds: float
    """Wall-clock seconds from when the workers had started to the end of the run; summed if the run was resumed."""
    reward_base: float
    """Held-out reward of the base model (adapters off)."""
    reward_final: float
    """Held-out reward of the trained policy in its last evaluation."""
    reward_real: float | None
    """Reward of real images; None if the run has none."""
    reward_gain: float
    """reward_final - reward_base."""
    reward_gain_stderr: float | None
    """Standard error of the paired difference over held-out prompts; None with a single prompt."""
    gap_closed: float | None
    """reward_gain / (reward_real - reward_base); None without a gap to close."""
    prompts_improved: int
    """Number of held-out prompts with a higher reward than before training."""
    heldout_prompts: int
    """Number of held-out prompts."""
    heldout_samples: int
    """Number of samples (fixed seeds) per held-out prompt."""
    selection_digest: str
    """`run_selection_digest` of the iterations."""
    lora_digest: str
    """SHA-256 (hex) of the LoRA weights after the last iteration."""
    spearman_mean: float | None
    """Mean rank fidelity (Spearman) over the iterations that have one; None without previews, or if all rewards tie."""
    candidates: int
    """Candidates that were scored or dropped, over all iterations."""
    samples: int
    """Samples trained on, over all iterations."""
    requeued_units: int
    """Units given to another worker, over all iterations."""
    duplicate_results: int
    """Results for units that already had one, over all iterations."""
    preview_precision: str | None
    """Configured precision tier of previews; None without previews. `attestations.json` has the tier of each worker."""
    reward_costs: dict[str, int] = field(default_factory=dict)
    """Use of reward servers and judges over all iterations and evaluations; see `IterationMetrics.reward_costs`."""
    best_updates: int | None = None
    """Number of updates of the best evaluated policy, whose weights are in ``lora_best``. None in summaries of older
    versions.
    """
    reward_best: float | None = None
    """Held-out reward of the best evaluated policy."""
    strategy: str = "two_stage"
    """Rollout strategy."""
    warnings: list[str] = field(default_factory=list)
    """Warnings that readers should see before the results, such as a collapse."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package → version."""
    files: dict[str, dict[str, int | str]] = field(default_factory=dict)
    """File → its size in ``bytes`` and the ``sha256`` of that content, when the summary was written. Files that are
    only appended to, such as ``metrics.jsonl``, may have grown since.
    """


def gap_closed(base: float, final: float, real: float | None) -> float | None:
    """Share of the gap between base and real images that training closed: (`final` - `base`) / (`real` - `base`).

    None unless `real` is above `base`.
    """
    if real is None or not real > base:
        return None
    return (final - base) / (real - base)


def finite_mean(values: Sequence[float | None]) -> float | None:
    """Mean of the finite values; None if there are none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def find_evaluation(evaluations: Sequence[EvaluationMetrics], policy: str) -> EvaluationMetrics | None:
    """The newest evaluation of `policy` (``base``, ``ema`` or ``real``); None if it was not evaluated."""
    matching = [evaluation for evaluation in evaluations if evaluation.policy == policy]
    return max(matching, key=lambda evaluation: evaluation.iteration, default=None)


def run_selection_digest(iterations: Sequence[IterationMetrics]) -> str:
    """SHA-256 (hex) over the selection digests of the iterations, one per line, in iteration order."""
    ordered = sorted(iterations, key=lambda record: record.iteration)
    text = "".join(f"{record.selection_digest}\n" for record in ordered)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def package_versions() -> dict[str, str]:
    """Package → version, for the packages that affect results; packages that are not installed are left out."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def summarize(
    config: Config, iterations: Sequence[IterationMetrics], evaluations: Sequence[EvaluationMetrics], *, seconds: float
) -> Summary:
    """Summarise a finished run that took `seconds` of wall time; `iterations` has one record per iteration.

    Raises ValueError without iterations, without evaluations of ``base`` and ``ema``, or if these cannot be paired.
    """
    base, final = find_evaluation(evaluations, "base"), find_evaluation(evaluations, "ema")
    real = find_evaluation(evaluations, "real")
    if not iterations or base is None or final is None:
        have = sorted({evaluation.policy for evaluation in evaluations})
        raise ValueError(
            f"A summary needs iterations and evaluations of base and ema; "
            f"there are {len(iterations)} iterations and evaluations of {have}."
        )
    gain = paired_gain(base, final)
    reward_real = None if real is None else real.reward_mean
    last = max(iterations, key=lambda record: record.iteration)
    top = stability.best(evaluations, trained=True) or final
    return Summary(
        run=config.run.name,
        iterations=len(iterations),
        seconds=seconds,
        reward_base=base.reward_mean,
        reward_final=final.reward_mean,
        reward_real=reward_real,
        reward_gain=gain.mean,
        reward_gain_stderr=gain.stderr,
        gap_closed=gap_closed(base.reward_mean, final.reward_mean, reward_real),
        prompts_improved=gain.gained,
        heldout_prompts=len(gain.differences),
        heldout_samples=max(len(rewards) for rewards in base.rewards.values()),
        selection_digest=run_selection_digest(iterations),
        lora_digest=last.lora_digest,
        spearman_mean=finite_mean([record.spearman for record in iterations]),
        candidates=sum(record.candidates for record in iterations),
        samples=sum(record.samples for record in iterations),
        requeued_units=sum(record.requeued_units for record in iterations),
        duplicate_results=sum(record.duplicate_results for record in iterations),
        preview_precision=None if is_one_stage(config) else config.rollout.explore.precision,
        reward_costs=added([i.reward_costs for i in iterations] + [e.reward_costs for e in evaluations]),
        best_updates=top.iteration,
        reward_best=top.reward_mean,
        strategy=config.rollout.strategy,
        warnings=all_warnings(config, iterations, evaluations),
        versions=package_versions(),
    )


def all_warnings(
    config: Config, iterations: Sequence[IterationMetrics], evaluations: Sequence[EvaluationMetrics]
) -> list[str]:
    """Warnings from the configuration and from the measurements, as sentences."""
    measured = [constant_rewards(config, iterations), low_fidelity(config, iterations)]
    return [*warnings(config), *filter(None, measured), *stability.warnings(iterations, evaluations)]


def write_summary(folder: Path, summary: Summary) -> Path:
    """Write ``summary.json`` into a run folder, with a checksum and the digests of other files; returns its path."""
    path = folder / SUMMARY_FILE
    summary = replace(summary, files={name: stamp(folder / name) for name in COVERED if (folder / name).is_file()})
    replace_file(path, (json.dumps(with_checksum(asdict(summary)), indent=2) + "\n").encode())
    return path


def unchanged(run: Path, name: str, summary: Summary) -> bool:
    """True if the file still has the digest in the summary. Also True if an older version wrote no digest for it."""
    current = stamp(run / name)
    return summary.files.get(name, current) == current


def stamp(path: Path) -> dict[str, int | str]:
    """Size (``bytes``) and SHA-256 (``sha256``, hex) of a file."""
    content = read_regular(path)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
