"""A pool of small real actors: how a failure arrives, and who leaves."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ObjectLostError

from actors.cluster import termination
from actors.fleet import worker
from actors.fleet.actor_factory import Actor
from solrl_ray.config.deadlines import Deadlines
from solrl_ray.errors import RunError, UserError
from solrl_ray.records import Attestation, WorkUnit
from tests.chaos.pools import Explored, Failure, Slow, Stage, Worker, opened, revision, run, spawn, units, until

pytestmark = pytest.mark.usefixtures("local_ray")


async def kill(stage: Stage, name: str) -> None:
    """End a worker's process."""
    stage.world.kill(stage.pool.workers[name].actor)


# Beginnings that fail


def failing(failure: Failure, first: str = "explorer-0") -> Callable[[str], Actor]:
    """Makes workers of which this one fails in its start."""
    return lambda name: spawn(name, failure=failure if name == first else None)


def test_bad_input_found_in_start_ends_the_run_with_its_own_sentence() -> None:
    async def test() -> None:
        async with opened(failing(lambda: UserError("model.path: no such folder")), replacements=1) as stage:
            stage.pool.resize(1)
            await until(lambda: False)

    with pytest.raises(UserError, match=r"^model\.path: no such folder$"):
        run(test)


def test_a_worker_that_cannot_get_its_inputs_is_replaced() -> None:
    async def test() -> None:
        async with opened(failing(lambda: ObjectLostError("ab12", None, "")), replacements=1) as stage:
            stage.pool.resize(1)
            await stage.until(lambda: stage.of("started") == [("explorer-0.1",)])
            [(lost, reason, replacement, requeued)] = stage.of("lost")
            assert (lost, replacement, requeued) == ("explorer-0", "explorer-0.1", 0)
            assert "All copies of ab12 have been lost" in reason
            assert stage.replacements.left == 0

    run(test)


class Dies(Worker):
    def start(self) -> Attestation:
        os._exit(1)


def test_who_cannot_start_leaves_those_at_work_alone_at_once_or_after_a_second_try() -> None:
    def spawned(name: str) -> Actor:
        if name.startswith("explorer-2"):
            return spawn(name, kind=Dies)
        return failing(lambda: UserError("model.path: no such folder"), "explorer-1")(name)

    async def test() -> None:
        async with opened(spawned, replacements=1) as stage:
            await stage.holding(1)
            stage.pool.resize(2)
            await stage.until(lambda: stage.of("unfit") == [("explorer-1", "model.path: no such folder")])
            assert stage.replacements.left == 1
            stage.pool._next_slot = 2
            stage.pool.resize(2)
            await stage.until(lambda: len(stage.of("unfit")) == 2)
            [(lost, _, replacement, _)] = stage.of("lost")
            assert (lost, replacement) == ("explorer-2", "explorer-2.1")
            assert stage.of("unfit")[1][0] == "explorer-2.1"
            assert stage.of("unfit")[1][1].startswith("its worker is gone: ")
            assert stage.replacements.left == 0
            assert stage.words() == {"explorer-0": "ready"}

    run(test)


def test_workers_that_die_in_their_start_end_the_run_when_no_replacement_is_left() -> None:
    async def test() -> None:
        async with opened(Dies, replacements=1) as stage:
            stage.pool.resize(1)
            await until(lambda: False)

    said = r"^explorer-0\.1 was lost \(.*\), and all 1 replacements of fleet\.max_replacements are used$"
    with pytest.raises(RunError, match=said):
        run(test)


# Losses at work


class Fails(Worker):
    """The first one dies, or hangs, at its first unit."""

    HOW = ""

    def explore(self, unit: WorkUnit) -> Explored:
        if self._name == "explorer-0":
            if self.HOW == "dies":
                os._exit(1)
            time.sleep(3600.0)
        return super().explore(unit)


class Crashes(Fails):
    HOW = "dies"


