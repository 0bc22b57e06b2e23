"""A pool of small real actors of which one is lent."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from actors.fleet.events import Left, Lent, Loaded, Lost, Started
from solrl_ray.config.schema import Deadlines
from solrl_ray.errors import RunError
from solrl_ray.records import Receipt
from tests.chaos.pools import Worker, load, pool_of, settle

pytestmark = pytest.mark.usefixtures("local_ray")


class Guest(Worker):
    """Once it was lent it cannot load its run's weights any more; its replacement can."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lent = False

    def lend(self, loan: int) -> None:
        self._lent = True

    def load_revision(self, full: bool) -> Receipt:
        if self._lent:
            raise RunError("out of memory")
        return super().load_revision(full)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_who_is_lost_while_it_is_lent_is_replaced_at_no_cost_and_who_dies_idle_is_missed(killed: bool) -> None:
    pool = pool_of(Guest, deadlines=Deadlines(start=100.0, publish=10.0))
    pool.open("regenerator-0")
    pool.publish("revision 0", load)
    settle(pool, 2)
    pool.lend("regenerator-0", 1)
    assert settle(pool, 1) == [Lent("regenerator-0")]
    pool.ping()
    assert pool.refs() == []  # it may be at work for its borrower for long
    if killed:
        kill(pool._members["regenerator-0"].handle)
    pool.take_back("regenerator-0")
    (call,) = pool._members["regenerator-0"].calls.values()
    assert call.seconds == 10.0 + (100.0 + 10.0)  # its own, after its borrower may have loaded weights and rewards
    lost, started, loaded = settle(pool, 3)
    assert isinstance(lost, Lost)
    assert (lost.replacement, lost.reason.endswith(", while it was lent")) == ("regenerator-0.1", True)
    assert ("out of memory" in lost.reason) is not killed
    assert isinstance(started, Started)
    assert isinstance(loaded, Loaded)
    pool.ping()
    assert not pool.awaited
    ready, _ = ray.wait(pool.refs(), timeout=60.0)
    assert (pool.settle(set(ready)), pool.roll.idle()) == ([], ["regenerator-0.1"])
    kill(pool._members["regenerator-0.1"].handle)
    pool.ping()
    with pytest.raises(RunError, match=r"regenerator-0\.1 was lost .*, and all 0 replacements"):
        settle(pool, 1)


def kill(handle: Any) -> None:
    """End an actor and return when it is dead: `ray.kill` does not wait, and it may answer once more."""
    ray.kill(handle)
    with pytest.raises(RayActorError):  # noqa: PT012
        for _ in range(600):
            ray.get(handle.__ray_ready__.remote(), timeout=60.0)
            time.sleep(0.1)


class Host(Worker):
    """Works for its borrower until the file is there."""

    def lend(self, loan: int) -> None:
        pass

    def work(self, until: Path) -> str:
        while not until.exists():
            time.sleep(0.02)
        return "done"


def test_who_is_lent_when_it_is_to_leave_finishes_what_it_does_for_its_borrower(tmp_path: Path) -> None:
    pool = pool_of(Host)
    pool.open("regenerator-0")
    pool.publish("revision 0", load)
    settle(pool, 2)
    pool.lend("regenerator-0", 1)
    settle(pool, 1)
    work = pool._members["regenerator-0"].handle.work.remote(tmp_path / "go")
    pool.drain("regenerator-0")
    assert pool.settle(set()) == []
    assert pool.roll.census()["draining"] == 1
    (tmp_path / "go").touch()
    loaded, left = settle(pool, 2)
    assert (type(loaded), left) == (Loaded, Left("regenerator-0"))
    assert ray.get(work, timeout=60.0) == "done"
