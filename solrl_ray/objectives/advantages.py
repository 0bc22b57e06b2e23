"""Advantages: the distance of a sample's reward from the mean reward of its prompt, divided by a scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from solrl_ray.config.objectives import Advantage
from solrl_ray.objectives import gdpo
from solrl_ray.objectives.gdpo import EPSILON, statistics

UNBIASED_EPSILON = 1e-8
"""Added to the unbiased standard deviation, as in DanceGRPO."""


def advantages(
    rewards: NDArray[np.float64],
    groups: NDArray[np.int64],
    config: Advantage,
    *,
    components: NDArray[np.float64] | None = None,
    weights: Sequence[float] = (),
) -> NDArray[np.float64]:
    """A_i = (R_i - mean of i's group) / (std + 1e-4), float64 [n], not clipped (the objective clips).

    `config.std` chooses the divisor:

    - ``global``: population standard deviation of all rewards about their common mean, which includes the differences
      between prompts (Sol-RL, DiffusionNFT).
    - ``group``: population standard deviation of the prompt's rewards (GRPO).
    - ``group_unbiased``: the same with n - 1, plus 1e-8 instead of 1e-4 (DanceGRPO).
    - ``none``: 1, without the 1e-4.
    - ``gdpo``: see `objectives.gdpo`.

    If all rewards of a group are equal, its advantages are 0. All sums are correctly rounded, so the order of the
    samples changes no bit.

    Args:
        rewards: rewards of the regenerated, full-precision samples of one iteration, [n].
        groups: the group of each sample, one integer per prompt, [n].
        components: values of the single rewards for ``gdpo``, [n, rewards]; None: `rewards` is the only one.
        weights: weights of the single rewards.

    Source: DiffusionNFT (arXiv 2509.16117) as released.
    """
    if config.std == "gdpo":
        if components is None:
            return gdpo.advantages(rewards[:, None], groups, [1.0])
        return gdpo.advantages(components, groups, weights)
    result = np.empty_like(rewards)
    _, global_std = statistics(rewards, ddof=0)
    for group in np.unique(groups):
        members = groups == group
        mean, std = statistics(rewards[members], ddof=0)
        result[members] = (rewards[members] - mean) / _divisor(config, std, int(members.sum()), global_std)
    return result


def _divisor(config: Advantage, std: float, count: int, global_std: float) -> float:
    if config.std == "none":
        return 1.0
    if config.std == "global":
        return global_std + EPSILON
    if config.std == "group":
        return std + EPSILON
    # Scaled from the population's deviation: `ddof` would give other bits.
    return std * math.sqrt(count / max(1, count - 1)) + UNBIASED_EPSILON
