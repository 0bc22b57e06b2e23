"""Ranks that notice the loss of another one, in real processes joined over gloo."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from solrl_ray.errors import PeerGone, RunError
from solrl_ray.learning.peer_watch import PeerWatch, _accepted
from tests.support.patience import patience
from tests.system.ranks import run_ranks


def watch(rank: int, world_size: int, folder: Path, dies: int | None) -> None:
    """One rank dies, or the last one leaves; what others are told is in files."""
    told = threading.Event()
    watching = PeerWatch(rank, world_size, "127.0.0.1", torch.device("cpu"), patience(20.0), told.set)
    watching.check()
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if dies is None and rank == world_size - 1:
        watching.close()
        return
    if told.wait(patience(20.0) if dies is not None else 1.0):
        with pytest.raises(PeerGone), watching.watched():
            (folder / str(rank)).touch()
    watching.close()


@pytest.mark.parametrize("dies", [0, 2])
def test_each_rank_is_told_that_another_one_died(forks: str, tmp_path: Path, dies: int) -> None:
    run_ranks(forks, 3, watch, tmp_path, dies, dies=dies)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"} - {str(dies)}


def test_a_rank_that_leaves_alarms_nobody(forks: str, tmp_path: Path) -> None:
    run_ranks(forks, 3, watch, tmp_path, None)
    assert not list(tmp_path.iterdir())


def test_strangers_do_not_hold_up_the_ranks() -> None:
    key = b"01234567"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        silent, wrong, hasty, rank = (socket.create_connection(address) for _ in range(4))
        wrong.sendall(b"GET / HTTP/1.0\r\n")
        hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # resets when it closes
        hasty.close()
        rank.sendall(key[:3])
        threading.Timer(0.2, rank.sendall, (key[3:],)).start()
        (found,) = _accepted(listener, 1, key, patience(20.0))
        assert found.getpeername() == rank.getsockname()
        began = time.monotonic()
        with pytest.raises(RunError, match="1 rank did not connect"):
            _accepted(listener, 1, key, 0.3)
        assert time.monotonic() - began > 0.29
        for each in (silent, wrong, rank, found):
            each.close()
