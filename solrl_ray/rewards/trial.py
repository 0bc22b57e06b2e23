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
from solrl_ray.config.loading import Sources
from solrl_ray.config.schema import Config, RewardConfig
from solrl_ray.errors import RewardError, UserError
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.rewards.callables import CallableReward


@dataclass(frozen=True, slots=True)
class Trial:
    """A function to try."""

    key: str
    """How a message names what says so, such as ``rewards.0.kind (--set)``."""
    config: RewardConfig
    resolution: int
    """Height and width of the pictures that it will see, pixels."""
    prompts: tuple[str, str]
    """One for each picture: the run's own, because a reward may understand no others."""


def prompts_of(config: Config, sources: Sources | None = None) -> tuple[str, str]:
    """The first two held-out prompts, or the only one and the first to train on.

    Raises `UserError`: a file of prompts cannot be read.
    """
    sources, found = sources or Sources(), list[str]()
    for name, path in (("heldout", config.prompts.heldout), ("train", config.prompts.train)):
        if len(found) < 2:
            found += [each.text for each in read_prompts(path, f"prompts.{name} ({sources.of(f'prompts.{name}')})")]
    return found[0], found[1]


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
    reward.score(images, trial.prompts)


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
