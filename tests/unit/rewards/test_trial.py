"""A user's own reward is tried before anything is started, and its faults are told with the user's traceback."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from solrl_ray.cli import reward_trial
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.config.schema import EvaluationConfig
from solrl_ray.errors import UserError
from solrl_ray.rewards import trial

Trials = Callable[[str], list[trial.Trial]]
SOURCE = """
import os, time
import torch

def tensor(images, prompts):
    assert images.shape == (2, 3, 16, 16) and images.dtype == torch.float32 and 0 <= images.min() <= images.max() <= 1
    return images.mean(dim=(1, 2, 3))

def numbers(images, prompts):
    return [len(prompt) for prompt in prompts]

def array(images, prompts):
    return images.mean(dim=(1, 2, 3)).double().numpy()

def text(images, prompts):
    return "good"

def words(images, prompts):
    return ["good", "bad"]

def one(images, prompts):
    return 0.5

def column(images, prompts):
    return images.mean(dim=(2, 3))

def nan(images, prompts):
    return [float("nan"), 1.0]

def bug(images, prompts):
    return deeper(images)

def deeper(images):
    return images.no_such_method()

def hangs(images, prompts):
    time.sleep(600)

def dies(images, prompts):
    os.kill(os.getpid(), 9)

def picture(prompt, address):
    assert prompt in ("a red square", "two blue circles") and address.index == 0
    return torch.rand(3, 20, 24)

def bytes_(prompt, address):
    return torch.full((3, 16, 16), 255, dtype=torch.uint8)

def batch(prompt, address):
    return torch.rand(1, 3, 16, 16)

def unknown(prompt, address):
    raise KeyError(prompt)
"""


@pytest.fixture
def of(tmp_path: Path) -> Trials:
    (tmp_path / "own_rewards.py").write_text(SOURCE)

    def make(function: str) -> list[trial.Trial]:
        config = RewardConfig(kind=f"{tmp_path}/own_rewards.py:{function}")
        return [trial.Trial("rewards.0.kind (my.yaml)", config, 16, ("a red square", "two blue circles"))]

    return make


@pytest.fixture
def drawing(tmp_path: Path) -> Trials:
    (tmp_path / "own_rewards.py").write_text(SOURCE)

    def make(function: str) -> list[trial.Trial]:
        config = EvaluationConfig(reference=f"{tmp_path}/own_rewards.py:{function}")
        return [trial.Trial("evaluation.reference (my.yaml)", config, 16, ("a red square", "two blue circles"))]

    return make


@pytest.mark.parametrize("function", ["tensor", "array"])
def test_an_array_of_numbers_is_as_good_as_a_tensor(of: Trials, function: str) -> None:
    [scores] = trial.here(of(function), "cpu")
    assert scores == pytest.approx([0.5, 0.5], abs=0.05)  # means of uniform noise
    assert scores[0] != scores[1]


def test_what_a_function_gives_comes_back_from_the_child(of: Trials) -> None:
    prompts = ("a red square", "two blue circles")
    assert reward_trial.in_child(of("numbers"), gpu=False, seconds=120) == [[len(prompt) for prompt in prompts]]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("text", "returned a str; right would be one number an image"),
        ("words", "returned a list with what is no number: could not convert string to float: 'good'"),
        ("one", "returned a float; right would be one number an image"),
        ("column", "returned values of shape [2, 3] for 2 images; right would be [2]"),
        ("nan", "returned nan for 1 of 2 images, first for the prompt 'a red square'"),
        ("absent", "has no function absent"),
    ],
)
def test_what_a_function_must_not_return_is_told(of: Trials, function: str, problem: str) -> None:
    with pytest.raises(UserError) as refused:
        trial.here(of(function), "cpu")
    assert str(refused.value).startswith("rewards.0.kind (my.yaml) is '")
    assert problem in str(refused.value)


def test_an_exception_comes_with_the_users_own_traceback_and_no_line_of_ours(of: Trials, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        reward_trial.in_child(of("bug"), gpu=False, seconds=120)
    sentence, *trace = str(refused.value).splitlines()
    file, line = tmp_path / "own_rewards.py", SOURCE.splitlines().index("    return images.no_such_method()") + 1
    assert sentence.endswith(f"'no_such_method' ({file}, line {line}, in deeper)")
    assert trace[0] == "Traceback (most recent call last):"
    assert f'  File "{file}", line {line}, in deeper' in trace
    assert "    return images.no_such_method()" in trace
    assert all(str(tmp_path) in row for row in trace if row.startswith("  File"))


def test_a_function_that_hangs_or_dies_is_told_by_its_deadline_or_signal(of: Trials) -> None:
    with pytest.raises(UserError, match=r"ended its process with signal SIGKILL when it was tried"):
        reward_trial.in_child(of("dies"), gpu=False, seconds=120)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"did not answer within 1 s \(fleet.deadlines.start\) when it was tried"):
        reward_trial.in_child(of("hangs"), gpu=False, seconds=1)
    assert time.monotonic() - began < 30


def test_a_reward_that_is_to_have_a_gpu_is_not_tried_where_there_is_none(
    of: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert reward_trial.in_child(of("bug"), gpu=True, seconds=120) is None


def test_what_draws_real_pictures_is_tried_too_and_needs_no_gpu(
    of: Trials, drawing: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reward_trial.in_child([*of("numbers"), *drawing("picture")], gpu=False, seconds=120)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"^evaluation\.reference \(my\.yaml\) is '.*on two prompts: .* KeyError: "):
        reward_trial.in_child([*of("bug"), *drawing("unknown")], gpu=True, seconds=120)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (
            "bytes_",
            "drew a picture with values from 255 to 255 for the prompt 'a red square'; right would be numbers from",
        ),
        ("batch", "drew a picture of shape [1, 3, 16, 16]; right would be [3, height, width]."),
        ("unknown", "for the prompt 'a red square'\nTraceback (most recent call last):\n"),
        ("absent", "has no function absent"),
    ],
)
def test_what_is_no_real_picture_is_told(drawing: Trials, function: str, problem: str) -> None:
    with pytest.raises(UserError) as refused:
        trial.here(drawing(function), "cpu")
    assert str(refused.value).startswith("evaluation.reference (my.yaml) is '")
    assert problem in str(refused.value)
