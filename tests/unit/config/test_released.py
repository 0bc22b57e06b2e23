"""The methods' files beside what their authors released, read in their sources (commits in the comments)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from solrl_ray.config.contradictions import value_of
from solrl_ray.config.loading import load

CONFIGS = Path(__file__).parents[3] / "configs"
ADAM = {"learner.optimizer.lr": 3e-4, "learner.optimizer.weight_decay": 1e-4, "learner.gradient_clip": 1.0}
RELEASED: dict[str, dict[str, Any]] = {
    # yifan123/flow_grpo, config/grpo.py, `pickscore_sd3`
    "flow_grpo": ADAM
    | {
        "rollout.sampler.noise_level": 0.7,
        "rollout.regenerate.steps": 10,
        "objective.clip_range": 1e-4,
        "objective.kl": 0.01,
        "objective.advantage.std": "global",
        "learner.updates": 2,
    },
    # the same, `pickscore_sd3_fast_nocfg`
    "flow_grpo_fast": ADAM
    | {
        "rollout.sampler.kind": "cps",
        "rollout.sampler.noise_level": 0.8,
        "rollout.sampler.window.size": 3,
        "rollout.sampler.window.range": (0, 5),
        "rollout.regenerate.steps": 10,
        "objective.clip_range": 1e-5,
        "objective.kl": 0.0,
        "objective.advantage.std": "global",
        "learner.updates": 2,
    },
    # XueZeyue/DanceGRPO, the script for FLUX with LoRA
    "dance_grpo": ADAM
    | {
        "rollout.sampler.eta": 0.3,
        "rollout.sampler.shared_noise": True,
        "rollout.regenerate.steps": 12,
        "objective.clip_range": 1e-4,
        "objective.timestep_fraction": 0.6,
        "objective.advantage.std": "group_unbiased",
        "learner.updates": 2,
    },
    # scxue/advantage_weighted_matching, PickScore
    "awm": ADAM
    | {
        "rollout.regenerate.steps": 14,
        "objective.weighting": "ghuber",
        "objective.power": 0.25,
        "objective.timesteps": 6,
        "objective.timestep_fraction": 0.9,
        "objective.kl": 1e-4,
        "objective.advantage.std": "global",
        "learner.ema_cap": 0.99,
        "learner.updates": 1,
    },
}


@pytest.mark.parametrize("method", RELEASED)
def test_a_method_has_the_released_settings(method: str) -> None:
    config = load([CONFIGS / "demo.yaml", CONFIGS / "methods" / f"{method}.yaml"])
    found = {key: value_of(config, key) for key in RELEASED[method]}
    found = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    assert found == RELEASED[method]


@pytest.mark.parametrize("method", ["flow_grpo", "flow_grpo_fast"])
def test_the_moving_average_forgets_as_fast_as_the_released_one(method: str) -> None:
    cap = load([CONFIGS / "demo.yaml", CONFIGS / "methods" / f"{method}.yaml"]).learner.ema_cap
    assert cap**8 == pytest.approx(0.9, abs=0.002)  # released: 0.9 every eighth optimiser step
