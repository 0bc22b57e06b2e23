"""The simulated world's disk keeps what was synced, loses or tears the rest, and is otherwise as a real one."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from solrl_ray.common import files
from solrl_ray.storage.journal import Journal
from tests.simulated.memory_disk import MemoryDisk, PowerLoss

SEEDS = range(200)


def after_power_loss(work: Callable[[Any], None]) -> list[MemoryDisk]:
    """What two hundred disks hold on which `work` was done before the power went."""
    disks = []
    for seed in SEEDS:
        disk = MemoryDisk()
        work(disk.path("/"))
        disk.lose_power(seed)
        disks.append(disk)
    return disks


def content(disk: MemoryDisk, path: str) -> bytes | None:
    at = disk.path(path)
    return at.read_bytes() if at.is_file() else None


@pytest.fixture(params=["real", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return tmp_path if request.param == "real" else MemoryDisk().path("/")


def test_a_file_of_either_disk_is_replaced_read_and_removed(folder: Any) -> None:
    files.replace_file(folder / "a" / "b.txt", b"first\n")
    files.replace_file(folder / "a" / "b.txt", b"second\n")
    assert (folder / "a" / "b.txt").read_text() == "second\n"
    assert [each.name for each in (folder / "a").iterdir()] == ["b.txt"]
    assert files.free_bytes(folder) > 0
    files.remove(folder / "a")
    files.remove(folder / "a")
    assert not (folder / "a").exists()
    with pytest.raises(FileNotFoundError):
        (folder / "a" / "b.txt").open("rb")


def test_a_folder_of_either_disk_appears_whole(folder: Any) -> None:
    for text in (b"old", b"new"):
        files.replace_folder(folder / "state", {"one": text, "two": text})
    assert sorted(each.name for each in folder.glob("state/*")) == ["one", "two"]
    assert (folder / "state" / "two").read_bytes() == b"new"
    (folder / ".left.partial").open("wb").close()
    files.remove_partial(folder)
    assert [each.name for each in folder.iterdir()] == ["state"]


def test_a_lock_of_either_disk_is_one_processs(folder: Any) -> None:
    path = folder / "lock"
    first, second = path.open("a+b", buffering=0), path.open("a+b", buffering=0)
    files.claim(path, first, alone=True)
    with pytest.raises(BlockingIOError):
        files.claim(path, second, alone=False)
    first.close()
    files.claim(path, second, alone=True)
    second.close()


def test_a_replaced_file_is_there_after_a_power_loss() -> None:
    disks = after_power_loss(lambda root: files.replace_file(root / "run" / "config.yaml", b"all of it"))
    assert {content(disk, "/run/config.yaml") for disk in disks} == {b"all of it"}


def test_a_replaced_folder_is_there_after_a_power_loss() -> None:
    disks = after_power_loss(lambda root: files.replace_folder(root / "run" / "state", {"one": b"all of it"}))
    assert {content(disk, "/run/state/one") for disk in disks} == {b"all of it"}


def test_what_a_power_loss_may_take_is_known_before() -> None:
    disk = MemoryDisk()
    root = disk.path("/")
    files.replace_file(root / "run" / "kept", b"text")
    assert disk.at_risk() == []
    (root / "run" / "kept").rename(root / "run" / "other")
    assert disk.at_risk() == ["/run/other"]
    files.sync_folder(root / "run")  # type: ignore[arg-type]
    with (root / "run" / "other").open("ab") as file:
        file.write(b"more")
    assert disk.at_risk() == ["/run/other"]
    (root / "new").mkdir()
    assert disk.at_risk() == ["/new", "/run/other"]
    disk.touched.clear()
    assert disk.at_risk() == []


def test_a_damaged_file_has_another_byte_or_cannot_be_read() -> None:
    found = set()
    for seed in range(20):
        disk = MemoryDisk()
        files.replace_file(disk.path("/file"), b"text")
        disk.damage("/file", random.Random(seed))
        try:
            found.add(sum(one != other for one, other in zip(disk.path("/file").read_bytes(), b"text", strict=True)))
        except OSError as error:
            found.add(error.errno or 0)
            with pytest.raises(OSError, match="Input/output error"):
                disk.path("/file").open("rb").read()
    assert found == {1, errno.EIO}


def test_bytes_that_were_not_synced_are_cut_off_anywhere() -> None:
    def append(root: Any) -> None:
        files.replace_file(root / "log", b"kept ")
        with (root / "log").open("ab") as file:
            file.write(b"lost")

    kept = {content(disk, "/log") for disk in after_power_loss(append)}
    assert kept == {b"kept ", b"kept l", b"kept lo", b"kept los", b"kept lost"}


def test_a_name_that_was_not_synced_is_there_or_not_and_never_half_renamed() -> None:
    def rename(root: Any) -> None:
        files.replace_file(root / "old", b"text")
        (root / "old").rename(root / "new")

    kept = {(content(disk, "/old"), content(disk, "/new")) for disk in after_power_loss(rename)}
    assert kept == {(b"text", None), (None, b"text")}


def test_what_a_journal_has_written_is_durable_and_what_it_writes_is_torn() -> None:
    disk = MemoryDisk()
    journal: Any = Journal(disk.path("/journal/iteration-000000.jsonl"))  # type: ignore[arg-type]
    journal.append({"kind": "open"})
    before = disk.durable("/journal/iteration-000000.jsonl")
    assert before == journal.path.read_bytes()
    with journal.together():
        journal.append({"kind": "explore"})
        assert disk.durable("/journal/iteration-000000.jsonl") == before
    assert disk.durable("/journal/iteration-000000.jsonl") == journal.path.read_bytes() != before


def test_a_journal_waits_for_a_line_that_is_as_long_as_the_damaged_one_which_it_replaces() -> None:
    disk = MemoryDisk()
    path: Any = disk.path("/journal.jsonl")
    Journal(path).append({"n": 1})
    disk.alter(str(path), random.Random(1))
    journal = Journal(path)
    assert journal.recover() == []
    with journal.together():
        journal.append({"n": 1})
    disk.lose_power(0)
    assert journal.entries() == [{"n": 1}]


def test_nothing_is_written_after_the_process_that_wrote_has_lost_power() -> None:
    disk = MemoryDisk()
    disk.user = "the writer"
    file = disk.path("/log").open("ab")
    file.write(b"in its buffer")

    def lose_power(operation: str) -> None:
        raise PowerLoss

    disk.before = lose_power
    with pytest.raises(PowerLoss):
        file.flush()
    disk.before = lambda operation: None
    disk.gone.add("the writer")
    file.close()
    assert disk.path("/log").read_bytes() == b""


def test_what_a_journal_is_taken_up_with_is_durable_though_its_writer_did_not_wait_for_it() -> None:
    disk = MemoryDisk()
    path: Any = disk.path("/journal/iteration-000000.jsonl")
    Journal(path).append({"kind": "open"})
    with path.open("ab") as file:
        file.write(disk.path("/journal/iteration-000000.jsonl").read_bytes() + b"torn")
    assert [entry["kind"] for entry in Journal(path).recover()] == ["open", "open"]
    assert disk.durable(str(path)) == path.read_bytes()
    assert not path.read_bytes().endswith(b"torn")
