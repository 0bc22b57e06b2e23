"""Copies on the host that several workers share: one for all, never written again, and gone with the last of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from solrl_ray.models.host_memory import SharedRoom, SharedRooms
from solrl_ray.models.resting import RestingWeights

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create")
CPU = torch.device("cpu")
WORDS = 1 << 18
"""Int64s of a piece that is large enough to be shared."""

HOLDER = """
import sys, torch
from pathlib import Path
from solrl_ray.models.host_memory import SharedRooms
from solrl_ray.models.resting import RestingWeights
weights = [torch.arange(int(sys.argv[2]))]
resting = RestingWeights(SharedRooms(Path(sys.argv[1])))
resting.lay_down(weights, torch.device("cpu"), changing=())
print("down", flush=True)
sys.stdin.read()
"""


def worker(folder: Path) -> RestingWeights:
    """One with what another process would know of `folder`."""
    return RestingWeights(SharedRooms(folder))


def inodes(resting: RestingWeights) -> list[int]:
    """Of the shared rooms of its pieces."""
    rooms = [piece.room for piece in resting._pieces.values()]
    return [os.fstat(room.descriptor).st_ino for room in rooms if isinstance(room, SharedRoom)]


def test_equal_weights_are_there_once_and_small_or_changing_ones_are_not_shared(tmp_path: Path) -> None:
    first, second = worker(tmp_path), worker(tmp_path)
    mine, theirs = ([torch.arange(WORDS), torch.ones(8), torch.ones(WORDS)] for _ in range(2))
    for resting, tensors in ((first, mine), (second, theirs)):
        resting.lay_down(tensors, CPU, changing=[tensors[2]])
    assert len(inodes(first)) == 1
    assert inodes(first) == inodes(second)
    for resting, tensors in ((first, mine), (second, theirs)):
        resting.take_up()
        assert torch.equal(tensors[0], torch.arange(WORDS))
        assert torch.equal(tensors[2], torch.ones(WORDS))


def test_equal_weights_of_one_worker_are_there_once(tmp_path: Path) -> None:
    resting, tensors = worker(tmp_path), [torch.arange(WORDS), torch.arange(WORDS)]
    resting.lay_down(tensors, CPU, changing=())
    places = {piece.host.data_ptr() for piece in resting._pieces.values()}
    assert len(places) == 1
    resting.take_up()
    assert all(torch.equal(tensor, torch.arange(WORDS)) for tensor in tensors)


def test_without_word_of_what_changes_nothing_is_shared(tmp_path: Path) -> None:
    resting = worker(tmp_path)
    resting.lay_down([torch.arange(WORDS)], CPU)
    assert inodes(resting) == []
    assert list(tmp_path.iterdir()) == []


def test_a_checksum_alone_is_no_proof(tmp_path: Path) -> None:
    first, second = worker(tmp_path), worker(tmp_path)
    mine, theirs = torch.arange(WORDS), torch.arange(WORDS).flip(0)  # the same sum of words
    first.lay_down([mine], CPU, changing=())
    second.lay_down([theirs], CPU, changing=())
    assert set(inodes(first)).isdisjoint(inodes(second))
    second.take_up()
    assert torch.equal(theirs, torch.arange(WORDS).flip(0))


def test_who_changes_after_all_gets_a_copy_of_its_own(tmp_path: Path) -> None:
    first, second = worker(tmp_path), worker(tmp_path)
    mine, theirs = torch.arange(WORDS), torch.arange(WORDS)
    first.lay_down([mine], CPU, changing=())
    second.lay_down([theirs], CPU, changing=())
    second.take_up()
    theirs.fill_(7)
    second.lay_down([theirs], CPU, changing=())
    assert inodes(second) == []
    second.take_up()
    first.take_up()
    assert torch.equal(mine, torch.arange(WORDS))
    assert torch.equal(theirs, torch.full((WORDS,), 7))


def test_what_a_killed_process_made_stays_with_those_who_have_it(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), str(WORDS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"down\n"
        (note,) = tmp_path.glob("*.json")
        second, theirs = worker(tmp_path), torch.arange(WORDS)
        second.lay_down([theirs], CPU, changing=())
        assert inodes(second) == [json.loads(note.read_text())["inode"]]
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    third, others = worker(tmp_path), torch.arange(WORDS)
    third.lay_down([others], CPU, changing=())
    assert inodes(third) == inodes(second)  # through the note of the second
    assert not note.exists()
    for resting, tensor in ((second, theirs), (third, others)):
        resting.take_up()
        assert torch.equal(tensor, torch.arange(WORDS))


def test_a_room_that_cannot_be_had_is_none(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert SharedRooms(tmp_path).make(10**15, pinned=False) is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_notes_go_with_their_room_and_wrong_ones_are_passed_over(tmp_path: Path) -> None:
    resting, tensor = worker(tmp_path), torch.arange(WORDS)
    resting.lay_down([tensor], CPU, changing=())
    (note,) = tmp_path.glob("*.json")
    text = note.read_text()
    resting.take_up()
    del resting
    assert not note.exists()
    note.write_text(text)  # as of a process that was killed, whose pid another one has by now
    (tmp_path / "damaged.json").write_text(text[:40])
    last = worker(tmp_path)
    last.lay_down([tensor], CPU, changing=())
    assert inodes(last) != [json.loads(text)["inode"]]
    last.take_up()
    assert torch.equal(tensor, torch.arange(WORDS))
