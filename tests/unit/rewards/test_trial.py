"""A user's own reward is tried before anything is started, and its faults are told with the user's traceback."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from solrl_ray import rewards
from solrl_ray.cli import reward_trial
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.config.schema import EvaluationConfig
from solrl_ray.errors import UserError
from solrl_ray.records import SampleShape
from solrl_ray.rewards import import_callable, trial
from tests.support.patience import patience

SHAPES = (SampleShape(16, 16),)
Trials = Callable[[str], list[trial.Trial]]
SOURCE = """
import multiprocessing, os, time
import torch

def tensor(images, prompts):
    assert images.shape == (2, 3, 16, 16) and images.dtype == torch.float32 and 0 <= images.min() <= images.max() <= 1
    return images.mean(dim=(1, 2, 3))

def locks(images, prompts):
    global lock
    lock = multiprocessing.get_context("spawn").Lock()  # as a progress bar has one
    return numbers(images, prompts)

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

def darkens(images, prompts):
    return images.mul_(0.5).mean(dim=(1, 2, 3))

def brightness(images, prompts):
    return images.mean(dim=(1, 2, 3))

BUFFER = torch.zeros(2)

def reuses(images, prompts):
    return BUFFER.copy_(images.mean(dim=(1, 2, 3)))

def meddles(images, prompts):
    import random, numpy
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1), torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(not torch.is_grad_enabled())
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    return images.mean(dim=(1, 2, 3))

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

KEPT = """
from multiprocessing import Pool
from beside import mean

POOL = Pool(1)

def kept(images, prompts):
    return POOL.map(mean, images.numpy())
"""
STARTS = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from torch.utils.data import DataLoader
from beside import mean

def one(image):
    return mean(image)

def put(queue, image):
    queue.put(one(image))

def process(images, prompts):
    context, scores = get_context(), []
    for image in images.numpy():
        queue = context.SimpleQueue()
        context.Process(target=put, args=(queue, image)).start()
        scores.append(queue.get())
    return scores

def alone(images, prompts):
    return [one(image) for image in images.numpy()]

class Images:
    def __init__(self, images):
        self.images = images
    def __len__(self):
        return len(self.images)
    def __getitem__(self, index):
        return one(self.images[index])

def pool(method, images):
    with get_context(method).Pool(1) as pool:
        return pool.map(one, images)

def executor(method, images):
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        return list(pool.map(one, images))

def loader(method, images):
    loaded = DataLoader(Images(images), batch_size=None, num_workers=1, multiprocessing_context=method)
    return [float(score) for score in loaded]

def way(kind, method):
    return lambda images, prompts: kind(method, images.numpy())

pool_default, executor_default, loader_default = (way(kind, None) for kind in (pool, executor, loader))
pool_spawn = way(pool, "spawn")
"""


@pytest.fixture
def of(tmp_path: Path) -> Trials:
    (tmp_path / "own_rewards.py").write_text(SOURCE)

    def make(function: str) -> list[trial.Trial]:
        config = RewardConfig(kind=f"{tmp_path}/own_rewards.py:{function}")
        return [trial.Trial("rewards.0.kind (my.yaml)", config, SHAPES, ("a red square", "two blue circles"))]

    return make


@pytest.fixture
def drawing(tmp_path: Path) -> Trials:
    (tmp_path / "own_rewards.py").write_text(SOURCE)

    def make(function: str) -> list[trial.Trial]:
        config = EvaluationConfig(reference=f"{tmp_path}/own_rewards.py:{function}")
        return [trial.Trial("evaluation.reference (my.yaml)", config, SHAPES, ("a red square", "two blue circles"))]

    return make


def test_what_functions_give_comes_back_from_the_child(of: Trials) -> None:
    given = [*of("numbers"), *of("tensor"), *of("array"), *of("meddles")]
    numbers, *means = reward_trial.in_child(given, gpu=False, seconds=120)
    assert numbers == [len("a red square"), len("two blue circles")]
    for scores in means:
        assert scores == pytest.approx([0.5, 0.5], abs=0.05)  # means of uniform noise
        assert scores[0] != scores[1]


def test_functions_that_start_processes_give_the_same_by_every_way_to_start_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children import the file as the trial did, and nothing of the present folder by chance. A pool made at import
    needs fork, which is the default alone.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "socket.py").write_text("raise SystemError('imported by chance')\n")
    (tmp_path / "starts.py").write_text(STARTS)
    (tmp_path / "beside.py").write_text("def mean(image):\n    return float(image.mean())\n")
    ways = ["kept", "process", "pool_default", "executor_default", "loader_default", "pool_spawn"]
    (tmp_path / "keeps.py").write_text(KEPT)
    kinds = [f"{tmp_path}/{'keeps' if way == 'kept' else 'starts'}.py:{way}" for way in ("alone", *ways)]
    config = [RewardConfig(kind=kind) for kind in kinds]
    trials = [trial.Trial("rewards.0.kind (my.yaml)", each, SHAPES, ("a", "b")) for each in config]
    alone, *found = reward_trial.in_child(trials, gpu=False, seconds=patience(240.0))  # type: ignore[misc]
    assert alone[0] != alone[1]
    assert dict(zip(ways, found, strict=True)) == dict.fromkeys(ways, alone)


def test_nothing_is_left_behind_by_a_child_that_answered(of: Trials, tmp_path: Path) -> None:
    (tmp_path / "trials").write_bytes(pickle.dumps(of("locks")))
    code = """
