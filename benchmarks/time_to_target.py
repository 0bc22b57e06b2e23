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

from solrl_ray.report.curve import SHARES
from solrl_ray.rollout.audit import CONFIDENCE, student_quantile

RESAMPLES = 2000
ENDS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
Rewards = NDArray[np.float64]
Runs = Mapping[str, Mapping[str, Any]]
"""Seed → ``iterations`` and ``reward`` of its evaluations, as lists."""


def mean_with_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half width of its 95 % interval by Student's t; None for one value."""
    mean, count = math.fsum(values) / len(values), len(values)
    if count < 2:
        return mean, None
    return mean, student_quantile(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)


def whole_runs(results: Mapping[str, Any]) -> dict[str, Runs]:
    """Of a results file's runs those that came to its last iteration, by variant; a variant without any is left out.

    The last evaluation of a run that was cut short is no final reward, and its gain is not the whole one.
    """
    last = results["iterations"]
    whole = {
        name: {seed: run for seed, run in runs.items() if run["iterations"][-1] == last}
        for name, runs in results["runs"].items()
    }
    return {name: runs for name, runs in whole.items() if runs}


def together(runs: Runs) -> tuple[list[int], Rewards]:
    """Iterations after which all seeds were evaluated, and held-out rewards then, [seeds, evaluations].

    Raises ValueError: seeds were evaluated at different iterations.
    """
    grids = {tuple(run["iterations"]) for run in runs.values()}
    if len(grids) > 1:
        raise ValueError(f"runs of one variant were evaluated after other iterations: {sorted(grids)}")
    return list(grids.pop()), np.array([run["reward"] for run in runs.values()])


def comparisons(runs: Mapping[str, Runs], prices: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Of each variant whose method's `direct` is there: iterations to each share of the gain of `direct`, and by model
    how many times sooner in charged seconds, ``[ratio, low, high]``; low and high are None of `direct` itself and if a
    side has one seed, the ratio is if the target was not reached.

    Args:
        runs: variant → its runs, whole ones (`whole_runs`).
        prices: variant → model → seconds of an iteration.
    """
    found = {}
    for name, mine in runs.items():
        reference = DIRECTS[VARIANTS[name].method]
        if reference not in runs:
            continue
        times = _times(*_means(mine, runs[reference]))
        sooner = {}
        for model in prices[name]:
            cheaper = prices[reference][model] / prices[name][model]
            sooner[model] = times_sooner(mine, runs[reference], cheaper, interval=name != reference)
        rows = {}
        for column, share in enumerate(SHARES):
            mine_at, other_at = (at if math.isfinite(at := float(side[0, column])) else None for side in times)
            of_model = {model: ratios[column] for model, ratios in sooner.items()}
            rows[f"{share:g}"] = {"iterations": mine_at, "direct": other_at, "times_sooner": of_model}
        last = [run["reward"][-1] for run in mine.values()]
        found[name] = {"reference": reference, "targets": rows, "final": list(mean_with_interval(last))}
    return found


def times_sooner(mine: Runs, other: Runs, cheaper: float, *, interval: bool = True) -> list[list[float | None]]:
    """By share of the other's gain, how many times sooner `mine` has it: ``[ratio, low, high]``, as in `comparisons`.

    Args:
        cheaper: what an iteration of `other` costs, over what one of `mine` does.
    """
    ratios = _ratios(*_times(*_means(mine, other)))[0]
    drawn = _resampled(together(mine), together(other)) if interval else None
    ends = [[None, None]] * len(SHARES) if drawn is None else (np.quantile(drawn, ENDS, axis=0) * cheaper).T.tolist()
    return [[float(ratio * cheaper) or None, *pair] for ratio, pair in zip(ratios, ends, strict=True)]


def _means(*sides: Runs) -> list[tuple[list[int], Rewards]]:
    """Of each side its mean curve, [1, evaluations]."""
    return [(grid, rewards.mean(axis=0, keepdims=True)) for grid, rewards in map(together, sides)]


def _times(mine: tuple[list[int], Rewards], other: tuple[list[int], Rewards]) -> tuple[Rewards, Rewards]:
    """Iterations of a variant and of `direct` to each share, [draws, shares], infinite where it was not reached.

    Args:
        mine, other: iterations, and mean curves [draws, evaluations].
    """
    base, last = other[1][:, :1], other[1][:, -1:]
    targets = np.minimum(base + np.array(SHARES) * (last - base), last)  # the sum may be rounded beyond the last
    targets[np.broadcast_to(last <= base, targets.shape)] = np.inf  # no gain, no share of it
    return _reached(*mine, targets), _reached(*other, targets)


def _reached(grid: Sequence[int], curves: Rewards, targets: Rewards) -> Rewards:
    """When each curve first had its targets, on straight lines between evaluations; 0 if from the first on."""
    above = curves[:, None, :] >= targets[:, :, None]  # [draws, shares, evaluations]
    place = np.maximum(above.argmax(axis=2), 1)
    x, y = np.array(grid, dtype=np.float64), np.take_along_axis
    low, high = y(curves, place - 1, axis=1), y(curves, place, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        between = x[place - 1] + (targets - low) / (high - low) * (x[place] - x[place - 1])
    return np.where(above[:, :, 0], 0.0, np.where(above.any(axis=2), between, np.inf))


def _ratios(mine: Rewards, other: Rewards) -> Rewards:
    """How many times sooner; 0 where the variant did not come so far or nobody did, which no share of a gain is."""
    there = np.isfinite(mine) & np.isfinite(other) & (mine > 0)
    return np.divide(other, mine, out=np.zeros_like(mine), where=there)


def _resampled(mine: tuple[list[int], Rewards], other: tuple[list[int], Rewards]) -> Rewards | None:
    """[draws, shares] of ratios of means over drawn seeds; None if one of the two has a single seed."""
    random, sides = np.random.default_rng(0), []
    for grid, rewards in (mine, other):
        if len(rewards) < 2:
            return None
        drawn = random.integers(len(rewards), size=(RESAMPLES, len(rewards)))
        sides.append((grid, rewards[drawn].mean(axis=1)))
    return _ratios(*_times(*sides))


def row(results: Mapping[str, Any], variant: str) -> list[str]:
    """Of a results file and a variant that it compares: seeds, final reward, words that hold (empty: not judged), and
    by share of the gain iterations, and how many times sooner as FLUX.1-dev.
    """
    found = results["comparisons"][variant]
    targets = found["targets"].values()
    steps = " / ".join("–" if t["iterations"] is None else f"{t['iterations']:.1f}" for t in targets)
    sooner = " / ".join(times(t["times_sooner"]["flux1_dev"]) for t in targets)
    of_seed = whole_runs(results)[variant].values()
    words = [run["words"]["ema"] for run in of_seed if run["words"]]
    held = plus_minus(*mean_with_interval(words)) if words else ""
    return [str(len(of_seed)), plus_minus(*found["final"]), held, steps, sooner]


def times(ratio: Sequence[float | None]) -> str:
    """A ratio with its interval, if it has one."""
    middle, low, high = ratio
    if middle is None:
        return "–"
    return f"{middle:.2f}" if low is None or high is None else f"{middle:.2f} ({low:.2f}–{high:.2f})"


def plus_minus(mean: float, half: float | None) -> str:
    return f"{mean:.3f}" if half is None else f"{mean:.3f} ± {half:.3f}"
