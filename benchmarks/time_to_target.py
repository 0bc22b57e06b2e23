"""How many times sooner a variant has a share of its method's `direct` gain: for `convergence.py`.

Curves are means over seeds, and the target is a share of the gain of `direct`'s mean curve, so that `direct` itself
always comes to all of it. A ratio's interval is that of a bootstrap over seeds, of both variants, in which the target
is drawn with them. A draw that never comes to its target counts as 0 times as soon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from variants import DIRECTS, VARIANTS

from solrl_ray.report.curve import SHARES, Curve, Point
from solrl_ray.rollout.audit import CONFIDENCE, student_quantile

RESAMPLES = 2000
Rewards = NDArray[np.float64]
Runs = Mapping[str, Mapping[str, Any]]
"""Seed → ``iterations`` and ``reward`` of its evaluations, as lists."""


def mean_with_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half width of its 95 % interval by Student's t; None for one value."""
    mean, count = math.fsum(values) / len(values), len(values)
    if count < 2:
        return mean, None
    return mean, student_quantile(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)


def together(runs: Runs) -> tuple[list[int], Rewards]:
    """Iterations at which every seed was evaluated, and held-out rewards there, [seeds, evaluations].

    Raises ValueError: seeds were evaluated at different iterations.
    """
    common = min(len(run["iterations"]) for run in runs.values())
    grids = {tuple(run["iterations"][:common]) for run in runs.values()}
    if len(grids) > 1:
        raise ValueError(f"runs of one variant were evaluated after other iterations: {sorted(grids)}")
    return list(grids.pop()), np.array([run["reward"][:common] for run in runs.values()])


def comparisons(runs: Mapping[str, Runs], prices: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Of each variant whose method's `direct` is there: iterations to each share of the gain of `direct`, and by model
    how many times sooner in charged seconds, ``[ratio, low, high]``; low and high are None if a side has one seed, the
    ratio is if the target was not reached.

    Args:
        runs: variant → its runs.
        prices: variant → model → seconds of an iteration.
    """
    found = {}
    for name, mine in runs.items():
        reference = DIRECTS[VARIANTS[name].method]
        if reference not in runs:
            continue
        times = _times(together(mine), together(runs[reference]))
        drawn = _resampled(together(mine), together(runs[reference]))
        rows = {}
        for place, share in enumerate(SHARES):
            sooner = {}
            for model in prices[name]:
                cheaper = prices[reference][model] / prices[name][model]
                low, high = (None, None) if drawn is None else np.quantile(drawn[:, place], _ENDS) * cheaper
                ratio = _ratio(*times[place])
                sooner[model] = [ratio and ratio * cheaper, low, high]
            mine_at, other_at = (time if math.isfinite(time) else None for time in times[place])
            rows[f"{share:g}"] = {"iterations": mine_at, "direct": other_at, "times_sooner": sooner}
        last = [run["reward"][-1] for run in mine.values()]
        found[name] = {"reference": reference, "targets": rows, "final": list(mean_with_interval(last))}
    return found


_ENDS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)


def _times(mine: tuple[list[int], Rewards], other: tuple[list[int], Rewards]) -> list[tuple[float, float]]:
    """Of each share: iterations of the variant and of `direct`, infinite if it was not reached."""
    curves = [_curve(grid, rewards.mean(axis=0)) for grid, rewards in (mine, other)]
    base, last = curves[1].points[0].reward, curves[1].points[-1].reward
    if last <= base:
        return [(math.inf, math.inf)] * len(SHARES)
    targets = [min(base + share * (last - base), last) for share in SHARES]  # the sum may be rounded beyond the last
    times = [[point.updates if (point := curve.reaches(t)) else math.inf for curve in curves] for t in targets]
    return [(mine_at, other_at) for mine_at, other_at in times]


def _curve(grid: Sequence[int], rewards: Rewards) -> Curve:
    points = (
        Point(updates, math.nan, reward, math.nan) for updates, reward in zip(grid, rewards.tolist(), strict=True)
    )
    return Curve(tuple(points), gpus=0.0)


def _ratio(mine: float, other: float) -> float | None:
    return other / mine if math.isfinite(mine) and math.isfinite(other) and mine > 0 else None


def _resampled(mine: tuple[list[int], Rewards], other: tuple[list[int], Rewards]) -> Rewards | None:
    """[draws, shares] of ratios, 0 where the variant did not come so far; None if one of them has a single seed."""
    random, counts = np.random.default_rng(0), [len(rewards) for _, rewards in (mine, other)]
    if min(counts) < 2:
        return None
    rows = []
    for _ in range(RESAMPLES):
        sides = [
            (grid, rewards[random.integers(n, size=n)])
            for (grid, rewards), n in zip((mine, other), counts, strict=True)
        ]
        rows.append([_ratio(*times) or 0.0 for times in _times(*sides)])
    return np.array(rows)