import pickle, sys
from solrl_ray.cli import reward_trial
if __name__ == "__main__":
    print(reward_trial.in_child(pickle.load(open(sys.argv[1], "rb")), gpu=False, seconds=120))
"""
    (tmp_path / "user.py").write_text(code)
    command = [sys.executable, str(tmp_path / "user.py"), str(tmp_path / "trials")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(240.0), check=True)
    assert done.stdout == f"[[{float(len('a red square'))}, {float(len('two blue circles'))}]]\n"
    assert "leaked" not in done.stderr


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("text", "returned a str; expected one number per image"),
        ("words", "returned a list with a non-number: could not convert string to float: 'good'"),
        ("one", "returned a float; expected one number per image"),
        ("column", "returned values of shape [2, 3] for 2 images; expected [2]"),
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
    with pytest.raises(UserError, match="SIGKILL"):
        reward_trial.in_child(of("dies"), gpu=False, seconds=120)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"1 s \(fleet\.deadlines\.start\)"):
        reward_trial.in_child(of("hangs"), gpu=False, seconds=1)
    assert time.monotonic() - began < patience(30.0)


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
    with pytest.raises(UserError, match=r"^evaluation\.reference \(my\.yaml\) is '.*KeyError: "):
        reward_trial.in_child([*of("bug"), *drawing("unknown")], gpu=True, seconds=120)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (
            "bytes_",
            "drew an image with values from 255 to 255 for the prompt 'a red square'; expected numbers from",
        ),
        ("batch", "drew an image of shape [1, 3, 16, 16]; expected [3, height, width]."),
        ("unknown", "for the prompt 'a red square'\nTraceback (most recent call last):\n"),
        ("absent", "has no function absent"),
    ],
)
def test_what_is_no_real_picture_is_told(drawing: Trials, function: str, problem: str) -> None:
    with pytest.raises(UserError) as refused:
        trial.here(drawing(function), "cpu")
    assert str(refused.value).startswith("evaluation.reference (my.yaml) is '")
    assert problem in str(refused.value)


def mixture(path: Path, *functions: str) -> rewards.RewardMixture:
    return rewards.load([RewardConfig(kind=f"{path}/own_rewards.py:{function}") for function in functions], "cpu")


def test_a_function_that_writes_into_its_pictures_changes_no_other_reward(of: Trials, tmp_path: Path) -> None:
    of("darkens")
    images = torch.full((2, 3, 4, 4), 0.5)
    for order in (("darkens", "brightness"), ("brightness", "darkens")):
        assert mixture(tmp_path, *order).score(images, ["a", "b"]).tolist() == [0.75, 0.75]  # 0.25 + 0.5
    assert images.unique().tolist() == [0.5]


def test_scores_stay_as_they_were_if_a_function_uses_its_tensor_again(of: Trials, tmp_path: Path) -> None:
    of("reuses")
    reward = mixture(tmp_path, "reuses")
    [first] = reward.components(torch.full((2, 3, 4, 4), 0.5), ["a", "b"]).values()
    reward.components(torch.ones(2, 3, 4, 4), ["a", "b"])
    assert first.tolist() == [0.5, 0.5]


def process_state() -> tuple[Any, ...]:
    generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    settings = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    mask = os.umask(0)
    os.umask(mask)
    return settings, torch.get_float32_matmul_precision(), generators, Path.cwd(), mask


def test_settings_and_random_states_of_the_process_are_restored_after_a_call(of: Trials, tmp_path: Path) -> None:
    of("meddles")
    before = process_state()
    assert mixture(tmp_path, "meddles").score(torch.ones(2, 3, 4, 4), ["a", "b"]).tolist() == [1.0, 1.0]
    assert process_state() == before


def test_what_a_module_sets_as_it_is_imported_is_put_back(tmp_path: Path) -> None:
    (tmp_path / "seeds.py").write_text(
        "import os, torch, numpy\ntorch.manual_seed(0)\nnumpy.random.seed(0)\nos.chdir('/')\nos.umask(0o777)\n"
        "torch.set_default_dtype(torch.float64)\ndef f(): pass\n"
    )
    before = process_state()
    import_callable(f"{tmp_path}/seeds.py:f", "rewards.0.kind")
    assert process_state() == before
