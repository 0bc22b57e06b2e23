"""The numbers of a finished run, and digests of its files: `summary.json`."""

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
"""Files whose digests a summary has."""
PACKAGES = ("solrl-ray", "torch", "diffusers", "transformers", "peft", "deepspeed", "ray", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One finished run in numbers. Rewards are means over held-out prompts of their fixed addresses."""

    run: str
    iterations: int
    seconds: float
    """Wall time of the run, from when its workers had started to the end; over all its processes if it was resumed."""
    reward_base: float
    """Adapters off."""
    reward_final: float
    """The trained policy, as last evaluated."""
    reward_real: float | None
    """Reference pictures; None if the run has none."""
    reward_gain: float
    """reward_final - reward_base."""
    reward_gain_stderr: float | None
    """Standard error of the paired difference over held-out prompts; None with a single prompt."""
    gap_closed: float | None
    """reward_gain / (reward_real - reward_base); None without a gap to close."""
    prompts_improved: int
    heldout_prompts: int
    heldout_samples: int
    """Fixed addresses per held-out prompt."""
    selection_digest: str
    """`run_selection_digest` of the iterations."""
    lora_digest: str
    """LoRA digest after the last iteration."""
    spearman_mean: float | None
    """Mean over the iterations where it is defined; None if nowhere (no previews, or all rewards tied)."""
    candidates: int
    samples: int
    requeued_units: int
    duplicate_results: int
    preview_precision: str | None
    """The configured tier; attestations.json has each worker's actual tier. None without previews."""
    reward_costs: dict[str, int] = field(default_factory=dict)
    """Of all iterations and evaluations: see `IterationMetrics.reward_costs`."""
    best_updates: int | None = None
    """Updates of the best evaluated policy, whose weights are in ``lora_best``; None in summaries of older versions."""
    reward_best: float | None = None
    """Its reward."""
    strategy: str = "two_stage"
    """The rollout strategy."""
    warnings: list[str] = field(default_factory=list)
    """What a reader of these numbers must know first."""
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, int | str]] = field(default_factory=dict)
    """State of other files when the summary was written: file → its first ``bytes`` and their ``sha256``. Metrics and
    spans may have grown since.
    """


def gap_closed(base: float, final: float, real: float | None) -> float | None:
    """(`final` - `base`) / (`real` - `base`); None unless `real` is above `base`."""
    if real is None or not real > base:
        return None
    return (final - base) / (real - base)


def finite_mean(values: Sequence[float | None]) -> float | None:
    """Mean of the finite values; None if there is none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def find_evaluation(evaluations: Sequence[EvaluationMetrics], policy: str) -> EvaluationMetrics | None:
    """The newest evaluation of `policy` (``base``, ``ema``, ``real``), or None."""
    matching = [evaluation for evaluation in evaluations if evaluation.policy == policy]
    return max(matching, key=lambda evaluation: evaluation.iteration, default=None)


def run_selection_digest(iterations: Sequence[IterationMetrics]) -> str:
    """SHA-256 (hex) over the iterations' selection digests, one a line, in iteration order."""
    ordered = sorted(iterations, key=lambda record: record.iteration)
    text = "".join(f"{record.selection_digest}\n" for record in ordered)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def package_versions() -> dict[str, str]:
    """Versions of the packages that affect results; missing packages are left out."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def summarize(
    config: Config, iterations: Sequence[IterationMetrics], evaluations: Sequence[EvaluationMetrics], *, seconds: float
) -> Summary:
    """Summary of a finished run that took `seconds` of wall time; `iterations` has one record per iteration.

    Raises ValueError: no iteration, no evaluation of ``base`` or ``ema``, or evaluations that cannot be paired.
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
    """Warnings by the configuration, and by what was measured."""
    measured = [constant_rewards(config, iterations), low_fidelity(config, iterations)]
    return [*warnings(config), *filter(None, measured), *stability.warnings(iterations, evaluations)]


def write_summary(folder: Path, summary: Summary) -> Path:
    """Writes ``summary.json`` into a run folder, with its checksum and the digests of other files; returns its path."""
    path = folder / SUMMARY_FILE
    summary = replace(summary, files={name: stamp(folder / name) for name in COVERED if (folder / name).is_file()})
    replace_file(path, (json.dumps(with_checksum(asdict(summary)), indent=2) + "\n").encode())
    return path


def unchanged(run: Path, name: str, summary: Summary) -> bool:
    """True if the file has the bytes that the summary states, or the summary, of an older version, states none."""
    found = stamp(run / name)
    return summary.files.get(name, found) == found


def stamp(path: Path) -> dict[str, int | str]:
    """Number of bytes and SHA-256 of a file."""
    content = read_regular(path)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
