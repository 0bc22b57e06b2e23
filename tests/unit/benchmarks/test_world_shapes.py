"""Runs of other worlds over charged time: each is valid and of its world, wherever it lies, and a judge sees it all."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import curves
import numpy as np
import pytest
import shape_results
import shapes
import torch
import world_shapes
from PIL import Image
from shapes import Key
from world_shapes import World

from solrl_ray.config.loading import load
from solrl_ray.config.strategies import is_one_stage
from tests.support.examples import EXAMPLES

SIZES = {"resolution": 96, "max_sequence_length": 24}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world sets a variable for its runs."""
    monkeypatch.setenv("EMOJI_WORLD", "")


def world(folder: Path, *, done: bool = True, judge: bool = False) -> Path:
    folder.mkdir(parents=True)
    ends = {"model": {"reward": 0.5, "judge": 0.2}, "real": {"reward": 0.9, "judge": 0.3}}
    found = {"look": ends} if judge else ends
    (folder / "build.json").write_text(json.dumps({"done": done, "sizes": SIZES} | found))
    if judge:
        (folder / "judge").mkdir()
    return folder


def given(tmp_path: Path, *, gpu: bool = False, limit: float = 3000.0) -> argparse.Namespace:
    return argparse.Namespace(root=tmp_path / "runs", gpu=gpu, tiny=False, limit=limit, all_frames=False)


@pytest.mark.parametrize("name", world_shapes.VIDEO.shapes)
@pytest.mark.parametrize("gpu", [False, True])
def test_a_shape_is_a_valid_run_of_the_moving_world_and_only_two_stages_have_previews(
    name: str, gpu: bool, tmp_path: Path
) -> None:
    key, arguments = Key(name, 5e-4, 43), given(tmp_path, gpu=gpu)
    config = World(world(tmp_path / "moved" / "world")).job(key, arguments).config
    assert (config.run.seed, config.run.name, config.learner.optimizer.lr) == (43, key.folder(arguments).name, 5e-4)
    assert (config.model.family, config.model.frames) == ("wan", 9)
    here = f"{tmp_path}/moved/world/"
    assert config.model.path == f"{here}pipeline"
    assert config.prompts.train == f"{here}prompts/train.txt"
    assert [reward.kind for reward in config.rewards] == [f"{here}scores.py:as_told"]
    assert config.rollout.preview.latent_frames == (None if is_one_stage(config) else [0, 2])
    assert is_one_stage(config) == (not shape_results.SHAPES[name].pool)
    assert (config.run.iterations - 1) * shape_results.SHAPES[name].charged("flux1_dev") < arguments.limit


@pytest.mark.parametrize("name", world_shapes.EMOJI.shapes)
@pytest.mark.parametrize("gpu", [False, True])
def test_a_shape_is_a_valid_run_of_the_emoji_world_with_the_model_of_its_example(
    name: str, gpu: bool, tmp_path: Path
) -> None:
    arguments = given(tmp_path, gpu=gpu, limit=1000.0)
    config = World(world(tmp_path / "moved", judge=True)).job(Key(name, 1e-3, 42), arguments).config
    example = load([EXAMPLES / "emoji" / "emoji.yaml"])
    assert config.model == example.model.model_copy(update={"path": f"{tmp_path}/moved/pipeline"})
    assert [reward.kind for reward in config.rewards] == [f"{EXAMPLES}/emoji/style.py:blobs"]
    assert os.environ["EMOJI_WORLD"] == f"{tmp_path}/moved"
    assert config.prompts.heldout == f"{tmp_path}/moved/prompts/heldout.txt"
    assert config.evaluation.pictures == config.evaluation.prompts
    assert (config.objective.shared_noise, config.objective.kl) == (True, 0)
    charged = shape_results.SHAPES[name].charged("flux1_dev")
    limit = 2000 if name.startswith("12x1_24of24") else 1000  # the reference has twice as long
    assert limit <= config.run.iterations * charged < limit + charged


def test_rewards_are_brought_to_the_scale_of_the_map(tmp_path: Path) -> None:
    scaled = World(world(tmp_path / "world", judge=True)).scaled
    assert [scaled(reward) for reward in (0.5, 0.7, 0.9)] == pytest.approx([0.45, 0.7, 0.95])
    assert scaled(0.5 + 0.9 * 0.4) == pytest.approx(shape_results.target(0.9))
    assert [scaled(value, "judge") for value in (0.2, 0.25)] == pytest.approx([0.45, 0.7])


