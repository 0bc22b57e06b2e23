"""How the sampling policy and the evaluated average follow the trained policy, by number of optimiser steps."""

from __future__ import annotations

from solrl_ray.config.objectives import Anchor, OldDecay


def old_decay(config: OldDecay, steps: int) -> float:
    """d of old <- d * old + (1 - d) * default, applied after step number `steps` (the first is 1).

    ``copy``: always 0. ``linear``: min(slope * steps, cap) (DiffusionNFT's decay type 1).

    Raises:
        ValueError: `steps` is below 1.
    """
    _check(steps)
    return 0.0 if config.kind == "copy" else min(config.slope * steps, config.cap)


def anchor_decay(config: Anchor, steps: int) -> float:
    """d of anchor <- d * anchor + (1 - d) * default, applied after step number `steps`: min(slope * steps, cap).

    Source: the ``ema`` adapter of advantage-weighted matching (arXiv 2509.25050) as released. d is small: the anchor
    follows closely, and holds back what one update may do.
    """
    _check(steps)
    return min(config.slope * steps, config.cap)


def ema_decay(steps: int, cap: float) -> float:
    """d of ema <- d * ema + (1 - d) * default after step number `steps`: min((1 + s) / (10 + s), cap).

    Raises:
        ValueError: `steps` is below 1.
    """
    _check(steps)
    return min((1 + steps) / (10 + steps), cap)


def _check(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps are counted from 1, got {steps}")
