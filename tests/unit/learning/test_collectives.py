"""A rank whose collectives are aborted says that another rank is lost, whatever came of them."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from solrl_ray.errors import PeerGone, RunError
from solrl_ray.learning import collectives
from solrl_ray.learning.collectives import Collectives

CPU = torch.device("cpu")
LOST = "learning on rank 3 failed: another rank of its group is lost"


def test_without_an_abort_results_and_errors_pass() -> None:
    rank = Collectives(3, CPU)
    rank.check()
    with rank.watched():
        pass
    with pytest.raises(RunError, match="not finite"), rank.watched():
        raise RunError("the gradient is not finite")
    with pytest.raises(RuntimeError, match="Timed out"), rank.watched():
        raise RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation")


def test_a_group_that_never_comes_together_is_no_lost_rank() -> None:
    """Else a run whose ranks cannot reach each other would be rebuilt until all replacements are used."""
    with pytest.raises(torch.distributed.DistStoreError), Collectives(3, CPU).watched():
        raise torch.distributed.DistStoreError("Timed out after 3 seconds waiting for clients. 1/2 clients joined.")
    with pytest.raises(PeerGone, match="its connections are closed: Connection reset"), Collectives(3, CPU).watched():
        raise torch.distributed.DistNetworkError("Connection reset by peer")


def test_an_abort_before_there_is_a_group_is_noted_and_no_error_of_its_own() -> None:
    rank = Collectives(3, torch.device("cuda"))
    rank.abort()
    with pytest.raises(PeerGone, match=LOST):
        rank.check()


def aborted(rank: Collectives, error: Exception | None) -> None:
    """A block that is aborted from another thread, and then ends, maybe with an error."""
    with rank.watched():
        thread = threading.Thread(target=rank.abort)
        thread.start()
        thread.join()
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [None, RuntimeError("a number that is of no use"), ValueError("no process group")])
def test_after_an_abort_from_another_thread_a_block_ends_with_the_loss(error: Exception | None) -> None:
    rank = Collectives(3, CPU)
    with pytest.raises(PeerGone, match=f"^{LOST}$"):
        aborted(rank, error)
    with pytest.raises(PeerGone, match=LOST):
        rank.check()


def test_an_abort_that_comes_after_the_rank_has_left_harms_no_later_group(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[torch.device] = []
    monkeypatch.setattr(collectives, "abort_process_group", aborted.append)
    left, stays = Collectives(3, CPU), Collectives(0, CPU)
    left.close()
    left.abort()
    left.check()
    assert aborted == []
    stays.abort()
    assert aborted == [CPU]


def test_a_rank_leaves_when_its_abort_has_ended_or_says_that_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, seen = threading.Event(), list[str]()

    def slow(device: torch.device) -> None:
        ends.wait(10.0)
        seen.append("aborted")

    monkeypatch.setattr(collectives, "abort_process_group", slow)
    monkeypatch.setattr(collectives, "ABORT_SECONDS", 0.2)
    rank = Collectives(3, CPU)
    thread = threading.Thread(target=rank.abort)
    thread.start()
    while not rank._turn.locked():
        time.sleep(0.01)
    with pytest.raises(RunError, match=r"aborting the collectives of learner rank 3 took over 0.2 s"):
        rank.close()
    threading.Timer(0.05, ends.set).start()
    rank.close()
    assert seen == ["aborted"]
    thread.join()
