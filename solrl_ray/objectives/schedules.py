"""The learning rate, and how other policies follow the trained one, by number of optimiser steps.

Steps are counted from 1; the functions raise ValueError for fewer.
"""

from __future__ import annotations

import math

from solrl_ray.config.objectives import Anchor, OldDecay
from solrl_ray.config.schema import LearnerConfig


def learning_rate(config: LearnerConfig, step: int) -> float:
    """Of optimiser step number `step`. The first one of the fall still has the whole `optimizer.lr`."""
    _check(step)
    schedule = config.schedule
    if step <= schedule.warmup:
        return config.optimizer.lr * step / schedule.warmup
    if schedule.decay == "none":
        return config.optimizer.lr
    done = min((step - 1 - schedule.warmup) / schedule.steps, 1.0)
    # Rounded, because libraries disagree on a cosine's last bit.
    left = 1 - done if schedule.decay == "linear" else round((1 + math.cos(math.pi * done)) / 2, 12)
    return config.optimizer.lr * (schedule.floor + (1 - schedule.floor) * left)


def follower_decay(config: OldDecay | Anchor, steps: int) -> float:
    """d of old <- d * old + (1 - d) * default, and likewise of anchor, applied after step number `steps`.

    min(slope * steps, cap): DiffusionNFT's decay type 1, and the ``ema`` adapter of advantage-weighted matching (arXiv
    2509.25050) as released, whose d is small: the anchor follows closely and limits what one update may change.
    ``copy``: 0.
    """
    _check(steps)
    return 0.0 if config.kind == "copy" else min(config.slope * steps, config.cap)


def ema_decay(steps: int, cap: float) -> float:
    """d of ema <- d * ema + (1 - d) * default after step number `steps`: min((1 + s) / (10 + s), cap)."""
    _check(steps)
    return min((1 + steps) / (10 + steps), cap)


def _check(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps are counted from 1, got {steps}")