@pytest.mark.parametrize("kind", [Crashes, Fails], ids=["crashes", "hangs"])
def test_the_units_of_a_worker_that_crashes_or_hangs_go_to_others_and_first(kind: type[Worker]) -> None:
    async def test() -> None:
        async with opened(kind, max_inflight=2, replacements=1, unit_seconds=3.0) as stage:
            await stage.holding(2)
            asked = units(6)
            batch = stage.ask(asked)
            await stage.until(lambda: len(batch.answers) == 6)
            assert set(batch.answers) == {unit.id for unit in asked}
            assert "explorer-0" not in batch.answers.values()
            [(lost, reason, replacement, requeued)] = stage.of("lost")
            assert (lost, replacement, requeued) == ("explorer-0", "explorer-0.1", 2)
            if kind is Crashes:
                assert reason.startswith("its worker is gone: ")
            else:
                assert reason == "explore (iteration 1, prompt p0, 1 of its seeds) passed its deadline of 3 s"
            await stage.until(lambda: stage.ready() == 2)
            assert stage.words() == {"explorer-1": "ready", "explorer-0.1": "ready"}
            assert stage.replacements.left == 0
            assert stage.router.requeued(batch) == 2

    run(test)


def test_a_death_is_noticed_while_nobody_has_work_and_one_without_a_replacement_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "PING_SECONDS", 0.2)

    async def test() -> None:
        async with opened(Worker, replacements=1) as stage:
            await stage.holding(1)
            await kill(stage, "explorer-0")
            await stage.until(lambda: stage.ready() == 1 and "explorer-0.1" in stage.words())
            [(lost, reason, replacement, requeued)] = stage.of("lost")
            assert (lost, replacement, requeued) == ("explorer-0", "explorer-0.1", 0)
            assert reason.startswith("its worker is gone: ")
            await kill(stage, "explorer-0.1")
            await until(lambda: False)

    with pytest.raises(RunError, match=r"^explorer-0\.1 was lost \(.*\), and all 1 replacements"):
        run(test)


def test_a_death_is_noticed_while_a_worker_that_has_started_waits_for_the_first_revision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "PING_SECONDS", 0.2)

    async def test() -> None:
        async with opened(Worker, replacements=1) as stage:
            stage.pool.resize(1)
            await stage.until(lambda: stage.of("started"))
            await kill(stage, "explorer-0")
            await stage.until(lambda: ("explorer-0.1",) in stage.of("started"))
            stage.publish(revision(0))
            await stage.until(lambda: stage.words() == {"explorer-0.1": "ready"})

    run(test)


class Told(Worker):
    """The first one is told to end in the middle of its first unit, as by a batch system that takes its node back."""

    def start(self) -> Attestation:
        termination.listen()
        return super().start()

    def explore(self, unit: WorkUnit) -> Explored:
        termination.check(self._name)
        if "." not in self._name:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().explore(unit)


def test_who_gets_sigterm_finishes_its_unit_and_is_replaced_at_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PING_SECONDS", 0.2)

    async def test() -> None:
        async with opened(Told, max_inflight=2) as stage:
            await stage.holding(1)
            first, second = units(2)
            batch = stage.ask([first, second])
            await stage.until(lambda: len(batch.answers) == 2)
            assert batch.answers == {first.id: "explorer-0", second.id: "explorer-0.1"}
            told = "explorer-0 was told to end by SIGTERM"
            assert stage.of("lost") == [("explorer-0", told, "explorer-0.1", 1)]
            idle = stage.pool.workers["explorer-0.1"].actor.handle
            await idle.__ray_call__.remote(lambda _: os.kill(os.getpid(), signal.SIGTERM))
            await stage.until(lambda: stage.words() == {"explorer-0.2": "ready"})
            told = "explorer-0.1 was told to end by SIGTERM"
            assert stage.of("lost")[1] == ("explorer-0.1", told, "explorer-0.2", 0)

    run(test)


