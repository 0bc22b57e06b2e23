"""The record of a finished iteration: what was done beside what the configuration had promised."""

from __future__ import annotations

import pytest

from solrl_ray.config.schema import Config
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.metrics.records import IterationMetrics
from solrl_ray.planning.update import backwards
from solrl_ray.records import Candidate, Selection
from solrl_ray.report.iteration_metrics import iteration_metrics
from solrl_ray.scheduling.iteration_state import Counts, IterationSummary
from tests.support import made_runs
from tests.support.made_configs import changed


def selection(prompt_id: str, rewards: tuple[float, ...]) -> Selection:
    chosen = tuple(Candidate(prompt_id=prompt_id, index=i, reward=r) for i, r in enumerate(rewards))
    return Selection(iteration=2, revision=2, prompt_id=prompt_id, top=chosen[:1], bottom=chosen[1:])


def record(
    passes: int,
    config: Config | None = None,
    *,
    previews: tuple[tuple[float, ...], ...] = ((0.9, 0.1), (0.6, 0.2)),
    rewards: tuple[tuple[float, ...], ...] = ((0.8, 0.2), (0.1, 0.5)),
) -> IterationMetrics:
    counts = Counts(candidates=288, selections=2, groups=2, duplicates=0, violations=0, dropped=7)
    selections = tuple(map(selection, ("aa", "bb"), previews))
    summary = IterationSummary(selections=selections, proxy_mean=0.25, counts=counts, rewards=rewards)
    update = UpdateMetrics(
        iteration=2,
        revision=3,
        loss=0.5,
        policy_loss=0.4,
        kl=0.01,
        gradient_norm=0.8,
        samples=4,
        passes=passes,
        seconds=1.0,
    )
    return iteration_metrics(
        config or made_runs.config(),
        iteration=2,
        summary=summary,
        rewards=rewards,
        update=update,
        seconds={"total": 10.0},
        busy_seconds={"explore": 6.0},
        requeued=3,
    )


def test_what_was_done_stands_beside_what_was_promised() -> None:
    found = record(passes=47)
    # 12 prompts x 24 candidates; 12 x 8 samples in micro-batches of 12, each at floor(0.6 x 10) timesteps.
    assert (found.candidates, found.expected_candidates) == (288, 12 * 24)
    assert (found.samples, found.expected_samples) == (4, 12 * 8)
    assert (found.passes, found.expected_passes) == (47, 8 * 6)
    assert found.requeued_units == 3
    assert found.expected_passes == backwards(made_runs.config())


def test_rewards_are_those_in_full_precision_and_ranks_compare_both() -> None:
    found = record(passes=48)
    assert found.reward_mean == 0.4
    assert found.proxy_reward_mean == 0.25
    assert found.spearman == 0.0  # one prompt is ranked as its previews were, the other one the other way round


@pytest.mark.parametrize(("prune", "expected"), [({"after": 2, "keep": 12}, 12 * (24 - 12)), (None, 0)])
def test_dropped_previews_stand_beside_those_that_were_to_be_dropped(prune: object, expected: int) -> None:
    config = changed(made_runs.config(), rollout={"preview": {"prune": prune}})
    found = record(passes=48, config=config)
    assert (found.dropped, found.expected_dropped) == (7, expected)


def test_prompts_whose_rewards_are_all_the_same_are_counted() -> None:
    found = record(passes=48)
    assert (found.constant_groups, found.constant_pools) == (0, 0)
    found = record(passes=48, previews=((0.5, 0.5), (0.6, 0.2)), rewards=((0.5, 0.5), (0.3, 0.3)))
    assert (found.constant_groups, found.constant_pools) == (2, 1)


@pytest.mark.parametrize("change", [{"strategy": "scaled"}, {"selection": "best"}])
def test_only_the_best_and_the_worst_of_a_pool_speak_for_all_of_it(change: dict[str, str]) -> None:
    config = changed(made_runs.config(), rollout=change)
    found = record(passes=48, config=config, previews=((0.5, 0.5), (0.5, 0.5)), rewards=((0.5, 0.5), (0.3, 0.1)))
    assert (found.constant_groups, found.constant_pools) == (1, 0)
