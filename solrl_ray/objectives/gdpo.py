"""Standardises each reward by its statistics in the group, then sums them (GDPO, arXiv 2601.05242).

In a plain sum the reward with the largest variance dominates, and different combinations of rewards get the same
advantage. GDPO standardises each reward k of a prompt's group separately::

    c = sum_k w_k (r_k - mean_k) / (std_k + 1e-4)

Selection ranks a pool by c, the normalised sum. Advantages are c standardised again, over all samples of an iteration.
Standard deviations are unbiased (n - 1), as in the released code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

EPSILON = 1e-4
"""Added to every standard deviation, in units of the reward."""


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Computes normalised sums c with the statistics of one group."""

    weights: tuple[float, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...]

    @classmethod
    def of(cls, components: ArrayLike, weights: Sequence[float]) -> Normalizer:
        """Build it from the rewards of a group.

        Args:
            components: unweighted value of each reward, [n >= 1, rewards].
            weights: weight of each reward.
        """
        columns = [statistics(column) for column in np.asarray(components, dtype=np.float64).T]
        return cls(tuple(weights), *(tuple(values) for values in zip(*columns, strict=True)))

    def __call__(self, components: ArrayLike) -> NDArray[np.float64]:
        """c of each row of `components` [n, rewards], float64 [n]."""
        values = np.asarray(components, dtype=np.float64)
        total = np.zeros(len(values))
        for column, weight, mean, std in zip(values.T, self.weights, self.means, self.stds, strict=True):
            total += weight * ((column - mean) / (std + EPSILON))
        return total


def normalized_sums(components: ArrayLike, weights: Sequence[float]) -> NDArray[np.float64]:
    """c of each member of one group, float64 [n], with this group's statistics; arguments as in `Normalizer.of`."""
    return Normalizer.of(components, weights)(components)


def advantages(components: ArrayLike, groups: NDArray[np.int64], weights: Sequence[float]) -> NDArray[np.float64]:
    """(c - mean of all c) / (std of all c + 1e-4), float64 [n], not clipped.

    Sums are correctly rounded, so the order of the samples changes no bit.

    Args:
        components: unweighted value of each reward, for all samples of an iteration, [n, rewards].
        groups: the group of each sample, one integer per prompt, [n].
        weights: weight of each reward.
    """
    values, result = np.asarray(components, dtype=np.float64), np.empty(len(groups))
    for group in np.unique(groups):
        members = groups == group
        result[members] = normalized_sums(values[members], weights)
    mean, std = statistics(result)
    return (result - mean) / (std + EPSILON)


def statistics(values: NDArray[np.float64], ddof: int = 1) -> tuple[float, float]:
    """Mean and standard deviation: unbiased, or with `ddof` 0 the population's. It is 0 for a single value."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((values - mean) ** 2) / max(1, len(values) - ddof))