def test_who_is_retired_is_replaced_and_its_units_are_done_again() -> None:
    async def test() -> None:
        async with opened(Fails, replacements=1) as stage:
            await stage.holding(1)
            (unit,) = units(1)
            batch = stage.ask([unit])
            await stage.until(lambda: stage.words() == {"explorer-0": "explore p0"})
            stage.pool.retire("explorer-0", "strike 3: NaN")
            await stage.until(lambda: batch.answers == {unit.id: "explorer-0.1"})
            assert stage.of("lost") == [("explorer-0", "strike 3: NaN", "explorer-0.1", 1)]
            stage.pool.retire("explorer-0", "strike 4: NaN")  # it has gone already
            await asyncio.sleep(0.2)
            assert list(stage.words()) == ["explorer-0.1"]

    run(test)


# Those that leave, and those that find no place


def placed(first: str) -> Callable[[str], Actor]:
    """Makes workers of which only this one finds a place."""
    return lambda name: spawn(name, kind=Slow, resources={} if name == first else {"nowhere": 1})


def test_who_is_to_leave_finishes_first_and_a_pool_whose_rest_finds_no_place_ends_the_run(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(placed("explorer-0"), max_inflight=2, deadlines=Deadlines(start=30.0)) as stage:
            await stage.holding(1)
            stage.pool._deadlines = Deadlines(start=1.0)  # of those who have no place yet
            (unit,) = units(1)
            batch = stage.ask([unit], tmp_path / "gate")
            stage.pool.resize(3)
            await stage.until(lambda: len(stage.of("unplaced")) == 2)
            assert stage.of("unplaced") == [("explorer-1", 1.0, 1), ("explorer-2", 1.0, 1)]
            assert stage.pool.at_work == 1
            assert stage.words()["explorer-1"] == "waiting for a place"
            assert stage.pool.resize(2) == ["explorer-2"]
            await stage.until(lambda: stage.of("left") == [("explorer-2",)])
            [(leaver, successor)] = stage.pool.leave_nodes([stage.pool.workers["explorer-0"].node])
            assert (leaver, successor) == ("explorer-0", "explorer-0.1")
            assert stage.words()["explorer-0"] == "explore p0, then leaves"
            more = stage.ask(units(2)[1:], tmp_path / "gate")  # not for who leaves
            await asyncio.sleep(0.2)
            (tmp_path / "gate").touch()
            await stage.until(lambda: stage.of("left") == [("explorer-2",), ("explorer-0",)])
            assert batch.answers == {unit.id: "explorer-0"}
            assert not more.answers
            assert len(stage.of("unplaced")) <= 3, "each is told of once"
            await until(lambda: False)

    said = r"^explorer-1, explorer-0\.1 found no room in the cluster within 1 s .* no other worker of the pool is left"
    with pytest.raises(RunError, match=said):
        run(test)


def test_who_has_no_place_is_told_of_soon_if_others_are_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PLACE_SECONDS", 0.5)

    async def test() -> None:
        async with opened(placed("explorer-0"), max_inflight=2, deadlines=Deadlines(start=300.0)) as stage:
            await stage.holding(1)
            stage.pool.resize(2)
            await stage.until(lambda: bool(stage.of("unplaced")))
            assert stage.of("unplaced") == [("explorer-1", 0.5, 1)]

    run(test)


def test_an_error_of_a_units_own_ends_the_run_with_it() -> None:
    class Wrong(Worker):
        def explore(self, unit: WorkUnit) -> Explored:
            raise UserError("the reward has no such file")

    async def test() -> None:
        async with opened(Wrong, replacements=1) as stage:
            await stage.holding(1)
            stage.ask(units(1))
            await until(lambda: False)

    with pytest.raises(UserError, match=re.escape("the reward has no such file")):
        run(test)


def test_a_run_that_ends_leaves_no_process_behind(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(Slow) as stage:
            await stage.holding(1)
            stage.ask(units(1), tmp_path / "never")
            await stage.until(lambda: stage.words() == {"explorer-0": "explore p0"})
            handles.append(stage.pool.workers["explorer-0"].actor.handle)

    handles: list[Any] = []
    run(test)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(handles[0].__ray_ready__.remote(), timeout=60.0)
