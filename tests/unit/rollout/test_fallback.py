"""The fallback ladder: on which fallback level an iteration is explored, from what was measured before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from solrl_ray.config.checks import check
from solrl_ray.config.previews import PreviewConfig, Prune
from solrl_ray.config.schema import Config, Fidelity
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.metrics.records import IterationMetrics
from solrl_ray.records import Pruning
from solrl_ray.rollout.fallback import FallbackLadder
from tests.support import made_runs


def config(**fidelity: object) -> Config:
    """Previews of 6 steps in nvfp4-emulated, then of 8, of 10, and of 10 in float32."""
    section = {"floor": 0.5, "patience": 2, "fallback": [{"steps": 8}, {"steps": 10}, {"precision": "float32"}]}
    return made_runs.config().model_copy(update={"fidelity": Fidelity.model_validate(section | fidelity)})


def explored(ladder: FallbackLadder, spearman: Sequence[float | None]) -> list[IterationMetrics]:
    """A run that measures these figures, each on the fallback level that is due by then."""
    records: list[IterationMetrics] = []
    for number, value in enumerate(spearman):
        record = replace(
            made_runs.iteration(number), spearman=value, fallback_level=ladder.fallback_level(number, records)
        )
        records.append(record)
    return records


def levels(ladder: FallbackLadder, spearman: Sequence[float | None]) -> list[int]:
    return [record.fallback_level for record in explored(ladder, spearman)]


def test_without_a_floor_there_is_one_level() -> None:
    assert levels(FallbackLadder(made_runs.config()), [-1.0] * 5) == [0] * 5


def test_a_level_is_taken_after_patience_iterations_in_a_row_below_the_floor() -> None:
    #                                 low  low  | low  ok   low  low  |
    assert levels(FallbackLadder(config()), [0.4, 0.4, 0.4, 0.5, 0.4, 0.4, 0.9, 0.9]) == [0, 0, 1, 1, 1, 1, 2, 2]


def test_the_last_level_is_kept() -> None:
    assert levels(FallbackLadder(config(patience=1)), [0.0] * 6) == [0, 1, 2, 3, 3, 3]


def test_a_figure_that_is_not_there_ends_a_row() -> None:
    assert levels(FallbackLadder(config()), [0.4, None, 0.4, 0.4, 0.4]) == [0, 0, 0, 0, 1]


def test_exploring_ahead_takes_a_level_later_and_does_not_blame_it_for_the_one_before() -> None:
    # Iteration 1 is explored before iteration 0 is measured; it is low too, but on fallback level 0.
    ahead = FallbackLadder(config(patience=1), staleness=1)
    assert levels(ahead, [0.4, 0.4, 0.9, 0.9, 0.4, 0.4, 0.9]) == [0, 0, 1, 1, 1, 1, 2]


def test_the_level_depends_on_earlier_iterations_alone_and_not_on_their_order() -> None:
    ladder = FallbackLadder(config())
    records = explored(ladder, [0.4, 0.4, 0.4, 0.4, 0.4, 0.4])
    for number, record in enumerate(records):
        assert (
            ladder.fallback_level(number, records)
            == ladder.fallback_level(number, records[:number])
            == record.fallback_level
        )
        assert ladder.fallback_level(number, records[::-1]) == record.fallback_level


def test_the_floor_is_held_against_whole_pools_where_they_are_audited_and_by_the_named_measure() -> None:
    record = replace(made_runs.iteration(0), spearman=0.9, kendall=0.7, audit={"spearman": 0.3, "kendall": 0.2})
    assert FallbackLadder(config()).measured(record) == 0.9
    assert FallbackLadder(config(measure="kendall")).measured(record) == 0.7
    assert FallbackLadder(config(audit_prompts=2)).measured(record) == 0.3
    assert FallbackLadder(config(audit_prompts=2, measure="kendall")).measured(record) == 0.2


def test_each_level_changes_what_it_names_and_keeps_the_rest_of_the_one_before() -> None:
    ladder = FallbackLadder(config())
    drawn = [pool_sampling(ladder.config(fallback_level)) for fallback_level in range(4)]
    assert [(pool.steps, pool.tier) for pool in drawn] == [
        (6, "nvfp4-emulated"),
        (8, "nvfp4-emulated"),
        (10, "nvfp4-emulated"),
        (10, "float32"),
    ]
    assert [ladder.steps(fallback_level) for fallback_level in range(4)] == [None, 8, 10, 10]
    assert ladder.config(0) == config()


def test_the_user_is_told_when_a_level_is_taken_and_when_none_is_left() -> None:
    ladder = FallbackLadder(config())
    said = [ladder.news(low, explored(ladder, [0.4] * low)) for low in range(11)]
    assert [low for low, sentence in enumerate(said) if sentence] == [2, 4, 6, 8]
    assert "from iteration 3 on previews take 8 steps in nvfp4-emulated (fallback level 1 of 3)" in said[2]
    assert "fidelity.fallback has no further one" in said[8]


PRUNED = [{"prune": {"after": 3, "keep": 12}}, {"steps": 8}, {"prune": {}}, {"precision": "float32"}]


def pruned_config() -> Config:
    """The demo's pools of 24, of which 8 are chosen; previews are pruned after 2 steps to 12 at first."""
    made = config(fallback=PRUNED)
    preview = PreviewConfig(prune=Prune(after=2, keep=12))
    return made.model_copy(update={"rollout": made.rollout.model_copy(update={"preview": preview})})


def test_a_level_may_prune_later_or_not_at_all_and_the_unit_stays() -> None:
    ladder = FallbackLadder(pruned_config())
    check(pruned_config())
    assert [ladder.pruning(level) for level in range(5)] == [
        Pruning(after=2, keep=12),
        Pruning(after=3, keep=12),
        Pruning(after=3, keep=12),
        None,
        None,
    ]
    assert [pool_sampling(ladder.config(level)).unit for level in range(5)] == [24] * 5
    assert [pool_sampling(ladder.config(level)).steps for level in range(5)] == [6, 6, 8, 8, 8]
    said = [ladder.news(2 * level, explored(ladder, [0.4] * 2 * level)) for level in (1, 3)]
    assert (
        "previews take 6 steps in nvfp4-emulated, pruned after 3 steps to 12 seeds (fallback level 1 of 4)" in said[0]
    )
    assert "previews take 8 steps in nvfp4-emulated, none of them pruned (fallback level 3 of 4)" in said[1]
