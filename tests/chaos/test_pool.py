"""A pool of small real actors: how a failure arrives, who leaves and who compiles."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest
import ray
from ray.exceptions import ObjectLostError

from actors.fleet.events import Done, Left, Loaded, Lost, Rested, Started, Unplaced, Warmed
from actors.fleet.places import Places
from actors.fleet.pool import Pool
from actors.workers import termination
from solrl_ray.config.schema import Deadlines
from solrl_ray.errors import RunError, UserError
from solrl_ray.records import Attestation, WorkUnit
from tests.chaos.pools import Failure, Worker, load, pool_of, settle, spawn, units

pytestmark = pytest.mark.usefixtures("local_ray")


def opened(failure: Failure) -> Pool:
    pool = pool_of(lambda name: spawn(name, failure=failure), replacements=1)
    pool.open("explorer-0")
    return pool


def test_bad_input_found_in_start_ends_the_run_with_its_own_sentence() -> None:
    with pytest.raises(UserError, match=r"^model\.path: no such folder$"):
        settle(opened(lambda: UserError("model.path: no such folder")), 1)


def test_a_worker_that_cannot_get_its_inputs_is_replaced() -> None:
    lost, started = settle(opened(lambda: ObjectLostError("ab12", None, "")), 2)
    assert isinstance(lost, Lost)
    assert (lost.worker, lost.replacement) == ("explorer-0", "explorer-0.1")
    assert "All copies of ab12 have been lost" in lost.reason
    assert isinstance(started, Started)
    assert started.worker == "explorer-0.1"


class Rests(Worker):
    """Gives memory back, unless it is the second one, which hangs."""

    def release_gpu_cache(self) -> int:
        if self._name == "explorer-1":
            time.sleep(3600.0)
        return 7


def test_who_does_not_leave_the_gpu_to_the_learner_in_time_is_replaced() -> None:
    pool = pool_of(Rests, replacements=1, deadlines=Deadlines(release_gpu_cache=5.0))
    pool.open("explorer-0")
    pool.open("explorer-1")
    pool.release_gpu_cache()  # nobody has started, so there is nothing to give back
    assert not pool.resting
    settle(pool, 2)
    pool.release_gpu_cache()
    assert pool.resting
    rested, lost = settle(pool, 2)
    assert rested == Rested("explorer-0", 7)
    assert isinstance(lost, Lost)
    assert (lost.worker, lost.reason) == ("explorer-1", "release_gpu_cache passed its deadline of 5 s")
    assert not pool.resting


class Told(Worker):
    """The first one is told to end in the middle of its first unit, as by a batch system that takes its node back."""

    def start(self) -> Attestation:
        termination.listen()
        return super().start()

    def explore(self, unit: WorkUnit) -> str:
        termination.check(self._name)
        if "." not in self._name:
            os.kill(os.getpid(), signal.SIGTERM)
        return unit.id


def test_who_gets_sigterm_finishes_its_unit_and_is_replaced_at_no_cost() -> None:
    pool = pool_of(Told, max_inflight=2)
    pool.open("explorer-0")
    settle(pool, 1)
    first, second = units(2)
    pool.give("explorer-0", first, "explore", first)
    pool.give("explorer-0", second, "explore", second)
    done, lost, started = settle(pool, 3)
    assert done == Done("explorer-0", first, first.id)
    assert lost == Lost("explorer-0", "explorer-0 was told to end by SIGTERM", "explorer-0.1")
    assert isinstance(started, Started)
    idle = pool._members["explorer-0.1"].handle
    ray.get(idle.__ray_call__.remote(lambda _: os.kill(os.getpid(), signal.SIGTERM)), timeout=60.0)
    pool.ping()
    assert settle(pool, 1) == [Lost("explorer-0.1", "explorer-0.1 was told to end by SIGTERM", "explorer-0.2")]


class Slow(Worker):
    """Is at its unit until the file appears."""

    def explore(self, unit: WorkUnit, gate: Path) -> str:
        while not gate.exists():
            time.sleep(0.05)
        return unit.id


def test_who_is_to_leave_finishes_first_and_a_pool_whose_rest_finds_no_place_ends_the_run(tmp_path: Path) -> None:
    pool = pool_of(
        lambda name: spawn(name, kind=Slow, resources={} if name == "explorer-0" else {"nowhere": 1}), max_inflight=2
    )
    pool.open("explorer-0")
    settle(pool, 1)
    (unit,) = units(1)
    pool.give("explorer-0", unit, "explore", unit, tmp_path / "gate")
    pool.open("explorer-1")
    pool.open("explorer-2")
    pool._places = Places(pool._members, Deadlines(start=1.0))  # of who has none yet
    assert settle(pool, 2) == [Unplaced("explorer-1", 1.0), Unplaced("explorer-2", 1.0)]
    assert pool.roll.at_work == 1
    assert pool.roll.states()["explorer-1"] == "waiting for a place"
    pool.drain("explorer-0")
    pool.drain("explorer-2")
    assert settle(pool, 1) == [Left("explorer-2")]
    assert pool.roll.states()["explorer-0"] == "explore p0, then leaves"
    assert pool.slots() == []
    (tmp_path / "gate").touch()
    assert settle(pool, 2) == [Done("explorer-0", unit, unit.id), Left("explorer-0")]
    with pytest.raises(RunError, match=r"explorer-1 found no room in the cluster within 1 s .* no other worker"):
        settle(pool, 1)


class Warms(Worker):
    """Compiles for two shapes, the second time when it is told to."""

    def start(self) -> Attestation:
        return dataclasses.replace(super().start(), warm_ups=2)

    def warm_up(self, shape: int, go: Path) -> None:
        deadline = time.monotonic() + 60.0
        while shape == 1 and not go.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("early", [False, True], ids=["", "started before there is a revision"])
def test_who_compiles_shows_how_far_it_is_and_loads_a_revision_after_that(early: bool, tmp_path: Path) -> None:
    pool = pool_of(Warms)
    go = tmp_path / "go"
    pool.open("explorer-0")
    happened = settle(pool, 1) if early else []
    pool.publish(
        "revision 0",
        load,
        warm_up=lambda handle, shape: handle.warm_up.remote(shape, go),
    )
    assert pool.roll.warmed() == (0, 2 * early)
    started, warmed = [*happened, *settle(pool, 2 - len(happened))]
    assert isinstance(started, Started)
    assert warmed == Warmed("explorer-0", 1)
    assert (pool.roll.states(), pool.roll.warmed()) == ({"explorer-0": "warming up 2 of 2 shapes"}, (1, 2))
    assert pool.roll.census()["starting"] == 1
    assert pool.slots() == []
    go.touch()
    last, loaded = settle(pool, 2)
    assert last == Warmed("explorer-0", 0)
    assert isinstance(loaded, Loaded)
    assert pool.slots() == ["explorer-0"]
    assert pool.roll.warmed() == (2, 2)


def test_who_started_early_loads_a_revision_that_nobody_warms_up_for() -> None:
    pool = pool_of(Warms)
    pool.open("explorer-0")
    settle(pool, 1)
    pool.publish("revision 0", load)
    [loaded] = settle(pool, 1)
    assert isinstance(loaded, Loaded)
    assert pool.slots() == ["explorer-0"]


def test_a_warm_up_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    pool = pool_of(Warms, replacements=1, deadlines=Deadlines(warm_up=2.0))
    pool.open("explorer-0")
    pool.publish("revision 0", lambda handle, full: None, warm_up=lambda h, shape: h.warm_up.remote(1, tmp_path / "no"))
    _, lost = settle(pool, 2)
    assert isinstance(lost, Lost)
    assert lost.reason == "warm-up passed its deadline of 2 s"
    pool.renew()  # nobody is left at work
    assert list(pool.roll.states()) == ["explorer-0.2"]
