"""What the noise scale of a run's gradient (`learning.noise_scale`) says about the shape of its iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import IterationMetrics

RECENT = 20
"""Newest iterations that are taken together: one alone says little."""
FACTOR = 4.0
"""How far the noise scale must be from the prompts of a step for advice: a step has then 80 % or 20 % of the progress
that it would have without noise.
"""


def noise_scale(records: Sequence[IterationMetrics]) -> float | None:
    """Prompts a step at which noise takes half of the progress, of the newest iterations; infinite if no signal can be
    told from the noise; None if they measured none.

    The ratio of the sums, because the ratio of an iteration's own two estimates is far off when its signal is small.
    """
    pairs = [(each.gradient_signal, each.gradient_noise) for each in records[-RECENT:]]
    signal = math.fsum(one for one, _ in pairs if one is not None)
    noise = math.fsum(one for _, one in pairs if one is not None)
    if not noise:
        return None
    return noise / signal if signal > 0 else math.inf


def advice(config: Config, records: Sequence[IterationMetrics]) -> str:
    """What would help, in two sentences; empty if it was not measured."""
    scale = noise_scale(records)
    if scale is None:
        return ""
    prompts = config.rollout.prompts // config.learner.updates
    measured = f"{scale:.3g} prompts" if math.isfinite(scale) else "more prompts than can be told"
    share = prompts / (prompts + scale)
    said = (
        f"Gradient noise scale: {measured}, with {config.rollout.keep} seeds each, in the last iterations. A step of "
        f"{prompts} has {share:.0%} of the progress that it would have without noise. "
    )
    if scale > FACTOR * prompts:
        return said + "More prompts a step, more seeds a prompt or a larger pool would help; so would a smaller step."
    if scale < prompts / FACTOR:
        return said + "Fewer prompts or seeds a step would teach nearly as much, and a larger pool would help little."
    return said + "Neither fewer nor more prompts, seeds or a larger pool promise much."
