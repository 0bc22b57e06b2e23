"""A run that begins where another one ended: measured against the same base, at the same fixed addresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.client import launch
from solrl_ray.config import continuation
from solrl_ray.config.schema import Config
from tests.support.small import folder, small_config, summary

pytestmark = pytest.mark.usefixtures("local_ray")


def heldout(config: Config, name: str) -> Any:
    return json.loads((folder(config) / "evaluations" / f"{name}.json").read_text())["rewards"]


def test_a_warm_started_run_begins_with_the_policy_of_its_source_and_knows_the_base(
    calm: Config, tmp_path: Path
) -> None:
    config = small_config(tmp_path, "warm", f"run.init='{folder(calm)}'", "run.iterations=1", "rollout.prompts=1")
    launch.train(config, live=False)
    assert heldout(config, "updates-000000-ema") == heldout(calm, "updates-000003-ema")
    assert heldout(config, "updates-000000-base") == heldout(calm, "updates-000000-base")
    assert heldout(config, "updates-000001-ema") != heldout(config, "updates-000000-ema")
    assert continuation.stored(folder(config)).run.init_digest == summary(calm)["lora_digest"]
