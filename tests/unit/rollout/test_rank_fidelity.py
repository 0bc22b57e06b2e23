"""Rank fidelity against values worked out by hand and against definitions written out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from solrl_ray.rollout.rank_fidelity import rank_fidelity


def test_a_worked_example_with_ties() -> None:
    # Average ranks 1.5 1.5 3 4 against 1 2 3.5 3.5, each centred on 2.5:
    # (-1, -1, .5, 1.5) and (-1.5, -.5, 1, 1) give rho = 4 / 4.5.
    found = rank_fidelity([[0.0, 0.0, 1.0, 2.0]], [[0.0, 1.0, 2.0, 2.0]])
    assert found.spearman == pytest.approx(4 / 4.5)
    # Four pairs agree, one is tied on each side, none disagrees: tau-b = 4 / sqrt(5 · 5).
    assert found.kendall == pytest.approx(0.8)
    assert found.side_agreement == 1.0


def test_figures_are_averages_over_prompts() -> None:
    up, down = [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]
    found = rank_fidelity([up, up, up, up], [up, up, up, down])
    assert found.spearman == pytest.approx(0.5)
    assert found.kendall == pytest.approx(0.5)
    assert found.side_agreement == 0.75


def average_ranks(values: list[float]) -> np.ndarray:
    return np.array([np.mean([k for k, v in enumerate(sorted(values), 1) if v == value]) for value in values])


def tau_b(x: list[float], y: list[float]) -> float:
    pairs = list(itertools.combinations(range(len(x)), 2))
    sign_x = [np.sign(x[i] - x[j]) for i, j in pairs]
    sign_y = [np.sign(y[i] - y[j]) for i, j in pairs]
    agreement = sum(a * b for a, b in zip(sign_x, sign_y, strict=True))
    return agreement / math.sqrt(sum(a != 0 for a in sign_x) * sum(b != 0 for b in sign_y))


def test_random_rewards_with_ties_follow_the_definitions() -> None:
    random = np.random.default_rng(5)
    for _ in range(20):
        x, y = random.integers(0, 6, (2, 11)).astype(float).tolist()
        found = rank_fidelity([x], [y])
        assert found.spearman == pytest.approx(np.corrcoef(average_ranks(x), average_ranks(y))[0, 1])
        assert found.kendall == pytest.approx(tau_b(x, y))


def test_a_proxy_that_does_not_separate_counts_as_no_correlation() -> None:
    rising = [1.0, 2.0, 3.0, 4.0]
    found = rank_fidelity([[2.0, 2.0, 2.0, 2.0], rising], [rising, rising])
    assert found.spearman == pytest.approx(0.5)
    assert found.kendall == pytest.approx(0.5)
    for prompts in (2, 16, 64, 1000):  # whatever was in the memory of the result before
        separates, equal = [rising] * prompts, [[2.0] * 4] * prompts
        for found in (rank_fidelity(separates, equal), rank_fidelity(equal, separates)):
            assert (found.spearman, found.kendall) == (0.0, 0.0)


def test_sides_of_many_ties_are_those_of_a_sorted_list() -> None:
    rng = np.random.default_rng(3)
    proxy, full = rng.integers(0, 3, (2, 8, 97)).tolist()

    def better(rewards: list[int]) -> set[int]:
        return set(sorted(range(97), key=lambda seed: (-rewards[seed], seed))[:48])

    same = [97 - len(better(x) ^ better(y)) for x, y in zip(proxy, full, strict=True)]
    assert rank_fidelity(proxy, full).side_agreement == pytest.approx(sum(same) / (8 * 97))


def test_bad_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \(1, 3\) and \(1, 2\)"):
        rank_fidelity([[1.0, 2.0, 3.0]], [[1.0, 2.0]])
    with pytest.raises(ValueError, match="seeds >= 2"):
        rank_fidelity([[1.0]], [[1.0]])
    with pytest.raises(ValueError, match="finite"):
        rank_fidelity([[1.0, float("nan")]], [[1.0, 2.0]])


def test_of_an_odd_number_the_smaller_half_is_the_better_one_and_ties_go_to_earlier_seeds() -> None:
    # Of three, one is better: seed 1, and seed 2. Seed 0 stays on its side.
    assert rank_fidelity([[1.0, 3.0, 2.0]], [[1.0, 2.0, 3.0]]).side_agreement == pytest.approx(1 / 3)
    # Of five, two are: seeds 1 and 2, and seeds 2 and 3. The three best of both are the same.
    assert rank_fidelity([[0, 3, 2, 1, -1]], [[0, 1, 3, 2, -1]]).side_agreement == pytest.approx(3 / 5)
    # Seeds 0 and 1, by their places among four equal ones; seeds 3 and 4. Seed 2 stays.
    assert rank_fidelity([[1, 1, 1, 1, 0]], [[1, 2, 3, 4, 5]]).side_agreement == pytest.approx(1 / 5)
    # All are equal under both: the same seeds are better.
    assert rank_fidelity([[0] * 5], [[7] * 5]).side_agreement == 1.0
