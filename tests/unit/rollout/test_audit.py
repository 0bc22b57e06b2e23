"""The audit's estimators against the figures of whole pools, over many draws of them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from solrl_ray.rollout.audit import AuditedPool, AuditPlan, audit, student_quantile
from solrl_ray.rollout.rank_fidelity import rank_fidelity

KEEP = 4


def pool(proxies: np.ndarray, rewards: np.ndarray, audited: tuple[int, ...]) -> AuditedPool:
    order = np.argsort(-proxies, kind="stable").tolist()
    chosen = tuple(order[: KEEP // 2] + order[: -KEEP // 2 - 1 : -1])
    return AuditedPool(
        proxies=tuple(proxies.tolist()),
        chosen=chosen,
        chosen_rewards=tuple(rewards[list(chosen)].tolist()),
        audited=audited,
        audited_rewards=tuple(rewards[list(audited)].tolist()),
    )


def unselected(proxies: np.ndarray) -> list[int]:
    chosen = pool(proxies, proxies, tuple(range(0))).chosen
    return [index for index in range(len(proxies)) if index not in chosen]


def correlated(random: np.random.Generator, size: int, correlation: float) -> tuple[np.ndarray, np.ndarray]:
    proxies, noise = random.normal(size=(2, size))
    return proxies, correlation * proxies + np.sqrt(1 - correlation**2) * noise


def test_a_pool_that_is_audited_whole_has_its_exact_figures() -> None:
    proxies, rewards = correlated(np.random.default_rng(1), 12, 0.6)
    found = audit([pool(proxies, rewards, tuple(unselected(proxies)))])
    exact = rank_fidelity([proxies], [rewards])
    assert found["spearman"] == pytest.approx(exact.spearman)
    assert found["kendall"] == pytest.approx(exact.kendall)
    ranked = np.sort(rewards)
    order = np.argsort(-proxies)
    attained = rewards[order[:2]].mean() - rewards[order[-2:]].mean()
    assert found["regret"] == pytest.approx(ranked[-2:].mean() - ranked[:2].mean() - attained)
    beaten = [(rewards < rewards[index]).sum() / 11 for index in order]
    assert found["best_beats"] == pytest.approx(np.mean(beaten[:2]))
    assert found["worst_beats"] == pytest.approx(np.mean(beaten[-2:]))


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_the_interval_covers_the_mean_of_the_distribution_as_often_as_it_says(correlation: float) -> None:
    random = np.random.default_rng(3)
    truth = rank_fidelity(*zip(*[correlated(random, 12, correlation) for _ in range(2000)], strict=True)).spearman
    covered = []
    for _ in range(400):
        pools = []
        for _ in range(6):
            x, y = correlated(random, 12, correlation)
            pools.append(pool(x, y, tuple(random.choice(unselected(x), 3, replace=False).tolist())))
        found = audit(pools)
        covered.append(found["spearman_low"] <= truth <= found["spearman_high"])
    # 95 % of 400 with a standard error of 1.1 %: below 91 % or above 99 % the interval would be wrong.
    assert 0.91 <= np.mean(covered) <= 0.99


def test_the_interval_has_students_quantile() -> None:
    # Published tables of t(0.975).
    for freedom, quantile in ((1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (47, 2.0117)):
        assert student_quantile(freedom) == pytest.approx(quantile, abs=1e-4)


def test_one_pool_has_no_interval_and_two_have_that_of_their_difference() -> None:
    proxies, rewards = correlated(np.random.default_rng(4), 12, 0.5)
    one = pool(proxies, rewards, tuple(unselected(proxies)[:3]))
    assert "spearman_low" not in audit([one])
    other = dataclasses.replace(one, audited_rewards=(0.0, 0.1, 0.2))
    both, apart = audit([one, other]), audit([one])["spearman"] - audit([other])["spearman"]
    # Student's quantile for one degree of freedom, times the standard error of a mean of two, to both sides.
    assert both["spearman_high"] - both["spearman_low"] == pytest.approx(12.7062 * abs(apart), rel=1e-5)
    assert (both["pools"], both["seeds"]) == (2, 6)


def test_the_draw_is_addressed_uniform_and_never_of_chosen_seeds() -> None:
    plan = AuditPlan(run_seed=42, prompts=2, seeds=3)
    prompts = ("aa", "bb", "cc", "dd")
    assert plan.prompt_ids(5, prompts) == plan.prompt_ids(5, prompts)
    assert len({plan.prompt_ids(t, prompts) for t in range(40)}) == 6  # all pairs occur
    counts = np.zeros(10)
    for iteration in range(2000):
        drawn = plan.indices(iteration, "aa", 10, (2, 9, 0, 4))
        assert drawn == tuple(sorted(set(drawn)))
        counts[list(drawn)] += 1
    assert counts[[2, 9, 0, 4]].sum() == 0
    # Each of six others is drawn half of the time: 1000 of 2000, standard deviation 22.
    assert np.abs(counts[[1, 3, 5, 6, 7, 8]] - 1000).max() < 110


def test_what_does_not_fit_together_is_refused() -> None:
    proxies, rewards = correlated(np.random.default_rng(4), 12, 0.5)
    good = pool(proxies, rewards, tuple(unselected(proxies)[:3]))
    with pytest.raises(ValueError, match="at least one pool"):
        audit([])
    with pytest.raises(ValueError, match="1 audited of 8 unselected seeds say nothing about pairs"):
        audit([dataclasses.replace(good, audited=good.audited[:1], audited_rewards=good.audited_rewards[:1])])
    with pytest.raises(ValueError, match="does not fit its rewards"):
        audit([dataclasses.replace(good, audited=good.chosen[:3])])
    with pytest.raises(ValueError, match="finite"):
        audit([dataclasses.replace(good, audited_rewards=(0.1, float("nan"), 0.2))])


DROPPED = (1, 4, 6, 9, 10)


def pruned(proxies: np.ndarray, rewards: np.ndarray, audited: tuple[int, ...]) -> AuditedPool:
    """As `pool`, chosen among those that were not dropped."""
    order = [index for index in np.argsort(-proxies, kind="stable").tolist() if index not in DROPPED]
    chosen = tuple(order[: KEEP // 2] + order[: -KEEP // 2 - 1 : -1])
    return dataclasses.replace(
        pool(proxies, rewards, audited),
        chosen=chosen,
        chosen_rewards=tuple(rewards[list(chosen)].tolist()),
        dropped=DROPPED,
    )


def others_that_went_on(proxies: np.ndarray) -> list[int]:
    chosen = pruned(proxies, proxies, ()).chosen
    return [index for index in range(len(proxies)) if index not in (*chosen, *DROPPED)]


def test_over_all_draws_from_both_strata_the_estimates_average_to_the_exact_figures() -> None:
    proxies, rewards = correlated(np.random.default_rng(5), 12, 0.4)
    proxies[3] = proxies[7]  # a tie of the proxy
    rest = others_that_went_on(proxies)
    assert len(rest) == 3
    draws = itertools.product(itertools.combinations(rest, 2), itertools.combinations(DROPPED, 2))
    found = audit([pruned(proxies, rewards, (*one, *other)) for one, other in draws])
    exact = audit([pruned(proxies, rewards, (*rest, *DROPPED))])
    for name in ("spearman", "kendall", "best_beats", "worst_beats"):
        assert found[name] == pytest.approx(exact[name]), name
    whole = rank_fidelity([proxies], [rewards])
    assert (exact["spearman"], exact["kendall"]) == pytest.approx((whole.spearman, whole.kendall))


def test_what_pruning_cost_is_what_the_dropped_seeds_could_add_to_the_best_choice_of_the_others() -> None:
    proxies, rewards = correlated(np.random.default_rng(6), 12, 0.4)
    went_on = [index for index in range(12) if index not in DROPPED]
    rewards[went_on] = np.arange(7) / 10  # the best two of them have 0.5 and 0.6, the worst two 0.0 and 0.1
    rewards[list(DROPPED)] = (0.3, 0.55, 0.2, -0.4, 0.31)
    rest = others_that_went_on(proxies)
    exact = audit([pruned(proxies, rewards, (*rest, *DROPPED))])
    # 0.55 would take the place of 0.5, and -0.4 that of 0.1: of means of two, half of both.
    assert exact["contrast_lost"] == pytest.approx((0.05 + 0.5) / 2)
    draws = list(itertools.combinations(DROPPED, 3))
    found = audit([pruned(proxies, rewards, (*rest, *draw)) for draw in draws])
    assert found["contrast_lost"] == pytest.approx(exact["contrast_lost"])
    assert found["contrast_lost_low"] < exact["contrast_lost"] < found["contrast_lost_high"]
    assert "contrast_lost" not in audit([pool(proxies, rewards, tuple(unselected(proxies)))])


def test_pruned_strata_that_do_not_fit_together_are_refused() -> None:
    proxies, rewards = correlated(np.random.default_rng(4), 12, 0.5)
    rest = others_that_went_on(proxies)
    good = pruned(proxies, rewards, (*rest, 1, 4))
    with pytest.raises(ValueError, match="1 audited of 5 dropped seeds say nothing about pairs"):
        audit([pruned(proxies, rewards, (*rest, 1))])
    with pytest.raises(ValueError, match="0 audited of 3 unselected seeds say nothing about pairs"):
        audit([pruned(proxies, rewards, (1, 4))])
    with pytest.raises(ValueError, match="does not fit its rewards"):
        audit([dataclasses.replace(good, dropped=(*DROPPED, good.chosen[0]))])
    with pytest.raises(ValueError, match="have no common figures"):
        audit([good, pool(proxies, rewards, tuple(unselected(proxies)))])


def test_so_many_are_drawn_of_each_stratum_and_without_dropped_seeds_the_draw_is_as_ever() -> None:
    plan = AuditPlan(run_seed=42, prompts=2, seeds=3)
    for iteration in range(50):
        drawn = plan.indices(iteration, "aa", 14, (2, 12, 0, 4), (1, 3, 5, 7, 9))
        assert len(set(drawn) & {1, 3, 5, 7, 9}) == 3
        assert len(set(drawn) & {6, 8, 10, 11, 13}) == 3
        assert len(drawn) == 6
    assert plan.indices(0, "aa", 8, (2, 3), (0, 1, 4, 5, 6)) == tuple(
        sorted({7, *plan.indices(0, "aa", 8, (2, 3), (0, 1, 4, 5, 6))})
    )  # fewer than that are all drawn
    drawn = [plan.indices(iteration, "aa", 10, (2, 9, 0, 4)) for iteration in (5, 6)]
    assert drawn == [(5, 6, 7), (1, 3, 5)]  # as before pools could be pruned
