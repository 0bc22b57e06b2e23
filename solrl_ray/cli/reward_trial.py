"""Tries the user's functions in a child process before anything starts, because they may hang or crash.

Only the child imports PyTorch, so an error is reported as soon as the user's imports are done.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context, set_start_method
from multiprocessing.connection import Connection

from solrl_ray.config.own_functions import Trial
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import UserError

SAFE_PATH = "PYTHONSAFEPATH"
"""Environment variable that keeps a spawned child from importing modules of the current folder, such as a user's
``socket.py``.
"""
LEAVING = 5.0
"""Seconds for a child that has answered to release the resources of its libraries, such as semaphores. Python warns of
leaked ones.
"""


def in_child(trials: Sequence[Trial], *, gpu: bool, seconds: float) -> list[list[float]] | None:
    """Try functions in a child process.

    Args:
        gpu: Try rewards on a GPU, because workers score on GPUs.
        seconds: Time limit for all functions together, imports included.

    Returns the scores of each reward for its two images; None if the rewards need a GPU and this machine has none.
    Raises UserError if a function fails (with the user's traceback), takes too long or ends the process.
    """
    context = get_context("spawn")  # a forked child would inherit locked locks, and no CUDA
    ours, theirs = context.Pipe(duplex=False)
    before = {SAFE_PATH: os.environ.get(SAFE_PATH, "")}
    child = context.Process(target=_child, args=(theirs, tuple(trials), gpu, before), name="trial of the rewards")
    os.environ[SAFE_PATH] = "1"
    try:
        child.start()
    finally:
        os.environ.update(before)
    theirs.close()
    try:
        what = " or ".join(f"{trial.key} {trial.spec!r}" for trial in trials)
        if not ours.poll(seconds):
            raise UserError(f"{what} did not answer within {seconds:g} s (fleet.deadlines.start) when it was tried.")
        try:
            received = ours.recv()
        except EOFError:
            child.join(5)
            code = child.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            raise UserError(f"{what} ended its process with {how} when it was tried.") from None
        if isinstance(received, str):
            raise UserError(received)
        scores: list[list[float]] | None = received
        child.join(LEAVING)
        return scores
    finally:
        ours.close()
        with suppress(ProcessLookupError, PermissionError):
            assert child.pid  # 0 would be this process's group
            os.killpg(child.pid, signal.SIGKILL)  # the child and its children
        child.kill()
        child.join(5)


def _child(answer: Connection, trials: tuple[Trial, ...], gpu: bool, before: Mapping[str, str]) -> None:
    os.setsid()
    os.environ.update(before)
    set_start_method(None, force=True)  # the platform's default as in workers, not spawn as inherited from the parent
    import torch

    from solrl_ray.rewards.trial import here

    rewards = [trial for trial in trials if isinstance(trial.config, RewardConfig)]
    try:
        here([trial for trial in trials if trial not in rewards], "cpu")  # real images are drawn on CPUs
        if gpu and rewards and not torch.cuda.is_available():
            answer.send(None)
        else:
            answer.send(here(rewards, "cuda" if gpu else "cpu"))
    except UserError as error:
        answer.send(str(error))
