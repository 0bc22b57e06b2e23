"""The learning rate, and how closely `old`, an anchor and the EMA follow the trained policy, by number of optimiser
steps.
"""

from __future__ import annotations

import math

from solrl_ray.config.objectives import Anchor, OldDecay
from solrl_ray.config.schema import LearnerConfig

ROLLBACK_STEP = 0.5
"""What a rollback multiplies the learning rate by: the run must not make the same fall again."""


def learning_rate(config: LearnerConfig, step: int, rollbacks: int = 0) -> float:
    """Of optimiser step number `step`. The first one of the fall still has the whole `optimizer.lr`.

    As PyTorch's LinearLR, then CosineAnnealingLR; or the inverse square root of arXiv 1706.03762. It is a pure function
    of the step, so that a resumed run, or one that goes back to a checkpoint, has the rates of its steps without a
    scheduler's state.

    `rollbacks`: of the run so far (`run.on_collapse`).
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
    """d of old <- d * old + (1 - d) * default, and likewise of anchor, applied after step number `steps`.

    min(slope * steps, cap): DiffusionNFT's decay type 1, and the ``ema`` adapter of advantage-weighted matching (arXiv
    2509.25050) as released, whose d is small: the anchor follows closely and limits what one update may change.
    ``copy``: 0.
    """
    return 0.0 if config.is_copy else min(config.slope * steps, config.cap)


def ema_decay(steps: int, cap: float) -> float:
    """d of ema <- d * ema + (1 - d) * default after step number `steps`: min((1 + s) / (10 + s), cap)."""
    return min((1 + steps) / (10 + steps), cap)
