"""Gain between two evaluations of the same held-out prompts, with its standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass

from solrl_ray.metrics.records import EvaluationMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedGain:
    """Change of the held-out reward, paired by prompt at the same addresses."""

    differences: dict[str, float]
    """Prompt id → mean reward after - mean reward before."""
    mean: float
    """Mean of the differences over prompts."""
    stderr: float | None
    """Standard error of `mean`: sample standard deviation of the differences / sqrt(prompts). None for one prompt."""

    @property
    def gained(self) -> int:
        """Number of prompts that improved (difference above 0)."""
        return sum(value > 0 for value in self.differences.values())


def paired_gain(before: EvaluationMetrics, after: EvaluationMetrics) -> PairedGain:
    """The gain per prompt between two evaluations, its mean over prompts, and the standard error of that mean.

    Pairing removes the spread between easy and hard prompts, which is the same before and after.

    Raises ValueError if the evaluations have different prompts, a different number of rewards for a prompt, or none.
    """
    if before.rewards.keys() != after.rewards.keys():
        different = len(before.rewards.keys() ^ after.rewards.keys())
        raise ValueError(f"The evaluations of {before.policy} and {after.policy} differ in {different} prompts.")
    differences = {}
    for prompt_id in sorted(before.rewards):
        old, new = before.rewards[prompt_id], after.rewards[prompt_id]
        if len(old) != len(new) or not old:
            raise ValueError(f"Prompt {prompt_id} has {len(old)} rewards before and {len(new)} after.")
        differences[prompt_id] = math.fsum(new) / len(new) - math.fsum(old) / len(old)
    count = len(differences)
    if count == 0:
        raise ValueError(f"The evaluations of {before.policy} and {after.policy} have no prompts.")
    mean = math.fsum(differences.values()) / count
    squares = math.fsum((value - mean) ** 2 for value in differences.values())
    stderr = math.sqrt(squares / (count - 1) / count) if count > 1 else None
    return PairedGain(differences=differences, mean=mean, stderr=stderr)
