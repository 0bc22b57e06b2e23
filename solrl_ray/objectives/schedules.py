"""How the sampling policy and the evaluated average follow the trained policy, by number of optimiser steps.

Steps are counted from 1; the functions raise ValueError for fewer.
"""

from __future__ import annotations

from solrl_ray.config.objectives import Anchor, OldDecay


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
