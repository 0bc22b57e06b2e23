"""Rewards of videos: chosen frames for rewards of pictures, motion, own functions and judges of whole videos."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from solrl_ray import models, rewards
from solrl_ray.config.rewards import RewardConfig, evenly_spaced
from solrl_ray.errors import UserError
from solrl_ray.records import SampleShape
from solrl_ray.rewards import trial
from tests.support.chat_server import Asked, serving
from tests.support.sentences import names
from tests.support.small import small_config

PROMPTS = ["a red square", "two blue circles"]
SOURCE = """
def brightness(images, prompts):
    assert images.ndim == 4
    return images.mean(dim=(1, 2, 3))

def last_minus_first(videos, prompts):
    assert videos.ndim == 5
    return (videos[:, :, -1] - videos[:, :, 0]).mean(dim=(1, 2, 3))

def change(videos, prompts):  # of one frame nan
    return videos.diff(dim=2).mean(dim=(1, 2, 3, 4))

def length(video, prompts):
    return [video.shape[2]] * len(prompts)
"""


@pytest.fixture
def function(tmp_path: Path) -> Callable[[str], str]:
    file = tmp_path / "own.py"
    file.write_text(SOURCE)
    return lambda name: f"{file}:{name}"


def videos(levels: list[list[float]]) -> Tensor:
    """Grey videos: a row a video, a number a frame."""
    return torch.tensor(levels)[:, None, :, None, None].expand(-1, 3, -1, 4, 6).contiguous()


def scored(shown: Tensor, **entry: Any) -> list[float]:
    found: list[float] = rewards.load([RewardConfig(**entry)], "cpu").score(shown, PROMPTS[: len(shown)]).tolist()
    return found


@pytest.mark.parametrize(
    ("frames", "count", "expected"),
    [(9, 1, [4]), (9, 2, [0, 8]), (9, 3, [0, 4, 8]), (5, 4, [0, 1, 3, 4]), (3, 8, [0, 1, 2]), (1, 4, [0])],
)
def test_chosen_frames_are_spread_over_the_video(frames: int, count: int, expected: list[int]) -> None:
    assert evenly_spaced(frames, count) == expected


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ({"count": 3}, [(0.1 + 0.5 + 0.3) / 3, (1.0 + 0.0 + 0.5) / 3]),
        ({"count": 3, "combine": "worst"}, [0.1, 0.0]),
        ({"count": 2}, [0.2, 0.75]),
        ({"count": 1}, [0.5, 0.0]),
    ],
)
def test_a_reward_of_pictures_scores_chosen_frames(
    frames: dict[str, Any], expected: list[float], function: Callable[[str], str]
) -> None:
    shown = videos([[0.1, 0.9, 0.5, 0.9, 0.3], [1.0, 0.2, 0.0, 0.2, 0.5]])
    assert scored(shown, kind=function("brightness"), frames=frames) == pytest.approx(expected)


def test_a_function_asks_for_videos_by_the_name_of_its_parameter(function: Callable[[str], str]) -> None:
    shown = videos([[0.1, 0.9, 0.3], [1.0, 0.2, 0.5]])
    assert scored(shown, kind=function("last_minus_first")) == pytest.approx([0.2, -0.5])
    assert scored(shown, kind=function("length")) == [3, 3]


def bar(*columns: int, size: int = 32) -> Tensor:
    """A white bar of a quarter of the width, with its left side in a column of each frame: [3, T, size, size]."""
    video = torch.zeros(3, len(columns), size, size)
    for frame, column in enumerate(columns):
        video[:, frame, :, column : column + size // 4] = 1.0
    return video


def test_motion_is_change_that_goes_on() -> None:
    # Two columns of 32 become white and two black, each frame; twice as many within two frames.
    moving = bar(0, 2, 4, 6, 8)[None]
    assert scored(moving, kind="motion", enough=0.5) == pytest.approx([0.125 / 0.5])
    assert scored(moving, kind="motion", enough=0.1) == [1.0]
    larger = bar(*range(0, 40, 8), size=128)[None]  # the same, of which motion sees blocks of 4 x 4 pixels
    assert scored(larger, kind="motion", enough=0.5) == pytest.approx([0.125 / 0.5])
    assert scored(moving[:, :, :2], kind="motion", enough=0.1) == [0.0]


def test_motion_sees_none_in_a_still_picture_a_fade_a_flicker_a_shake_and_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    still = torch.rand(3, 1, 32, 32, generator=generator).expand(-1, 12, -1, -1)
    fade = 0.5 * still + torch.linspace(0, 0.5, 12)[:, None, None]
    every_second = (torch.arange(12) % 2)[:, None, None]
    contrast = still * (1 - 0.5 * every_second)
    part = still.clone()
    part[:, 1::2, :16] *= 0.3
    shake = torch.where(every_second.bool(), still.roll(2, dims=-1), still)
    noisy = 0.5 * still + 0.5 * torch.rand(3, 12, 32, 32, generator=generator)
    for video in (still, fade, contrast, part, shake, noisy):
        assert scored(video[None], kind="motion", enough=0.02) == pytest.approx([0.0], abs=0.1)
    # Less change from frame to frame than each of the last four, but it goes on.
    assert scored(bar(*range(0, 24, 2))[None] * 0.2, kind="motion", enough=0.02) == [1.0]


def test_a_judge_sees_the_chosen_frames_of_a_video_in_one_question() -> None:
    def answer(asked: Asked) -> str:
        return str(len([part for part in asked.body["messages"][0]["content"] if part["type"] == "image_url"]))

    shown = videos([[0.1, 0.9, 0.3, 0.2, 0.0], [1.0, 0.2, 0.5, 0.1, 0.2]])
    with serving(answer) as server:
        judge = {"url": server.url, "model": "eyes", "question": {"text": "Does it move, from 0 to 10? {prompt}"}}
        together = scored(shown, kind="judge", judge=judge, frames={"count": 4, "combine": "together"})
        asked = len(server.asked)
        each = scored(shown, kind="judge", judge=judge, frames={"count": 4})
    assert (together, asked) == (pytest.approx([0.4, 0.4]), 2)
    assert (each, len(server.asked) - asked) == (pytest.approx([0.1, 0.1]), 8)


@pytest.mark.parametrize(
    ("entry", "frames", "key", "values"),
    [
        ({"kind": "ocr"}, 9, "rewards.0.frames", "ocr"),
        ({"kind": "ocr", "frames": {"count": 2}}, 0, "rewards.0.frames", "model.frames"),
        ({"kind": "ocr", "frames": {"count": 10}}, 9, "rewards.0.frames.count", "10 9"),
        ({"kind": "ocr", "frames": {"count": 4, "combine": "together"}}, 9, "rewards.0.frames.combine", "judge"),
        ({"kind": "videoreward", "path": "p", "base": "b"}, 9, "rewards.0.frames", "missing"),
        ({"kind": "videoreward", "path": "p", "base": "b", "frames": {"count": 6}}, 9, "rewards.0.frames", "mean"),
        (
            {"kind": "videoreward", "path": "p", "base": "b", "frames": {"count": 5, "combine": "together"}},
            9,
            "rewards.0.frames",
            "count: 5",
        ),
        ({"kind": "videoreward", "path": "p", "base": "b"}, 0, "rewards.0.kind", "model.frames"),
        ({"kind": "motion", "enough": 0.1, "frames": {"count": 4}}, 9, "rewards.0.frames", "motion"),
        ({"kind": "motion", "enough": 0.1}, 0, "rewards.0.kind", "motion model.frames"),
        ({"kind": "motion"}, 9, "rewards.0.kind", "motion enough"),
    ],
)
def test_an_entry_that_does_not_fit_the_samples_is_refused(
    entry: dict[str, Any], frames: int, key: str, values: str
) -> None:
    with pytest.raises(UserError) as refused:
        rewards.check([RewardConfig(**entry)], [SampleShape(16, 16, frames)], str)
    assert names(str(refused.value), key, values)


@pytest.mark.parametrize(
    ("name", "entry", "frames", "value"),
    [
        ("brightness", {}, 5, "model.frames is 5"),
        ("last_minus_first", {"frames": {"count": 2}}, 5, "frames"),
        ("last_minus_first", {}, 0, "model.frames"),
    ],
)
def test_a_function_that_does_not_fit_the_samples_is_refused_when_it_is_tried(
    name: str, entry: dict[str, Any], frames: int, value: str, function: Callable[[str], str]
) -> None:
    config = RewardConfig(kind=function(name), **entry)
    with pytest.raises(UserError, match=rf"^rewards\.0\.kind .*{value}"):
        trial.here([trial.Trial("rewards.0.kind", config, (SampleShape(16, 16, frames),), ("a", "b"))], "cpu")


def test_a_function_of_videos_is_tried_on_videos(function: Callable[[str], str]) -> None:
    tried = [
        trial.Trial("rewards.0.kind", RewardConfig(kind=function("length")), (SampleShape(16, 16, 5),), ("a", "b")),
        trial.Trial(
            "rewards.1.kind",
            RewardConfig(kind=function("brightness"), frames={"count": 2}),
            (SampleShape(16, 16, 5),),
            ("a", "b"),
        ),
    ]
    lengths, brightness = trial.here(tried, "cpu")
    assert lengths == [5, 5]
    assert all(0.4 < each < 0.6 for each in brightness)


def test_rewards_are_tried_on_what_is_decoded_of_previews_too(function: Callable[[str], str], tmp_path: Path) -> None:
    config = small_config(tmp_path, "run", "model.frames=9", "rollout.preview={prune: null, latent_frames: [1]}")
    shapes = models.scored(config.model_copy(update={"model": config.model.model_copy(update={"family": "wan"})}))
    assert [shape.frames for shape in shapes] == [9, 1]
    tried = trial.Trial("rewards.0.kind", RewardConfig(kind=function("change")), shapes, ("a", "b"))
    with pytest.raises(UserError, match=r"^rewards\.0\.kind .*nan"):
        trial.here([tried], "cpu")
