"""The audit: rank fidelity on whole pools, estimated from a few unselected seeds that are regenerated as well.

The regenerated seeds of a prompt are the extremes of its proxy rewards, so figures on them alone flatter the proxy. A
pool has strata: the K selected seeds, whose full-precision rewards are all known, and the n others, of which m are
drawn at random without replacement. If previews are pruned, the others are two strata, each with its own n and m: those
that continued, and those that were pruned. A selected seed has inclusion probability 1, another one m / n, and two of
one stratum m (m - 1) / (n (n - 1)); strata are drawn independently. Weighting by the reciprocals (Horvitz and Thompson,
JASA 47, 1952) makes every sum over seeds or pairs of seeds unbiased. Spearman's rho is such a sum too::

    rho = sum_i x_i y_i / norm = sum_{i<j} (x_i - x_j) sign(r_i - r_j) / (2 norm)

with centred ranks x of the proxy, known for all seeds, and centred ranks y_i = sum_j sign(r_i - r_j) / 2 of the full
rewards r.

The loss by pruning is such a sum as well, over the pruned seeds d. Let t be the least reward of the best K/2 seeds that
continued. A choice that had d too would gain at most max(0, r_d - t) of its sum. So the mean contrast lost is at most

    sum_d max(0, r_d - t) / (K/2),    and the same for the worst with all signs turned,

with equality if at most one pruned seed belongs to either side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solrl_ray.records import Address
from solrl_ray.sampling.noise import permutation

CONFIDENCE = 0.95
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPlan:
    """How much of an iteration is audited."""

    run_seed: int
    prompts: int
    """Prompts of the iteration whose pools are audited."""
    seeds: int
    """Unselected seeds of each stratum of such a pool that are regenerated as well, or all if there are fewer."""

    def prompt_ids(self, iteration: int, prompt_ids: Sequence[str]) -> tuple[str, ...]:
        """The audited ones of an iteration's prompts, in their order: an addressed draw."""
        address = Address(run_seed=self.run_seed, purpose="audit-prompts", iteration=iteration)
        drawn = set(permutation(address, len(prompt_ids))[: self.prompts].tolist())
        return tuple(prompt_id for place, prompt_id in enumerate(prompt_ids) if place in drawn)

    def indices(
        self, iteration: int, prompt_id: str, pool: int, chosen: Sequence[int], dropped: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """The audited seeds of a pool, rising: an addressed draw, without replacement, from those not `chosen`; the
        same number from `dropped` ones and from the rest.
        """
        address = Address(run_seed=self.run_seed, purpose="audit", iteration=iteration, prompt_id=prompt_id)
        taken, out = set(chosen), set(dropped)
        others = [index for index in permutation(address, pool).tolist() if index not in taken]
        rest = [index for index in others if index not in out]
        return tuple(sorted(rest[: self.seeds] + [index for index in others if index in out][: self.seeds]))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedPool:
    """One prompt's pool, as far as it is known."""

    proxies: tuple[float, ...]
    """Proxy reward of every seed of the pool; of a pruned one its early score."""
    chosen: tuple[int, ...]
    """Selected seeds: the best, then as many worst."""
    chosen_rewards: tuple[float, ...]
    """Their full-precision rewards."""
    audited: tuple[int, ...]
    """Seeds drawn from the others."""
    audited_rewards: tuple[float, ...]
    dropped: tuple[int, ...] = ()
    """Seeds whose previews were pruned: none is chosen."""


def audit(pools: Sequence[AuditedPool]) -> dict[str, float]:
    """Estimates of several pools' mean fidelity; a good proxy has little ``worst_beats`` and little ``regret``.

    Pools are independent draws, and so are the audits inside them: Student's interval over the pools' estimates covers
    both sources of error. Estimates and interval ends may leave [-1, 1], because they are unbiased.

    Returns:
        ``pools``; ``seeds``, the unselected ones that were regenerated; ``spearman`` and ``kendall`` of proxy and
        full-precision rewards on the whole pool, full ones taken as free of ties; ``best_beats``, the share of the
        pool's other seeds that a seed chosen as best truly beats (ties count half; by chance 0.5), and ``worst_beats``
        of one chosen as worst; ``regret``, the reward contrast lost by choosing with the proxy: mean of the truly best
        minus mean of the truly worst, less that of the chosen ones (not a sum over seeds: consistent, not unbiased).
        For pruned pools also ``contrast_lost``: at most how much contrast was lost by pruning the best or worst. For
        several pools also the ends of each figure's 95 % interval, as ``…_low`` and ``…_high``.

    Raises:
        ValueError: no pool, some pools pruned and others not, a pool of which fewer than two seeds of a stratum are
            known while there are more, inconsistent numbers, or a reward that is not finite.
    """
    if not pools:
        raise ValueError("an audit needs at least one pool")
    if len({bool(pool.dropped) for pool in pools}) > 1:
        raise ValueError("pools that are pruned and pools that are not have no common figures")
    figures = [_figures(pool) for pool in pools]
    columns = np.array([list(figure.values()) for figure in figures], dtype=np.float64)
    means = dict(zip(figures[0], columns.mean(axis=0).tolist(), strict=True))
    found = {"pools": float(len(pools)), "seeds": float(sum(len(pool.audited) for pool in pools))} | means
    if len(pools) > 1:
        halves = student_quantile(len(pools) - 1) * columns.std(axis=0, ddof=1) / math.sqrt(len(pools))
        for (name, mean), half in zip(means.items(), halves.tolist(), strict=True):
            found |= {f"{name}_low": mean - half, f"{name}_high": mean + half}
    return found


def _figures(pool: AuditedPool) -> dict[str, float]:
    weights, pairs = _weights(pool)
    size, kept = len(pool.proxies), len(pool.chosen)
    seen = np.array(pool.chosen + pool.audited)
    proxies = np.array(pool.proxies, dtype=np.float64)
    rewards = np.array(pool.chosen_rewards + pool.audited_rewards, dtype=np.float64)
    if not (np.isfinite(proxies).all() and np.isfinite(rewards).all()):
        raise ValueError("rewards must be finite")
    ranks = np.sign(proxies[:, None] - proxies[None, :]).sum(axis=1) / 2  # centred
    above = np.sign(rewards[:, None] - rewards[None, :])
    chosen_proxies, chosen_ranks = proxies[seen], ranks[seen]
    covariance = (pairs * (chosen_ranks[:, None] - chosen_ranks[None, :]) * above).sum() / 4
    agreement = (pairs * np.sign(chosen_proxies[:, None] - chosen_proxies[None, :]) * above).sum() / 2
    untied = np.abs(np.sign(proxies[:, None] - proxies[None, :])).sum() / 2
    # Without ties, centred ranks have the sum of squares N (N² - 1) / 12, and N (N - 1) / 2 pairs differ.
    rho_norm = math.sqrt(float((ranks**2).sum()) * size * (size**2 - 1) / 12)
    tau_norm = math.sqrt(float(untied) * size * (size - 1) / 2)
    beats = ((above + 1) / 2 * weights[None, :]).sum(axis=1)[:kept] - 0.5  # a seed ties with itself
    beats /= size - 1
    side = kept // 2
    ideal = _mean_of_top(rewards, weights, side) + _mean_of_top(-rewards, weights, kept - side)
    attained = rewards[:side].mean() - rewards[side:kept].mean()
    figures = {
        "spearman": float(covariance) / rho_norm if rho_norm else 0.0,
        "kendall": float(agreement) / tau_norm if tau_norm else 0.0,
        "best_beats": float(beats[:side].mean()),
        "worst_beats": float(beats[side:].mean()),
        "regret": float(ideal - attained),
    }
    if pool.dropped:
        out = np.isin(seen, pool.dropped)
        lost = _most_gained(rewards, weights, out, side) + _most_gained(-rewards, weights, out, kept - side)
        figures["contrast_lost"] = lost
    return figures


def _weights(pool: AuditedPool) -> tuple[Values, Values]:
    """Reciprocal inclusion probabilities of the seeds with known rewards, chosen ones first, and of their pairs.

    Raises ValueError if the pool's numbers are inconsistent.
    """
    size, kept, out = len(pool.proxies), len(pool.chosen), set(pool.dropped)
    seen = pool.chosen + pool.audited
    fits = kept >= 2 and len(set(seen)) == len(seen) and not out & set(pool.chosen)
    fits = fits and set(seen) | out <= set(range(size))
    if not fits or len(pool.chosen_rewards) != kept or len(pool.audited_rewards) != len(pool.audited):
        raise ValueError(
            f"a pool of {size} with {kept} selected and {len(pool.audited)} audited seeds does not fit its rewards"
        )
    weights, pairs = np.ones(len(seen)), np.zeros((len(seen), len(seen)))
    stratum = np.array([0] * kept + [2 if index in out else 1 for index in pool.audited])
    others = {1: size - kept - len(out), 2: len(out)}
    for number, there in others.items():
        drawn = int((stratum == number).sum())
        if drawn < min(2, there):
            kind = ("unselected", "dropped")[number - 1]
            raise ValueError(f"{drawn} audited of {there} {kind} seeds say nothing about pairs; at least 2 do")
        weights[stratum == number] = there / drawn if drawn else 0.0
    pairs[:] = weights[:, None] * weights[None, :]
    for number, there in others.items():
        inside = stratum == number
        drawn = int(inside.sum())
        pairs[np.ix_(inside, inside)] = there / drawn * (there - 1) / (drawn - 1) if drawn > 1 else 0.0
    return weights, pairs


def _most_gained(values: Values, weights: Values, out: NDArray[np.bool_], side: int) -> float:
    """The most that the mean of the `side` highest seeds could rise if pruned ones (`out`) could be among them."""
    order = np.argsort(-values[~out], kind="stable")
    least = values[~out][order][np.searchsorted(np.cumsum(weights[~out][order]), side - 1e-9)]
    return float((weights[out] * np.maximum(0.0, values[out] - least)).sum() / side)


def _mean_of_top(values: Values, weights: Values, mass: int) -> float:
    """Mean of the `mass` highest seeds, each counted by its weight."""
    order = np.argsort(-values, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(weights[order])[:-1]])
    taken = np.clip(mass - before, 0.0, weights[order])
    return float((taken * values[order]).sum() / taken.sum())


def student_quantile(freedom: int, mass: float = CONFIDENCE) -> float:
    """Two-sided point of Student's t for `freedom` >= 1 degrees of freedom: its absolute value is below with `mass`.

    Source: Abramowitz and Stegun 26.7.3 and 26.7.4, closed forms for whole degrees of freedom, inverted by bisection.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_mass(middle, freedom) < mass else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _student_mass(theta: float, freedom: int) -> float:
    """Probability of abs(t) < sqrt(freedom) tan(theta)."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term = total = (cosine if freedom > 1 else 0.0) if odd else 1.0
    for k in range(2 if odd else 1, freedom - 1, 2):
        term *= k / (k + 1) * cosine**2
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
