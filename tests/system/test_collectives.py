"""Ranks that are told of the loss of another one, in real processes joined over gloo."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from solrl_ray.errors import PeerGone
from solrl_ray.learning.collectives import Collectives
from tests.system.ranks import run_ranks


def lose(rank: int, world_size: int, folder: Path, dies: int) -> None:
    """One rank dies while the others wait for it in a collective; what these raise is in files."""
    collectives = Collectives(rank, torch.device("cpu"))
    meet(collectives)
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerGone) as raised:
        meet(collectives, times=3)
    (folder / str(rank)).write_text(str(raised.value))
    collectives.close()


def meet(collectives: Collectives, times: int = 1) -> None:
    with collectives.watched():
        for _ in range(times):
            torch.distributed.all_reduce(torch.ones(1))


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_waits_for_one_that_dies_says_that_it_is_lost(forks: str, tmp_path: Path, dies: int) -> None:
    run_ranks(forks, 2, lose, tmp_path, dies, dies=dies)
    (said,) = [path.read_text() for path in tmp_path.iterdir()]
    assert said.startswith(f"learning on rank {1 - dies} failed: its connections are closed: ")
