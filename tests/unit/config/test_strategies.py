"""What follows from rewards that need not say the same twice, and from GPUs."""

from __future__ import annotations

import pytest

from solrl_ray.config.loading import load
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import unreproducible_rewards, warnings
from tests.support import made_runs
from tests.support.small import CONFIGS


def configured(*rewards: RewardConfig) -> Config:
    return made_runs.config().model_copy(update={"rewards": list(rewards)})


@pytest.mark.parametrize(
    ("kind", "declared", "expected"),
    [
        ("judge", None, ("rewards.1 (judge)",)),
        ("judge", True, ()),
        ("remote", None, ()),
        ("remote", False, ("rewards.1 (remote)",)),
        ("mine:score", False, ("rewards.1 (mine:score)",)),
    ],
)
def test_a_reward_is_what_its_kind_is_unless_it_is_declared(
    kind: str, declared: bool | None, expected: tuple[str, ...]
) -> None:
    config = configured(RewardConfig(kind="clipscore"), RewardConfig(kind=kind, reproducible=declared))
    assert unreproducible_rewards(config) == expected
    assert any("equal runs may have different digests" in words for words in warnings(config)) == bool(expected)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ((), 0),
        (("fleet.encoders.num_gpus=1",), 1),
        (("fleet.explorers.num_gpus=1",), 1),
        (("fleet.learners.num_gpus=0.5",), 1),
        (("fleet.learners.num_gpus=0.5", "run.deterministic=true"), 0),
    ],
)
def test_who_computes_on_gpus_is_told_that_digests_may_differ(settings: tuple[str, ...], warned: int) -> None:
    found = warnings(load([CONFIGS / "demo.yaml"], settings))
    assert sum("run.deterministic=true" in words for words in found) == warned
