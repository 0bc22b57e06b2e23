"""Runs of published sizes: who is where, what is refused, and which of them finish all previews."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import many_gpus
import pytest
import rollout
from common import CONFIGS, EDITS, MODELS, VIDEOS
from edits import write_prompts

from solrl_ray.config.checks import check
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.planning.gpu_memory import gpus
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.records import Pruning

COMMON = {"model": "flux", "work": Path("work"), "prompts": 1, "iterations": 3, "set": [], "layers": None}


def configured(**changes: Any) -> Config:
    given = {"model": "flux", "gpus": 8, "placement": "colocated", "staleness": 0, "prompts": 48}
    given |= {"iterations": 2, "part": None, "layers": None, "set": [], "work": Path("work")}
    arguments = argparse.Namespace(**given | changes)
    config = load(many_gpus.files(arguments), many_gpus.settings(arguments))
    check(config)
    return config


def test_each_gpu_hosts_one_worker_of_each_kind_that_take_turns() -> None:
    config = configured()
    fleet = config.fleet
    assert (fleet.explorers.count, fleet.regenerators.count, config.learner.world_size) == (8, 8, 8)
    assert gpus(config) == 8


@pytest.mark.parametrize("count", [2, 4, 8])
def test_of_a_split_host_half_of_the_gpus_learn(count: int) -> None:
    config = configured(placement="split", staleness=1, gpus=count)
    assert config.learner.world_size == config.fleet.explorers.count == count // 2
    assert gpus(config) == count


def test_a_prompt_is_the_published_one_with_pruned_previews() -> None:
    config = configured()
    pool = pool_sampling(config)
    assert (pool.pool, config.rollout.keep, pool.pruning) == (96, 24, Pruning(after=2, keep=36))


@pytest.mark.parametrize("model", EDITS)
def test_a_model_that_edits_gets_prompts_with_pictures_and_a_reward_that_sees_them(model: str, tmp_path: Path) -> None:
    config = configured(model=model, prompts=2, gpus=1, work=tmp_path)
    assert [reward.kind for reward in config.rewards] == ["clip_edit"]
    write_prompts(tmp_path / "edits", {"train": 2, "heldout": 1})
    for file, count in ((config.prompts.train, 2), (config.prompts.heldout, 1)):
        assert [len(prompt.references) for prompt in read_prompts(file)] == [1] * count


@pytest.mark.parametrize("model", VIDEOS)
def test_of_a_video_the_reward_of_pictures_sees_four_frames(model: str) -> None:
    (reward,) = configured(model=model, prompts=1, gpus=1).rewards
    assert reward.kind == "clipscore"
    assert reward.frames is not None
    assert reward.frames.count == 4


def test_every_model_with_frames_is_known_as_a_video() -> None:
    texts = {name: (CONFIGS / "models" / file).read_text() for name, file in MODELS.items()}
    framed = {name for name, text in texts.items() if "frames:" in text}
    assert framed == set(VIDEOS)


def test_a_plan_of_the_published_iteration_needs_no_gpu_and_replaces_an_older_one(tmp_path: Path) -> None:
    for _ in range(2):
        many_gpus.main(["sana", "--plan", "h100-80", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "many_gpus_planned.json").read_text())
    assert [(one["gpus"], one["prompts"]) for one in rows] == [(1, 48), (2, 48), (4, 48), (8, 48)]
    seconds = [one["seconds"] for one in rows]
    assert seconds[0] / 8 < seconds[3] < seconds[2] / 1.9


def test_a_plan_of_something_else_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for other in (["--layers", "6"], ["--gpus", "2"]):
        with pytest.raises(SystemExit):
            many_gpus.main(["sana", "--plan", "h100-80", *other])
        assert other[0] in capsys.readouterr().err


def test_a_published_rollout_is_measured_with_all_its_previews() -> None:
    given = argparse.Namespace(**COMMON, tier="fp8", preview_decoder=False, all_blocks=False)
    pool = pool_sampling(rollout.settings(given))
    assert (pool.pool, pool.unit, pool.pruning, pool.micro_batch) == (96, 24, None, 24)
