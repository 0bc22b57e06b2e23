"""Which losses of a pool's workers use up a replacement."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.fleet.fleet import Fleet
from actors.monitoring.telemetry import Telemetry
from actors.world import Tasks
from solrl_ray.errors import Late, Leaving, RunError, Unreachable, WorkerGone
from solrl_ray.scheduling.worker_state import State
from solrl_ray.storage.run_folder import RunFolder
from tests.simulated import virtual_clock
from tests.simulated.memory_disk import MemoryDisk
from tests.simulated.world import SimulatedWorld
from tests.support.small import small_config


@pytest.mark.parametrize(
    ("error", "has_worked", "spent"),
    [
        (WorkerGone("explorer-0", "it was killed"), True, 1),
        (Late("a unit", 3.0), True, 1),
        (Leaving("SIGTERM"), True, 0),
        (Unreachable("explorer-0", "the network was cut"), True, 0),
        (Unreachable("explorer-0", "no network reaches it"), False, 1),
    ],
    ids=str,
)
def test_a_cut_network_costs_no_replacement_once_the_worker_has_worked(
    tmp_path: Path, error: Exception, has_worked: bool, spent: int
) -> None:
    config = small_config(tmp_path, "cut", "fleet.max_replacements=3")

    async def test() -> None:
        world = SimulatedWorld(lambda role, name: object(), MemoryDisk())
        async with Tasks() as tasks:
            fleet = Fleet(config, world, tasks, Telemetry(config, RunFolder(tmp_path), world))
            fleet.open()
            lost = fleet.explorers.workers["explorer-0"]
            lost.proved = has_worked
            fleet.explorers._report_exit(lost, error, 0)
            assert fleet.replacements.left == 3 - spent
            assert "explorer-0.1" in fleet.explorers.workers

    virtual_clock.run(test())


def test_a_worker_that_is_cut_off_again_and_again_uses_up_the_budget(tmp_path: Path) -> None:
    """Two losses are free, two are paid for, the fifth ends the run."""
    config = small_config(tmp_path, "flapping", "fleet.max_replacements=2")

    async def test() -> None:
        world = SimulatedWorld(lambda role, name: object(), MemoryDisk())
        async with Tasks() as tasks:
            fleet = Fleet(config, world, tasks, Telemetry(config, RunFolder(tmp_path), world))
            fleet.open()
            left = []

            def cut(time: int) -> None:
                lost = fleet.explorers.workers[f"explorer-0.{time}" if time else "explorer-0"]
                lost.state, lost.proved = State.READY, True
                fleet.explorers._report_exit(lost, Unreachable(lost.name, "the network was cut"), 0)
                left.append(fleet.replacements.left)

            for time in range(4):
                cut(time)
            with pytest.raises(RunError, match=r"all 2 replacements of fleet.max_replacements are used"):
                cut(4)
            assert left == [2, 2, 1, 0]

    virtual_clock.run(test())
