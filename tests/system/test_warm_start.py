"""A run that begins where another one ended: measured against the same base, at the same fixed addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.client import launch
from solrl_ray.config.schema import Config
from solrl_ray.report.data import read_run
from solrl_ray.storage import continuation
from tests.support.small import folder, small_config, summary

pytestmark = pytest.mark.usefixtures("local_ray")


def heldout(config: Config, updates: int, policy: str) -> Any:
    (found,) = (e for e in read_run(folder(config)).evaluations if (e.iteration, e.policy) == (updates, policy))
    return found.rewards


def test_a_warm_started_run_begins_with_the_policy_of_its_source_and_knows_the_base(
    calm: Config, tmp_path: Path
) -> None:
    config = small_config(tmp_path, "warm", f"run.init='{folder(calm)}'", "run.iterations=1", "rollout.prompts=1")
    launch.train(config, live=False)
    assert heldout(config, 0, "ema") == heldout(calm, 3, "ema")
    assert heldout(config, 0, "base") == heldout(calm, 0, "base")
    assert heldout(config, 1, "ema") != heldout(config, 0, "ema")
    assert continuation.stored(folder(config)).run.init_digest == summary(calm)["lora_digest"]
