"""Ranks that notice the loss of another one, in real processes joined over gloo."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from solrl_ray.errors import RunError
from solrl_ray.learning.peer_watch import PeerWatch
from tests.system.ranks import run_ranks

SECONDS = 20.0
"""Far less than a lost connection without a closed socket would take to be noticed."""


def watch_until_told(rank: int, world_size: int, folder: Path, last_one_dies: bool) -> None:
    told = threading.Event()
    watch = PeerWatch(rank, world_size, "127.0.0.1", torch.device("cpu"), SECONDS, told.set)
    watch.check()
    if rank == world_size - 1:
        if last_one_dies:
            os.kill(os.getpid(), signal.SIGKILL)
    elif told.wait(SECONDS if last_one_dies else 2.0):
        with pytest.raises(RunError, match="another rank"):
            watch.check()
        (folder / str(rank)).touch()
    watch.close()


def test_each_rank_is_told_that_another_one_died(forks: str, tmp_path: Path) -> None:
    started = time.monotonic()
    run_ranks(forks, 3, watch_until_told, tmp_path, True, dies=2)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert time.monotonic() - started < 60


def test_a_rank_that_leaves_alarms_nobody(forks: str, tmp_path: Path) -> None:
    run_ranks(forks, 3, watch_until_told, tmp_path, False)
    assert not list(tmp_path.iterdir())
