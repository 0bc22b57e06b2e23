"""Real learner ranks in processes of their own, joined over gloo as the learner actors are."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

from solrl_ray.learning.engine import free_port, leave_process_group, process_group

PRELOADED = ("solrl_ray.models.flux", "peft", "deepspeed")
"""What every rank imports, imported once."""
TIMEOUT = 120.0
"""Longest wait for a group of ranks, seconds."""


def run_ranks(world_size: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call ``function(rank, world_size, *arguments)`` in `world_size` fresh processes with one thread each.

    Raises `AssertionError` if a rank fails or is not done in time. Results travel in files.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(list(PRELOADED))
    port = free_port()
    ranks = [
        forks.Process(target=_rank, args=(rank, world_size, port, function, arguments)) for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world_size, f"ranks ended with {codes}; None is a rank that hung"


def _rank(rank: int, world_size: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    process_group(
        rank,
        world_size,
        "127.0.0.1",
        port,
        device=torch.device("cpu"),
        timeout=TIMEOUT / 2,
        one_host=True,
    )
    function(rank, world_size, *arguments)
    leave_process_group()
