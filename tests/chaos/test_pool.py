"""A pool of small real actors: how a failure arrives, and who leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import ObjectLostError

from actors.cluster import termination
from actors.fleet import worker
from actors.fleet.actor_factory import Actor
from solrl_ray.config.deadlines import Deadlines
from solrl_ray.errors import RunError
from solrl_ray.records import Attestation, WorkUnit
from tests.chaos.pools import Explored, Slow, Worker, opened, revision, run, spawn, units
from tests.support.patience import patience, until

pytestmark = pytest.mark.usefixtures("local_ray")


def test_a_worker_that_cannot_get_its_inputs_is_replaced() -> None:
    def spawned(name: str) -> Actor:
        return spawn(name, failure=lambda: ObjectLostError("ab12", None, ""))

    async def test() -> None:
        async with opened(spawned, replacements=1) as stage:
            stage.pool.resize(1)
            await until(lambda: stage.of("started") == [("explorer-0.1",)])
            [(lost, reason, replacement, requeued)] = stage.of("lost")
            assert (lost, replacement, requeued) == ("explorer-0", "explorer-0.1", 0)
            assert "All copies of ab12 have been lost" in reason
            assert stage.replacements.left == 0

    run(test)


# Losses at work


class Crashes(Worker):
    """The first one dies at its first unit."""

    def explore(self, unit: WorkUnit) -> Explored:
        if self._name == "explorer-0":
            os._exit(1)
        return super().explore(unit)


class Hangs(Worker):
    """The first one hangs at its first unit."""

    def explore(self, unit: WorkUnit) -> Explored:
        if self._name == "explorer-0":
            time.sleep(3600.0)
        return super().explore(unit)


@pytest.mark.parametrize("kind", [Crashes, Hangs])
def test_the_units_of_a_worker_that_crashes_or_hangs_go_to_others_and_first(kind: type[Worker]) -> None:
    seconds = patience(3.0)

    async def test() -> None:
        async with opened(kind, max_inflight=2, replacements=1, unit_seconds=seconds) as stage:
            await stage.holding(2)
            asked = units(6)
            batch = stage.ask(asked)
            await until(lambda: len(batch.answers) == 6)
            assert set(batch.answers) == {unit.id for unit in asked}
            assert "explorer-0" not in batch.answers.values()
            [(lost, reason, replacement, requeued)] = stage.of("lost")
            assert (lost, replacement, requeued) == ("explorer-0", "explorer-0.1", 2)
            if kind is Crashes:
                assert reason.startswith("its worker is gone: ")
            else:
                assert reason.endswith(f"passed its deadline of {seconds:g} s")
            await until(lambda: stage.ready() == 2)
            assert stage.words() == {"explorer-1": "ready", "explorer-0.1": "ready"}
            assert stage.replacements.left == 0
            assert stage.hand_out.requeued(batch) == 2

    run(test)


def test_a_death_is_noticed_while_nobody_has_work_and_one_without_a_replacement_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "PING_SECONDS", 0.2)

    async def test() -> None:
        async with opened(Worker, replacements=1) as stage:
            await stage.holding(1)
            stage.world.kill(stage.pool.workers["explorer-0"].actor)
            await until(lambda: stage.ready() == 1 and "explorer-0.1" in stage.words())
            [(lost, reason, replacement, requeued)] = stage.of("lost")
            assert (lost, replacement, requeued) == ("explorer-0", "explorer-0.1", 0)
            assert reason.startswith("its worker is gone: ")
            stage.world.kill(stage.pool.workers["explorer-0.1"].actor)
            await until(lambda: False)

    with pytest.raises(RunError, match=r"^explorer-0\.1 was lost \(.*\), and all 1 replacements"):
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
            await until(lambda: len(batch.answers) == 2)
            assert batch.answers == {first.id: "explorer-0", second.id: "explorer-0.1"}
            told = "explorer-0 was told to end by SIGTERM"
            assert stage.of("lost") == [("explorer-0", told, "explorer-0.1", 1)]
            idle = stage.pool.workers["explorer-0.1"].actor.handle
            await idle.__ray_call__.remote(lambda _: os.kill(os.getpid(), signal.SIGTERM))
            await until(lambda: stage.words() == {"explorer-0.2": "ready"})
            told = "explorer-0.1 was told to end by SIGTERM"
            assert stage.of("lost")[1] == ("explorer-0.1", told, "explorer-0.2", 0)

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
            await until(lambda: len(stage.of("unplaced")) == 2)
            assert stage.of("unplaced") == [("explorer-1", 1.0, 1), ("explorer-2", 1.0, 1)]
            assert stage.pool.at_work == 1
            assert stage.words()["explorer-1"] == "waiting for a place"
            assert stage.pool.resize(2) == ["explorer-2"]
            await until(lambda: stage.of("left") == [("explorer-2",)])
            [(leaver, successor)] = stage.pool.leave_nodes([stage.pool.workers["explorer-0"].node])
            assert (leaver, successor) == ("explorer-0", "explorer-0.1")
            assert stage.words()["explorer-0"] == "explore p0, then leaves"
            more = stage.ask(units(2)[1:], tmp_path / "gate")  # not for who leaves
            await asyncio.sleep(0.2)
            (tmp_path / "gate").touch()
            await until(lambda: stage.of("left") == [("explorer-2",), ("explorer-0",)])
            assert batch.answers == {unit.id: "explorer-0"}
            assert not more.answers
            assert len(stage.of("unplaced")) <= 3, "each is told of once"
            await until(lambda: False)

    said = r"^explorer-1, explorer-0\.1 found no room in the cluster within 1 s .* no other worker of the pool is left"
    with pytest.raises(RunError, match=said):
        run(test)


# Who compiles


class Warms(Worker):
    """Compiles for two shapes, the second time when the file is there."""

    def start(self) -> Attestation:
        return replace(super().start(), warm_ups=2)

    def warm_up(self, shape: int, probe: str) -> None:
        while shape == 1 and not Path(probe).exists():
            time.sleep(0.02)


def test_who_compiles_shows_how_far_it_is_loads_a_revision_after_that_and_has_a_deadline(tmp_path: Path) -> None:
    seconds = patience(3.0)

    async def test() -> None:
        async with opened(Warms, replacements=1, deadlines=Deadlines(warm_up=seconds)) as stage:
            stage.pool.resize(1)
            await until(lambda: stage.of("started"))
            assert stage.pool.warmed() == (0, 2)
            batch = stage.ask(units(1))
            stage.publish(revision(0), probe=str(tmp_path / "go"))
            await until(lambda: stage.pool.warmed() == (1, 2))
            assert stage.words() == {"explorer-0": "warming up 2 of 2 shapes"}
            assert stage.pool.census()["starting"] == 1
            assert not stage.of("loaded")
            await until(lambda: stage.of("lost"))
            late = f"warm-up passed its deadline of {seconds:g} s"
            assert stage.of("lost") == [("explorer-0", late, "explorer-0.1", 0)]
            (tmp_path / "go").touch()
            await until(lambda: batch.answers)
            assert stage.of("loaded") == [("explorer-0.1", 0)]
            assert stage.pool.warmed() == (2, 2)

    run(test)
