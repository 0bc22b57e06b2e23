"""How much two evaluations of the same held-out prompts differ: the mean gain and its standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass

from solrl_ray.metrics.records import EvaluationMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedGain:
    """The change by training, prompt by prompt at the same addresses."""

    differences: dict[str, float]
    """Prompt id → mean reward after - mean reward before."""
    mean: float
    stderr: float | None
    """Sample standard deviation of the differences / sqrt(prompts); None with a single prompt."""

    @property
    def gained(self) -> int:
        """Prompts whose difference is above 0."""
        return sum(value > 0 for value in self.differences.values())


def paired_gain(before: EvaluationMetrics, after: EvaluationMetrics) -> PairedGain:
    """Per-prompt mean difference between two evaluations, and the standard error of its mean over prompts.

    Pairing removes the spread between easy and hard prompts, which training does not change.

    Raises ValueError: the evaluations differ in their prompts or in the number of addresses of a prompt.
    """
    if before.rewards.keys() != after.rewards.keys():
        different = len(before.rewards.keys() ^ after.rewards.keys())
        raise ValueError(f"Evaluations {before.policy} and {after.policy} differ in {different} prompts.")
    differences = {}
    for prompt_id in sorted(before.rewards):
        old, new = before.rewards[prompt_id], after.rewards[prompt_id]
        if len(old) != len(new) or not old:
            raise ValueError(f"Prompt {prompt_id} has {len(old)} rewards before and {len(new)} after.")
        differences[prompt_id] = math.fsum(new) / len(new) - math.fsum(old) / len(old)
    count = len(differences)
    if count == 0:
        raise ValueError(f"Evaluations {before.policy} and {after.policy} hold no prompt.")
    mean = math.fsum(differences.values()) / count
    squares = math.fsum((value - mean) ** 2 for value in differences.values())
    stderr = math.sqrt(squares / (count - 1) / count) if count > 1 else None
    return PairedGain(differences=differences, mean=mean, stderr=stderr)
