"""Real learner ranks in processes of their own, joined over gloo as the learner actors are."""

from __future__ import annotations

import pickle
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from solrl_ray.learning.engine import free_port, leave_process_group, process_group
from tests.support.forkserver import calling
from tests.support.patience import patience


def run_ranks(
    forks: str, world_size: int, function: Callable[..., None], *arguments: Any, dies: int | None = None
) -> None:
    """Call ``function(rank, world_size, *arguments)`` in `world_size` fresh processes with one thread each.

    Args:
        forks: the command by which processes are forks of one that has imported what ranks import.
        dies: the rank that kills itself.

    Raises `AssertionError` if a rank fails or is not done in time. Results travel in files.
    """
    with TemporaryDirectory() as folder:
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((world_size, free_port(), patience(240.0), function, arguments)))
        ranks = [subprocess.Popen(calling(forks, run_rank, str(rank), str(call))) for rank in range(world_size)]
        codes = [process.wait() for process in ranks]
    expected = [137 if rank == dies else 0 for rank in range(world_size)]
    assert codes == expected, f"ranks ended with {codes}; 137 is a rank that hung or was killed"


def run_rank(rank: str, call: str) -> None:
    world_size, port, seconds, function, arguments = pickle.loads(Path(call).read_bytes())
    signal.alarm(int(seconds))  # which kills
    torch.set_num_threads(1)
    process_group(
        int(rank), world_size, "127.0.0.1", port, device=torch.device("cpu"), timeout=seconds / 2, one_host=True
    )
    function(int(rank), world_size, *arguments)
    leave_process_group()
