"""What a regenerator answers to an evaluation."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch

from actors.workers.regenerator import Regenerator
from solrl_ray.config.schema import Config
from solrl_ray.records import Prompt, PromptEmbedding, WorkUnit
from solrl_ray.rollout.sampler import Sampled
from tests.support.small import small_config

R = TypeVar("R", bound=Regenerator)
EMBEDDING = PromptEmbedding(prompt_id="p", tensors={}, digest="")
UNIT = WorkUnit(stage="evaluate", iteration=1, revision=1, prompt_id="p", indices=(0,), policy="ema")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return small_config(tmp_path, "run")


@pytest.fixture
def worker(config: Config) -> Regenerator:
    """One that has started, and holds the policy that it is asked for."""
    return started(Regenerator("regenerator-0", config))


def started(made: R) -> R:
    made._device, made._model, made._score_class = "cpu", None, ""  # type: ignore[assignment]
    made._holds = (UNIT.policy, UNIT.revision)
    return made


def test_an_answer_for_several_prompts_has_for_each_its_own_part_and_carries_no_other_pictures(
    worker: Regenerator,
) -> None:
    prompts = [Prompt(id=name, text="") for name in "pqr"]
    embeddings = [replace(EMBEDDING, prompt_id=prompt.id) for prompt in prompts]
    images = torch.arange(6.0)[:, None, None, None].expand(6, 3, 64, 64).contiguous()
    rewards = tuple(torch.arange(6.0).tolist())
    sampled = Sampled(rewards=rewards, latents=images, images=images, reward_costs={"questions": 6})
    worker._evaluate = SimpleNamespace(evaluate=lambda *_: sampled)  # type: ignore[assignment]
    unit = replace(UNIT, indices=(0, 1), beside=("q", "r"))
    sent = pickle.dumps(worker.evaluate(unit, prompts, 2, *embeddings))
    found = pickle.loads(sent)
    assert found.unit == unit
    parts = [found, *found.beside]
    assert [part.unit.prompt_id for part in parts] == ["p", "q", "r"]
    assert [part.rewards for part in parts] == [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]
    assert [part.reward_costs for part in parts] == [{"questions": 6}, {}, {}]
    pictured = [part.images for part in parts]
    assert [images is None for images in pictured] == [False, False, True]
    assert [images[:, 0, 0, 0].tolist() for images in pictured[:2]] == [[0, 1], [2, 3]]
    assert len(sent) < 5 * images[0].nbytes  # four are asked for


def test_an_answer_of_several_rewards_has_for_each_prompt_its_scores_by_each_of_them(config: Config) -> None:
    worker = started(Regenerator("regenerator-0", config))
    sampled = Sampled(
        rewards=(0.0, 1.0, 2.0, 3.0),
        components=((0.0, 4.0), (1.0, 5.0), (2.0, 6.0), (3.0, 7.0)),
        latents=torch.zeros(4, 3, 2, 2),
        images=torch.zeros(4, 3, 2, 2),
        reward_costs={},
    )
    worker._evaluate = SimpleNamespace(evaluate=lambda *_: sampled)  # type: ignore[assignment]
    prompts = [Prompt(id=name, text="") for name in "pq"]
    embeddings = [replace(EMBEDDING, prompt_id=prompt.id) for prompt in prompts]
    found = worker.evaluate(replace(UNIT, indices=(0, 1), beside=("q",)), prompts, 0, *embeddings)
    assert [part.columns for part in (found, *found.beside)] == [((0.0, 1.0), (4.0, 5.0)), ((2.0, 3.0), (6.0, 7.0))]
