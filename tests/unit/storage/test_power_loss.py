"""What a run folder promises of a disk that loses all that was not synced when its machine loses power."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from solrl_ray.storage.resume import resume_point
from solrl_ray.storage.run_folder import RunFolder
from tests.simulated.memory_disk import MemoryDisk, PowerLoss
from tests.support import made_runs
from tests.support.made_checkpoints import small_state
from tests.support.small import small_config

CONFIG = small_config(Path("/"), "run", "run.iterations=9")
UNREADABLE = ("run", "checkpoints", "iteration-000004", "policy.safetensors")


def trained() -> tuple[MemoryDisk, RunFolder]:
    """A run with checkpoints after 3 and 4 updates."""
    disk = MemoryDisk()
    path: Any = disk.path("/run")
    folder = RunFolder(path)
    folder.create(CONFIG, resume=False)
    for number in range(4):
        folder.append_metrics(made_runs.iteration(number))
    for updates in (3, 4):
        small_state(updates).save(folder.checkpoint(updates))
    folder.lock.release()
    return disk, folder


def test_what_a_killed_process_had_named_and_not_synced_stays_once_the_run_goes_on() -> None:
    disk, folder = trained()
    for name in ("checkpoints", "journal"):
        path: Any = folder.path / name
        path.mkdir(exist_ok=True)
        with (path / "unsynced").open("wb") as file:
            file.write(b"")
    folder.create(CONFIG, resume=True)
    assert not [path for path in disk.at_risk() if not path.endswith("/lock")]


def test_a_loss_of_power_while_a_run_is_resumed_costs_no_checkpoint_that_can_be_read_again() -> None:
    """The disk does not give the newest checkpoint to the first attempt, and gives it to the second one."""
    gone_on_after = set()
    for last in range(1, 40):
        disk, folder = trained()
        disk.node(UNREADABLE).unreadable = True
        left = last

        def used(operation: str) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise PowerLoss

        disk.before = used
        try:
            resume_point(folder, iterations=9)
        except PowerLoss:
            pass
        else:
            break
        disk.before = lambda operation: None
        disk.lose_power(last)
        if node := disk.node(UNREADABLE):
            node.unreadable = False
        gone_on_after.add(resume_point(folder, iterations=9).updates)
    else:
        pytest.fail("resuming has no end")
    assert gone_on_after == {3, 4}
