"""The learner against the oracle: DeepSpeed's update and the plain one end with the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from solrl_ray import models
from solrl_ray.config.schema import Config
from solrl_ray.learning.learner import Learner
from solrl_ray.policy.digest import lora_digest
from tests import oracle
from tests.support.learning import config, embeddings, groups
from tests.system.ranks import run_ranks

UPDATES = 3
PARTS = ("default", "old", "ema", "exp_avg", "exp_avg_sq")

VARIANTS: dict[str, dict[str, Any]] = {
    "lagging old policy, clipped gradient": {"learner": {"gradient_clip": 3e-3}},
    "copied old policy, no KL, no clip, group std": {
        "learner": {"gradient_clip": 0.0, "micro_batch": 3},
        "objective": {
            "old_decay": {"kind": "copy"},
            "kl": 0.0,
            "beta": 0.5,
            "advantage": {"std": "group", "clip": 1.0},
            "timestep_fraction": 0.4,
        },
    },
}


def settings(pipeline: Path, variant: str, world_size: int) -> Config:
    sections = dict(VARIANTS[variant])
    learner = {**sections.pop("learner"), "world_size": world_size}
    return config(pipeline, learner=learner, **sections)


def train(rank: int, world_size: int, pipeline: Path, folder: Path) -> None:
    for variant in VARIANTS:
        made = settings(pipeline, variant, world_size)
        model = models.load(made.model, torch.device("cpu"), components={"transformer"})
        learner = Learner(made, model, rank, world_size)
        for iteration in range(UPDATES):
            learner.update(iteration, groups(iteration), embeddings())
        state = learner.state()
        digests = {part: lora_digest(getattr(state, part)) for part in PARTS}
        (folder / f"{variant}, rank {rank}.json").write_text(json.dumps(digests))


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def trained(
    request: pytest.FixtureRequest, forks: str, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Path]:
    """World size, and the folder with the digests of what real learners ended with."""
    folder = tmp_path_factory.mktemp("trained")
    run_ranks(forks, request.param, train, tiny_pipeline, folder)
    return request.param, folder


def expected(made: Config) -> dict[str, str]:
    """Digests of what the oracle ends with."""
    torch.set_num_threads(1)
    learner = oracle.Learner(made, models.load(made.model, "cpu", components={"transformer"}))
    for iteration in range(UPDATES):
        samples = [
            oracle.Sample(group.prompt_id, index, x0, reward)
            for group in groups(iteration)
            for index, x0, reward in zip(group.indices, group.latents, group.rewards, strict=True)
        ]
        learner.update(iteration, samples, embeddings())
    ended = {
        "default": learner.default,
        "old": learner.old,
        "ema": learner.ema,
        "exp_avg": learner.named(learner.exp_avg),
        "exp_avg_sq": learner.named(learner.exp_avg_sq),
    }
    return {part: lora_digest(factors) for part, factors in ended.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_learner_ends_with_the_oracles_bytes(trained: tuple[int, Path], tiny_pipeline: Path, variant: str) -> None:
    world_size, folder = trained
    wanted = expected(settings(tiny_pipeline, variant, world_size))
    for rank in range(world_size):
        found = json.loads((folder / f"{variant}, rank {rank}.json").read_text())
        assert found == wanted
