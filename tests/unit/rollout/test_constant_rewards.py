"""Rewards that are the same for all samples of a prompt are told, because nothing is learned from them."""

from __future__ import annotations

from dataclasses import replace

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import IterationMetrics
from solrl_ray.rollout.constant_rewards import constant_rewards, news
from tests.support import made_runs

CONFIG = made_runs.config()
"""12 prompts an iteration, the reward clipscore."""


def measured(*counts: tuple[int, int]) -> list[IterationMetrics]:
    """Iterations with so many constant groups and pools."""
    return [
        replace(made_runs.iteration(number), constant_groups=groups, constant_pools=pools)
        for number, (groups, pools) in enumerate(counts)
    ]


def told(*counts: tuple[int, int], config: Config = CONFIG) -> list[str]:
    """What the live view says after each iteration."""
    records = measured(*counts)
    return [news(config, records[: number + 1]) for number in range(len(records))]


def test_without_constant_rewards_nothing_is_said() -> None:
    assert constant_rewards(CONFIG, measured((0, 0), (0, 0))) == ""
    assert told((0, 0), (0, 0)) == ["", ""]


def test_the_warning_names_the_rewards_and_how_often() -> None:
    of_one = constant_rewards(CONFIG, measured((12, 11), (4, 0)))
    assert all(words in of_one for words in ("rewards.0 (clipscore)", "samples of a prompt in 16 of 24 cases"))
    assert "previews of a prompt in 11 of 24 cases" in of_one
    rewards = [RewardConfig(kind="ocr"), RewardConfig(kind="mine.py:redness")]
    of_two = constant_rewards(CONFIG.model_copy(update={"rewards": rewards}), measured((0, 1)))
    assert "sum of rewards.0 (ocr) and rewards.1 (mine.py:redness)" in of_two
    assert "previews of a prompt in 1 of 12 cases" in of_two
    assert "samples of a prompt" not in of_two


def test_the_live_view_tells_it_once_and_once_more_when_it_is_every_prompt() -> None:
    first, *others = told((1, 0), (5, 5), (12, 3), (12, 12), (0, 0))
    assert "in 1 of 12 cases" in first
    assert [bool(text) for text in others] == [False, True, False, False]
    assert [bool(text) for text in told((0, 0), (0, 12), (12, 0))] == [False, True, False]
