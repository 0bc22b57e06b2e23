"""The examples are what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.cli import configured
from solrl_ray.config import own_functions
from solrl_ray.config.loading import Sources, load
from tests.support.small import CONFIGS

EXAMPLES = CONFIGS.parent / "examples"


def test_the_reward_of_the_example_stands_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    source = EXAMPLES / "own_reward" / "my_rewards.py"
    override = next(line for line in source.read_text().splitlines() if "solrl train demo" in line).split('"')[1]
    config = own_functions.attached(load([CONFIGS / "demo.yaml"], [override]))
    assert Path(config.rewards[0].kind.rpartition(":")[0]) == source.relative_to(EXAMPLES.parent)
    configured.try_own_rewards(config, Sources())
