"""Schedules by optimiser step: the learning rate, and the decays by which `old`, anchor and EMA follow the policy."""

from __future__ import annotations

import math

from solrl_ray.config.objectives import Anchor, OldDecay
from solrl_ray.config.schema import LearnerConfig

ROLLBACK_STEP = 0.5
"""Factor on the learning rate for each rollback, so that the run does not collapse again."""


def learning_rate(config: LearnerConfig, step: int, rollbacks: int = 0) -> float:
    """Learning rate of optimiser step number `step` (from 1). The first step of the decay still has `optimizer.lr`.

    The schedule is PyTorch's LinearLR followed by CosineAnnealingLR, or the inverse square root of arXiv 1706.03762. It
    is a pure function of the step. So runs that resume or go back to a checkpoint need no scheduler state.

    `rollbacks`: number of rollbacks of the run so far (`run.on_collapse`).
    """
    schedule, lr = config.schedule, config.optimizer.lr * ROLLBACK_STEP**rollbacks
    if step <= schedule.warmup:
        return lr * step / schedule.warmup
    if schedule.decay == "none":
        return lr
    done = (step - 1 - schedule.warmup) / schedule.steps
    if schedule.decay == "inverse_sqrt":
        left = 1 / math.sqrt(1 + done)
    elif schedule.decay == "linear":
        left = 1 - min(done, 1.0)
    else:  # rounded, because libraries disagree on a cosine's last bit
        left = round((1 + math.cos(math.pi * min(done, 1.0))) / 2, 12)
    return lr * (schedule.floor + (1 - schedule.floor) * left)


def follower_decay(config: OldDecay | Anchor, steps: int) -> float:
    """The decay d of old <- d * old + (1 - d) * default after step number `steps`; the same for the anchor.

    d = min(slope * steps, cap); for ``copy`` d = 0. This is DiffusionNFT's decay type 1. It is also the ``ema`` adapter
    of advantage-weighted matching (arXiv 2509.25050) as released. There d is small: the anchor follows closely and
    limits the change by a single update.
    """
    return 0.0 if config.is_copy else min(config.slope * steps, config.cap)


def ema_decay(steps: int, cap: float) -> float:
    """The decay d of ema <- d * ema + (1 - d) * default after step number s = `steps`: min((1 + s) / (10 + s), cap)."""
    return min((1 + steps) / (10 + steps), cap)