def test_real_pictures_that_score_no_better_than_the_model_give_no_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = world(tmp_path / "world")
    content = {"done": True, "model": {"reward": 0.5}, "real": {"reward": 0.4}}
    (folder / "build.json").write_text(json.dumps(content))
    assert World(folder).scaled(0.6) == pytest.approx(0.55)
    assert "reward is 0.400 for real images and 0.500 for the model's" in capsys.readouterr().out


def test_a_world_that_is_not_built_to_the_end_is_refused(tmp_path: Path) -> None:
    unseen = world(tmp_path / "unseen")
    (unseen / "build.json").write_text(json.dumps({"done": True, "real": {"reward": 0.9}}))
    for folder in (tmp_path / "none", world(tmp_path / "half", done=False), unseen):
        with pytest.raises(SystemExit, match=r"build_emoji\.py until it prints that all is done"):
            World(folder)


def run(*reward: float) -> dict[str, object]:
    return {"iterations": [10 * n for n in range(len(reward))], "reward": list(reward), "ended": "limit"}


def test_seeds_follow_at_the_rate_whose_reward_was_highest_over_its_time(tmp_path: Path) -> None:
    slow, fast = world_shapes.EMOJI.shapes[:2]
    runs = {
        slow: {"0.0005": {"42": run(0.45, 0.5, 0.55)}, "0.001": {"42": run(0.45, 0.6, 0.5)}},
        fast: {"0.0005": {"42": run(0.45, 0.6)}, "0.001": {"42": run(0.45, 0.5, 0.9)}},  # beside it only to 10
    }
    arguments = argparse.Namespace(shapes=[slow, fast], rates=[5e-4, 2e-3], best=False, seeds=1)
    made = World(world(tmp_path / "world", judge=True))
    keys = world_shapes.keys_of(made, {"runs": runs}, arguments)
    assert keys == [Key(name, rate, 42) for rate in (5e-4, 2e-3) for name in (slow, fast)]
    arguments.best, arguments.seeds = True, 2
    keys = world_shapes.keys_of(made, {"runs": runs}, arguments)
    assert keys == [Key(name, rate, seed) for seed in (42, 43) for name, rate in ((slow, 1e-3), (fast, 5e-4))]


def test_a_run_that_was_cut_short_says_nothing_of_its_rate() -> None:
    name = world_shapes.EMOJI.shapes[0]
    short = run(0.45, 0.9) | {"ended": ""}
    of_rate = {"0.0005": {"42": run(0.45, 0.5, 0.55)}, "0.001": {"42": short}}
    assert world_shapes.best_rate({name: of_rate}, name) == 5e-4
    for runs in ({}, {name: {"0.001": {"42": short, "43": run(0.45, 0.5)}}}):
        with pytest.raises(SystemExit, match=r"no run of .* with seed 42 has ended; train some with --rates first"):
            world_shapes.best_rate(runs, name)


