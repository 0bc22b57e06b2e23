"""Rank fidelity: agreement of preview rewards with full-precision rewards of the same seeds.

Measured by Spearman's rho, Kendall's tau-b and the agreement on better and worse halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFidelity:
    """Agreement of two rankings, each figure averaged over prompts.

    If all seeds of a prompt have the same reward, a correlation is undefined and counts as 0.
    """

    spearman: float
    """Pearson correlation of the ranks; equal rewards share their average rank."""
    kendall: float
    """Kendall's tau-b, which corrects for ties."""
    side_agreement: float
    """Share of seeds that both rewards put into the same half, better or worse. About 0.5 by chance."""


def rank_fidelity(proxy: ArrayLike, full: ArrayLike) -> RankFidelity:
    """Compare proxy and full-precision rewards of the same seeds.

    Correlations are higher on seeds that were chosen as extremes than on their whole pool.

    Args:
        proxy: rewards of the previews, [prompts, seeds].
        full: rewards of the full-precision images, of the same shape.

    Raises:
        ValueError: the shapes differ or are not [prompts >= 1, seeds >= 2], or a value is not finite.
    """
    x, y = np.asarray(proxy, dtype=np.float64), np.asarray(full, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 2 or x.shape[0] < 1 or x.shape[1] < 2:
        raise ValueError(f"rewards must both be [prompts >= 1, seeds >= 2], got {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("rewards must be finite")
    signs_x, signs_y = _pair_signs(x), _pair_signs(y)
    # Twice the centred average rank of a seed is its wins minus its losses: integers, hence exact sums.
    spearman = _correlation(signs_x.sum(axis=2), signs_y.sum(axis=2))
    kendall = _correlation(signs_x.reshape(len(x), -1), signs_y.reshape(len(y), -1))
    return RankFidelity(
        spearman=float(spearman.mean()),
        kendall=float(kendall.mean()),
        side_agreement=float((_is_top(x) == _is_top(y)).mean()),
    )


def _pair_signs(rewards: NDArray[np.float64]) -> NDArray[np.int64]:
    """[prompts, seeds, seeds]: 1 where seed i is better than seed j, 0 where equal, -1 where worse."""
    return np.sign(rewards[:, :, None] - rewards[:, None, :]).astype(np.int64)


def _correlation(x: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.float64]:
    """sum(x y) / sqrt(sum(x²) sum(y²)) per row, for values centred on 0; 0 for a constant row.

    For centred ranks this is Spearman's rho, for pair signs Kendall's tau-b.
    """
    norm = np.sqrt((x * x).sum(axis=1)) * np.sqrt((y * y).sum(axis=1))
    covariance = (x * y).sum(axis=1)
    return np.divide(covariance, norm, out=np.zeros(len(x)), where=norm > 0)


def _is_top(rewards: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Mask of the floor(seeds / 2) best seeds; at equal rewards the earlier seed is better."""
    order = np.argsort(-rewards, axis=1, kind="stable")
    top = np.zeros(rewards.shape, dtype=np.bool_)
    np.put_along_axis(top, order[:, : rewards.shape[1] // 2], True, axis=1)
    return top
