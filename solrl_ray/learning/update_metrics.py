"""Metrics of an update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from solrl_ray.learning.open_update import OpenUpdate, Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """Metrics of one iteration's update. Losses are means over the samples and passes of all ranks and steps."""

    iteration: int
    revision: int
    """Revision of `old` after the update."""
    loss: float
    policy_loss: float
    kl: float
    """Divergence from the reference, before weighting."""
    gradient_norm: float
    """Global L2 norm of the gradient before clipping, mean over optimiser steps."""
    samples: int
    passes: int
    """Number of forward and backward passes on this rank."""
    seconds: float
    ratio_mean: float | None = None
    """Mean of p_theta / p_old, trained over sampling policy; None if the objective has no ratio."""
    ratio_deviation: float | None = None
    """Largest abs(ratio - 1)."""
    first_ratio_deviation: float | None = None
    """Largest abs(ratio - 1) in the first optimiser step; 0 if the sampling policy is a copy of the trained one."""
    clip_fraction: float | None = None
    """Share of samples and passes whose ratio, or velocity, was outside the clip range; None without a clip range."""


Step = tuple[Sums, float]
"""Result of an optimiser step: sums over all ranks, and the gradient norm."""


def update_metrics(update: OpenUpdate, done: Sequence[Step], *, revision: int) -> UpdateMetrics:
    """The metrics of a finished update; `done` has one entry per optimiser step."""
    loss, policy_loss, kl, ratio, clipped = (
        math.fsum(float(sums.shares[i]) for sums, _ in done) / len(done) for i in range(5)
    )
    deviations = [float(sums.deviation) for sums, _ in done]
    has_ratio = done[0][0].has_ratio
    return UpdateMetrics(
        iteration=update.iteration,
        revision=revision,
        loss=loss,
        policy_loss=policy_loss,
        kl=kl,
        gradient_norm=math.fsum(norm for _, norm in done) / len(done),
        samples=len(update.samples),
        passes=sum(sums.passes for sums, _ in done),
        seconds=update.seconds,
        ratio_mean=ratio if has_ratio else None,
        ratio_deviation=max(deviations) if has_ratio else None,
        first_ratio_deviation=deviations[0] if has_ratio else None,
        clip_fraction=clipped if done[0][0].has_clip else None,
    )
