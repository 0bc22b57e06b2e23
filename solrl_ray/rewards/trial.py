"""Tries a user's functions on two images: in a child process before a run starts, and in the processes that score.

`evaluation.reference` is tried on two prompts. Errors are shown with the user's traceback, without frames of this
package.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import solrl_ray
from solrl_ray.common.own_code import TEMPORARY
from solrl_ray.config.own_functions import Trial
from solrl_ray.config.schema import EvaluationConfig
from solrl_ray.errors import RewardError, UserError
from solrl_ray.prompts.prompt_set import prompt_id
from solrl_ray.prompts.prompt_set import two_prompts as prompts_of
from solrl_ray.prompts.references import prepared
from solrl_ray.records import Address, SampleShape
from solrl_ray.rewards import load_one
from solrl_ray.rewards.base import IMAGES, VIDEOS, Reward
from solrl_ray.rewards.callables import real_pictures

__all__ = ["Trial", "here", "prompts_of"]


def here(trials: Sequence[Trial], device: str) -> list[list[float]]:
    """Try functions in this process; returns each one's scores. Raises UserError with the user's traceback."""
    scores = []
    for trial in trials:
        try:
            scores.append(_score(trial, device))
        except (UserError, RewardError) as error:
            message = str(error)
            if isinstance(error, RewardError):
                what = "videos" if trial.shapes[0].frames else "images"
                what = "prompts" if isinstance(trial.config, EvaluationConfig) else what
                message = f"{trial.key} is {trial.spec!r}, which was tried on two {what}: {error}"
            raise UserError(f"{message}{_users_traceback(error.__cause__)}") from None
    return scores


def _score(trial: Trial, device: str) -> list[float]:
    if isinstance(trial.config, EvaluationConfig):
        seen = _references(trial, trial.shapes[0], "cpu")
        for number, prompt in enumerate(trial.prompts):
            address = Address(run_seed=0, purpose="initial-noise", prompt_id=prompt_id(prompt))
            real_pictures(trial.config, trial.key, prompt, [address], None if seen is None else seen[number])
        return []

    def keys(_: str) -> str:
        return trial.key

    reward = load_one(trial.config, device, keys=keys, name=trial.config.kind)
    _check_samples(trial, reward)
    scores = list[list[float]]()
    for shape in trial.shapes:
        images = torch.rand(2, 3, *shape.dims, generator=torch.Generator().manual_seed(0))
        scores.append(reward.score(images, trial.prompts, _references(trial, shape, device)).tolist())
    return scores[0]


def _references(trial: Trial, shape: SampleShape, device: str) -> torch.Tensor | None:
    """Reference images of both prompts, float32 [2, n, 3, H, W] in [0, 1]; None if they have none."""
    if not trial.files:
        return None
    seen = [[prepared(file, trial.key, shape.height, shape.width) for file in files] for files in trial.files]
    return torch.from_numpy(np.array(seen)).to(device).float() / 255


def _check_samples(trial: Trial, reward: Reward) -> None:
    """Raise UserError if the reward scores images but the samples are videos, or the reverse."""
    if trial.shapes[0].frames and VIDEOS not in reward.ndims:
        raise UserError(
            f"{trial.key} is {trial.spec!r}, which scores images, but model.frames is {trial.shapes[0].frames}; choose "
            "frames with the entry's `frames`, such as {count: 4}, or name the function's first parameter `video`."
        )
    if not trial.shapes[0].frames and IMAGES not in reward.ndims:
        raise UserError(f"{trial.key} is {trial.spec!r}, which scores videos, but model.frames is not given.")


def _users_traceback(error: BaseException | None) -> str:
    """The traceback without frames of this package and of the import system; empty if no frame remains."""
    if error is None:
        return ""
    whole, package = traceback.TracebackException.from_exception(error), str(Path(solrl_ray.__file__).parent) + os.sep
    imported = str(Path(tempfile.gettempdir(), TEMPORARY))
    theirs = [frame for frame in whole.stack if not frame.filename.startswith((package, imported, "<frozen importlib"))]
    whole.stack = traceback.StackSummary.from_list(theirs)
    return "\n" + "".join(whole.format()).rstrip() if theirs else ""
