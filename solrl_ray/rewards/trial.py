"""A user's functions are tried on two pictures before anything is started, in a process that may hang or crash.

What is wrong is told with the user's own traceback: nothing of this package stands in it.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import solrl_ray
from solrl_ray.config.schema import RewardConfig
from solrl_ray.errors import RewardError, UserError
from solrl_ray.rewards.callables import CallableReward

PROMPTS = ("a red square", "two blue circles")


@dataclass(frozen=True, slots=True)
class Trial:
    """A function to try."""

    key: str
    """How a message names what says so, such as ``rewards.0.kind (--set)``."""
    config: RewardConfig
    resolution: int
    """Height and width of the pictures that it will see, pixels."""


def in_child(trials: Sequence[Trial], *, gpu: bool, seconds: float) -> bool:
    """Try functions in a child process.

    Args:
        gpu: workers score on GPUs, so they are tried on one.
        seconds: how long all of them may take, imports included.

    Returns whether they were tried: not if they are to have a GPU and this machine has none.
    Raises UserError, with the user's traceback, if one fails; if it takes too long; if it ends the process.
    """
    context = get_context("spawn")  # a forked child would have threads' locks and no CUDA
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, tuple(trials), gpu), name="trial of the rewards")
    child.start()
    theirs.close()
    try:
        what = _names(trials)
        if not ours.poll(seconds):
            raise UserError(
                f"{what} did not answer within {seconds:g} s (fleet.deadlines.start) when it was tried on two pictures."
            )
        try:
            found = ours.recv()
        except EOFError:
            child.join(5)
            code = child.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            raise UserError(f"{what} ended its process with {how} when it was tried on two pictures.") from None
        if isinstance(found, str):
            raise UserError(found)
        return bool(found)
    finally:
        ours.close()
        with suppress(ProcessLookupError, PermissionError):
            assert child.pid  # 0 would be this process's group
            os.killpg(child.pid, signal.SIGKILL)  # with what it may have started
        child.kill()
        child.join(5)


def here(trials: Sequence[Trial], device: str) -> None:
    """Try functions in this process. Raises UserError with the user's traceback."""
    for trial in trials:
        try:
            _score(trial, device)
        except (UserError, RewardError) as error:
            said = str(error)
            if isinstance(error, RewardError):
                said = f"{trial.key} is {trial.config.kind!r}, which was tried on two pictures: {error}"
            raise UserError(f"{said}{_users_traceback(error.__cause__)}") from None


def _score(trial: Trial, device: str) -> None:
    def keys(_: str) -> str:
        return trial.key

    reward = CallableReward.load(trial.config, device, keys=keys, name=trial.config.kind)
    size = trial.resolution
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    reward.score(images, PROMPTS)


def _child(answer: Connection, trials: tuple[Trial, ...], gpu: bool) -> None:
    os.setsid()
    if gpu and not torch.cuda.is_available():
        answer.send(False)
        return
    try:
        here(trials, "cuda" if gpu else "cpu")
    except UserError as error:
        answer.send(str(error))
    else:
        answer.send(True)


def _users_traceback(error: BaseException | None) -> str:
    """The frames that are not this package's or the import system's; empty if there is none."""
    if error is None:
        return ""
    whole, package = traceback.TracebackException.from_exception(error), str(Path(solrl_ray.__file__).parent) + os.sep
    theirs = [frame for frame in whole.stack if not frame.filename.startswith((package, "<frozen importlib"))]
    whole.stack = traceback.StackSummary.from_list(theirs)
    return "\n" + "".join(whole.format()).rstrip() if theirs else ""


def _names(trials: Sequence[Trial]) -> str:
    return " or ".join(f"{trial.key} {trial.config.kind!r}" for trial in trials)