def redness(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    """In place of the judge, which needs a checkpoint."""
    return images[:, 0].mean(dim=(1, 2)) + torch.tensor([10.0 * (text == "a bus") for text in prompts])


def test_the_judge_sees_the_pictures_of_each_evaluation_with_their_prompts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    captions = {"p1": "a bus", "p2": "a cat"}
    for update, policy in ((0, "base"), (20, "ema")):
        pictures = folder / "evaluations" / f"updates-{update:06d}-{policy}"
        pictures.mkdir(parents=True)
        for prompt in captions:
            red = np.full((4, 4, 3), 255 if update else 51, np.uint8)
            Image.fromarray(red).save(pictures / f"{prompt}-0.png")
    evaluations = [
        argparse.Namespace(iteration=iteration, policy=policy, captions=captions, rewards={"p1": (0.5,), "p2": (0.5,)})
        for iteration, policy in ((0, "base"), (20, "ema"), (40, "ema"))
    ]
    monkeypatch.setattr(world_shapes, "read_run", lambda _: argparse.Namespace(evaluations=evaluations))
    some = folder / "evaluations" / "updates-000040-ema"
    some.mkdir()
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(some / "p1-0.png")  # p2's is not there yet
    assert world_shapes.opinions_of(folder, redness) == pytest.approx({0: 5.2, 20: 6})
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(some / "p2-0.png")
    assert world_shapes.opinions_of(folder, redness) == pytest.approx({0: 5.2, 20: 6, 40: 5})
    for file in folder.rglob("*.png"):
        file.unlink()
    assert world_shapes.opinions_of(folder, redness) == pytest.approx({0: 5.2, 20: 6, 40: 5})
    assert list(tmp_path.iterdir()) == [folder]  # whoever takes the folder away takes them too


def test_rewards_after_charged_seconds_are_read_between_evaluations_and_not_beyond_the_last() -> None:
    name = world_shapes.EMOJI.shapes[0]
    charged = shape_results.SHAPES[name].charged("flux1_dev")
    assert curves.after(run(0.45, 0.65), name, 5 * charged, "reward") == pytest.approx(0.55)
    assert np.isnan(curves.after(run(0.45, 0.65), name, 11 * charged, "reward"))
    assert np.isnan(curves.after(run(0.45, 0.65), name, 5 * charged, "judge"))


def test_a_row_of_one_seed_ends_with_its_highest_and_its_last_reward() -> None:
    name = world_shapes.EMOJI.shapes[0]
    fell = run(0.45, 0.2) | {"iterations": [0, 5, 10], "reward": [0.45, 0.9, 0.2]}
    found = {"runs": {name: {"0.001": {"42": fell, "43": run(0.45, 0.65)}}}}
    rows = curves.curves(found, "flux1_dev", each_seed=True).splitlines()[2:]
    assert [row.strip("| ").split(" | ")[-2:] for row in rows] == [["0.900", "0.200"], ["0.650", "0.650"]]


def test_an_iteration_of_videos_is_charged_with_its_decoding() -> None:
    # 16 samples of 10 steps, decoded whole, and 4 timesteps of each: a reference, and forward and backward (old is
    # what is trained, in an iteration of one step). Prices of h200.yaml, in seconds; then the revision and Ray.
    sampled, learned = 16 * (10 * 0.1087 + 1.21), 16 * 4 * (0.1348 + 0.4277)
    assert shape_results.SHAPES["2x1_8of8"].charged("wan22_5b") == pytest.approx(sampled + learned + 0.87, rel=0.01)
    # 24 previews begin and 12 are finished; 29 of 49 frames are decoded, which is no less than 5 of 9.
    previews = 3 * ((24 * 2 + 12 * 4) * 0.08863 + 36 * 1.21 * 29 / 49)
    kept, learned = 3 * 4 * (10 * 0.1087 + 1.21), 12 * 4 * (0.1348 + 0.4277) + 8 * 4 * 0.1348
    two_stages = shape_results.SHAPES["1x3_4of24"]
    assert two_stages.charged("wan22_5b") == pytest.approx(previews + kept + learned + 0.87, rel=0.01)
    whole = previews + 3 * 36 * 1.21 * 20 / 49 + kept + learned + 0.87
    assert two_stages.charged("wan22_5b, all frames") == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize(("given_", "count", "named"), [(None, 2, ["0", "1"]), ("3, 5,7", 2, ["3", "5"])])
def test_runs_use_the_devices_that_the_script_may_use(
    given_: str | None, count: int, named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given_ is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given_)
    assert shapes.devices(count) == named
    with shapes.mps(count, wanted=False) as places:
        assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == named


def test_more_devices_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(SystemExit, match=r"CUDA_VISIBLE_DEVICES is '3', but --gpus is 2; it must be at most 1"):
        shapes.devices(2)


MPS = """#!/bin/sh
echo "$1 ${CUDA_VISIBLE_DEVICES} ${CUDA_MPS_PIPE_DIRECTORY}" >> "$RECORD"
"""


def test_mps_serves_the_devices_of_this_script_in_folders_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-cuda-mps-control"
    command.write_text(MPS)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with shapes.mps(2, wanted=True) as first, shapes.mps(1, wanted=True) as second:
        places = [*first, *second]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["0", "0", "0"]  # of each server's one device
    assert len({place["CUDA_MPS_PIPE_DIRECTORY"] for place in places}) == 3
    begun = [line.split() for line in (tmp_path / "record").read_text().splitlines() if line.startswith("-d")]
    served = [(device, place["CUDA_MPS_PIPE_DIRECTORY"]) for device, place in zip("353", places, strict=True)]
    assert [(device, folder) for _, device, folder in begun] == served
