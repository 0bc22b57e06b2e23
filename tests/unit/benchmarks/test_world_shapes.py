"""Runs of the moving world over charged time: each is valid and of this world, wherever it lies."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import shape_results
import video_shapes
from shapes import Key
from video_shapes import World

from solrl_ray.config.strategies import is_one_stage


def world(folder: Path, *, done: bool = True) -> Path:
    folder.mkdir(parents=True)
    record = {"done": done, "model": {"reward": 0.5}, "real": {"reward": 0.9}}
    (folder / "build.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("name", video_shapes.NAMES)
@pytest.mark.parametrize("gpu", [False, True])
def test_a_shape_is_a_valid_run_of_the_world_and_only_two_stages_have_previews(
    name: str, gpu: bool, tmp_path: Path
) -> None:
    given = argparse.Namespace(root=tmp_path / "runs", gpu=gpu, tiny=False, limit=video_shapes.LIMIT)
    key = Key(name, 5e-4, 43)
    config = World(world(tmp_path / "moved" / "world")).job(key, given).config
    assert (config.run.seed, config.run.name, config.learner.optimizer.lr) == (43, key.folder(given).name, 5e-4)
    assert (config.model.family, config.model.frames) == ("wan", 9)
    here = f"{tmp_path}/moved/world/"
    assert config.model.path == f"{here}pipeline"
    assert config.prompts.train == f"{here}prompts/train.txt"
    assert [reward.kind for reward in config.rewards] == [f"{here}scores.py:as_told"]
    assert config.rollout.preview.latent_frames == (None if is_one_stage(config) else [0, 2])
    assert is_one_stage(config) == (not shape_results.SHAPES[name].pool)
    assert (config.run.iterations - 1) * shape_results.SHAPES[name].charged("flux1_dev") < video_shapes.LIMIT


def test_rewards_are_brought_to_the_scale_of_the_map(tmp_path: Path) -> None:
    scaled = World(world(tmp_path / "world")).scaled
    assert [scaled(reward) for reward in (0.5, 0.7, 0.9)] == pytest.approx([0.45, 0.7, 0.95])
    assert scaled(0.5 + 0.9 * 0.4) == pytest.approx(shape_results.target(0.9))


def test_a_world_that_is_not_built_to_the_end_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / "none", world(tmp_path / "half", done=False)):
        with pytest.raises(SystemExit, match=r"build_video_world\.py until it says so"):
            World(folder)
