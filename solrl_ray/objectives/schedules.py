"""How the sampling policy and the evaluated average follow the trained policy, by number of updates."""

from __future__ import annotations

from solrl_ray.config.schema import OldDecay


def old_decay(config: OldDecay, updates: int) -> float:
    """d of old <- d * old + (1 - d) * default, applied after update number `updates` (the first is 1).

    ``copy``: always 0. ``linear``: min(slope * updates, cap) (DiffusionNFT's decay type 1).

    Raises:
        ValueError: `updates` is below 1.
    """
    _check(updates)
    return 0.0 if config.kind == "copy" else min(config.slope * updates, config.cap)


def ema_decay(updates: int, cap: float) -> float:
    """d of ema <- d * ema + (1 - d) * default after update number `updates`: min((1 + s) / (10 + s), cap).

    Raises:
        ValueError: `updates` is below 1.
    """
    _check(updates)
    return min((1 + updates) / (10 + updates), cap)


def _check(updates: int) -> None:
    if updates < 1:
        raise ValueError(f"updates are counted from 1, got {updates}")
